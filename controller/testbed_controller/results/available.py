"""The metrics that runs have: names, definitions and values, with one name for each member of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from testbed.scenario.expect import look_up
from testbed.trace.metrics_spec import Metric
from testbed_controller.results.run import Run


def all_metrics(runs: Sequence[Run]) -> dict[str, Metric]:
    """Return all metrics available to any of the runs, by name.

    A compared metric with a value for each member of a group, such as ``metrics.<metric>``, is replaced by one metric
    for each member, such as ``metrics.f1``. The members of other groups, such as layers, would be too many.
    """
    metrics: dict[str, Metric] = {}
    for run in runs:
        for name, metric in run.metric_definitions.items():
            if "<" in name and metric.compared:
                metrics |= _member_metrics(metric, run.metrics)
            else:
                metrics[name] = metric
    return metrics


def _member_metrics(metric: Metric, metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Return a metric for each member of the group of a metric that a run has, by name."""
    group, _, last = metric.name.partition(".")
    members = metrics.get(group)
    if not isinstance(members, Mapping):
        return {metric.name: metric}
    # After the placeholder, such as `<metric>`: a field of each member, or nothing.
    _, dot, field = last.partition(".")
    definitions = {}
    for member in members:
        name = f"{group}.{member}{dot}{field}"
        definitions[name] = replace(metric, name=name)
    return definitions


def metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Return a metric of a run by its name in `all_metrics`; None if missing.

    >>> metric_value({"loss": 0.5, "metrics": {"f1": 0.9}}, "metrics.f1")
    0.9
    """
    value = metrics[name] if name in metrics else look_up(metrics, name)
    # A group is not one value: its members have names of their own.
    return None if isinstance(value, Mapping) else value
