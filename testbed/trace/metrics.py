"""Computation of all metrics of a run from its events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from testbed.experiment import Experiment
from testbed.plan import Plan
from testbed.trace import devices, phases, recovery, traffic
from testbed.trace.events import finite
from testbed.trace.metrics_spec import NOTHING, MetricsSpec
from testbed.trace.outcome import Outcome
from testbed.trace.record import RunView
from testbed.trace.registry import metrics_of
from testbed.trace.verdict import verdict

MAX_ROWS = 100_000
"""Maximum number of listed steps, evaluations or requests. Longer lists are thinned; metrics use all entries."""
Row = TypeVar("Row")


def metrics(
    outcome: Outcome,
    experiment: Experiment,
    plan: Plan,
    declared: MetricsSpec = NOTHING,
) -> dict[str, Any]:
    """Return the contents of ``metrics.json`` as plain values, in seconds, bytes, bit/s and fractions of one.

    ``declared`` are the definitions of the method and its workload. The metrics by name, which ``expect`` may use, are
    those of ``metrics_of(declared)``; metrics without the required events are absent. Further keys:

    - ``runtime``, ``error``, and ``weights`` (their file, or None if they were drawn from the seed),
    - ``series``: ``steps`` (with the device if several devices report steps), ``evaluations``, ``requests``, and
      ``objects`` (boxes of each sample),
    - ``devices`` by name (`testbed.trace.devices`), ``links`` (those used or measured; `testbed.trace.traffic`),
    - ``fault_list``, ``recovery_list`` (`testbed.trace.recovery`), ``phase_list`` (`testbed.trace.phases`),
    - ``verdict`` (`testbed.trace.verdict`), and the lists that the method declares.
    """
    record = RunView(outcome, experiment, plan, declared.events, declared.recovery)
    result: dict[str, Any] = {
        "runtime": outcome.runtime,
        "error": outcome.error,
        "weights": experiment.workload.initial_weights,
    }
    # Metrics with a value for each layer or other member are added last, below the key of their group.
    grouped: dict[str, Mapping[str, Any]] = {}
    for name, metric in metrics_of(declared).items():
        value = metric.compute(record)
        if isinstance(value, Mapping):
            grouped[name] = value
        elif value is not None:
            result[name] = value
    result |= {
        "series": _series_lists(record),
        "devices": {
            name: dict(row) for name, row in record.cached(devices.devices).items()
        },
        "links": record.cached(traffic.links),
        "fault_list": recovery.faults(record),
        "recovery_list": record.cached(recovery.recovery_list),
        "phase_list": record.cached(phases.phases),
    }
    for name, list_items in (declared.lists or {}).items():
        items = list_items(record)
        if items:
            result[name] = items
    result["verdict"] = record.cached(verdict)
    for name, values in grouped.items():
        _add_grouped_metric(result, name, values)
    # JSON has no NaN, so a loss that is not finite becomes null.
    plain: dict[str, Any] = finite(result)
    return plain


def _add_grouped_metric(
    result: dict[str, Any], name: str, values: Mapping[str, Any]
) -> None:
    """Add the values of a metric with a value for each member of a group.

    The metric ``layers.<layer>.dropped`` adds ``{"layers": {"2": {"dropped": value}}}``, and ``metrics.<metric>`` adds
    ``{"metrics": {"f1": value}}``.
    """
    # A method may compute a mapping for a name without a placeholder, which is then the group itself.
    group, *placeholder_and_last = name.split(".")
    last_parts = placeholder_and_last[1:]
    members = result.setdefault(group, {})
    for member, value in values.items():
        if last_parts:
            members[member] = members.get(member, {}) | {last_parts[0]: value}
        else:
            members[member] = value


def _series_lists(record: RunView) -> dict[str, list[dict[str, Any]]]:
    has_several_devices = len({step.device for step in record.steps}) > 1
    steps = []
    for step in _thin_rows(record.steps):
        row: dict[str, Any] = {
            "step": step.step,
            "time": step.time,
            "seconds": step.seconds,
            "loss": step.loss,
            "samples": step.samples,
            "steady": step.steady,
        }
        if has_several_devices:
            row["device"] = step.device
        steps.append(row)

    def timed_rows(name: str) -> list[dict[str, Any]]:
        events = _thin_rows(record.of(name))
        return [{"time": event.time, **event.fields} for event in events]

    return {
        "steps": steps,
        "evaluations": timed_rows("evaluate"),
        "requests": timed_rows("request"),
        "objects": [dict(event.fields) for event in record.of("objects")],
    }


def _thin_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield all rows, or every n-th of more than `MAX_ROWS`."""
    step = math.ceil(len(rows) / MAX_ROWS)
    return islice(rows, 0, None, max(1, step))
