"""Names, definitions and values of the metrics that runs have.

A method may define one metric for each member of a group, such as each layer: ``layers.<layer>.dropped``. The members
are known only from the values of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from testbed.scenario.expect import look_up
from testbed.trace.metrics_spec import Metric
from testbed_controller.results.run import Run


def all_metrics(runs: Sequence[Run]) -> dict[str, Metric]:
    """Return all metrics available to any of the runs, by name.

    If `testbed compare` shows a metric of a group, such as ``metrics.<metric>``, one metric for each member, such as
    ``metrics.f1``, replaces it. Other groups, such as layers, would have too many members and keep their one name.
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
    """Return a metric for each member of a metric's group in the values of a run, by name."""
    # ``metrics.<metric>``, or ``layers.<layer>.dropped`` with a field of each member.
    group, _, member_pattern = metric.name.partition(".")
    members = metrics.get(group)
    if not isinstance(members, Mapping):
        return {metric.name: metric}
    _, dot, field = member_pattern.partition(".")
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
    # A mapping is a group, whose members have names of their own.
    return None if isinstance(value, Mapping) else value
