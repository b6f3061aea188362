"""Computation of all metrics of a run from its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from testbed.experiment import Experiment
from testbed.plan import Plan
from testbed.trace import devices, phases, recovery, traffic
from testbed.trace.events import finite
from testbed.trace.metrics_spec import NOTHING, MetricsSpec
from testbed.trace.outcome import Outcome
from testbed.trace.record import RunView, Step
from testbed.trace.registry import figures_of
from testbed.trace.verdict import verdict

MOST_ROWS = 100_000
"""Maximum number of listed steps, evaluations or requests; longer lists are thinned, while metrics use all."""
Row = TypeVar("Row")


def metrics(
    outcome: Outcome,
    experiment: Experiment,
    plan: Plan,
    declared: MetricsSpec = NOTHING,
) -> dict[str, Any]:
    """Return the figures of a run as plain JSON values. Seconds, bytes, bit/s and fractions of one throughout.

    Figures by name, the ones that ``expect`` may use, are those of ``figures_of(declared)``; one that the run gives no
    ground for is absent. Further keys: ``runtime``, ``error``, ``weights`` (the file that they were read from, None
    where they were drawn from the seed); ``series`` (``steps``: step, time, seconds, loss, samples, steady, and the
    device where several report some; ``evaluations``; ``requests``: of more than `MOST_ROWS` every n-th; ``objects``:
    boxes of each sample asked about), ``devices`` by name (``testbed.trace.devices``), ``links`` (those used or
    measured), ``fault_list``, ``recovery_list``, ``phase_list`` (``testbed.trace.phases``), ``verdict``
    (``testbed.trace.verdict``), and the lists that the method declares.

    The steady phase is every step but a device's first that has the usual number of samples and whose time holds no
    fault, no recovery, no pause, and no evaluation unless that of most steps does.
    """
    record = RunView(outcome, experiment, plan, declared.events, declared.recovery)
    values = {
        name: figure.compute(record) for name, figure in figures_of(declared).items()
    }
    lists = (
        (name, compute(record)) for name, compute in (declared.lists or {}).items()
    )
    result: dict[str, Any] = {
        "runtime": outcome.runtime,
        "error": outcome.error,
        "weights": experiment.workload.initial_weights,
        **{
            name: value
            for name, value in values.items()
            if not isinstance(value, Mapping | None)
        },
        "series": _series_lists(record),
        "devices": {
            name: dict(row) for name, row in record.cached(devices.devices).items()
        },
        "links": record.cached(traffic.links),
        "fault_list": recovery.faults(record),
        "recovery_list": record.cached(recovery.recovery_list),
        "phase_list": record.cached(phases.phases),
        **{name: items for name, items in lists if items},
        "verdict": record.cached(verdict),
    }
    for name, value in values.items():
        if isinstance(value, Mapping):
            group, _, *last = name.split(".")
            for member, each in value.items():
                result.setdefault(group, {})[member] = (
                    each
                    if not last
                    else result.get(group, {}).get(member, {}) | {last[0]: each}
                )
    clean: dict[str, Any] = finite(result)
    return clean


def _series_lists(record: RunView) -> dict[str, list[dict[str, Any]]]:
    several = len({step.device for step in record.steps}) > 1

    def timed(name: str) -> list[dict[str, Any]]:
        return [
            {"time": event.time, **event.fields}
            for event in _thin_rows(record.of(name))
        ]

    return {
        "steps": [
            _step_row(step) | ({"device": step.device} if several else {})
            for step in _thin_rows(record.steps)
        ],
        "evaluations": timed("evaluate"),
        "requests": timed("request"),
        "objects": [dict(event.fields) for event in record.of("objects")],
    }


def _thin_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield all rows, or every n-th of more than `MOST_ROWS`."""
    return islice(rows, 0, None, -(-len(rows) // MOST_ROWS) or 1)


def _step_row(step: Step) -> dict[str, Any]:
    return {
        "step": step.step,
        "time": step.time,
        "seconds": step.seconds,
        "loss": step.loss,
        "samples": step.samples,
        "steady": step.steady,
    }
