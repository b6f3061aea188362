"""Metrics of runs in timeslots, in addition to the common ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from testbed.ml.slots.planner import SlotDetails, timetable_of
from testbed.trace.events import EventType
from testbed.trace.intervals import Interval
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed.trace.record import RunView

GOOD = 0.8
"""Target accuracy of the paper's time measurement."""


def _last_evaluation(field: str, record: RunView) -> float | None:
    """Return a field of the last evaluation; a gathered accuracy may be replaced by ``one`` device's."""
    evaluations = record.of("evaluate")
    fields: Mapping[str, Any] = evaluations[-1].fields if evaluations else {}
    if field == "gathered":
        return fields["accuracy"] if "one" in fields else None
    value: float | None = fields.get(
        field, fields.get("accuracy") if field == "one" else None
    )
    return value


def _passed_counts(passing: str, record: RunView) -> float | None:
    """Sum each device's last count: counts include tests and continue until a restart."""
    last = {
        event.device: event.fields
        for event in record.of("passed")
        if event.fields["to"] == passing
    }
    due = sum(fields["due"] for fields in last.values())
    return sum(fields["came"] for fields in last.values()) / due if due else None


def _test_intervals(record: RunView) -> list[Interval]:
    """A test begins with its event and ends with an evaluation, while no training is under way."""
    begins = [event.time for event in record.of("tests")]
    ends = [event.time for event in record.of("evaluate")]
    return list(
        zip(begins, [*ends, *[float("inf")] * (len(begins) - len(ends))], strict=False)
    )


def _training_casts(record: RunView) -> list[int]:
    """Return the number of receivers of each cast."""
    spans, counts = _test_intervals(record), list[int]()
    for _, (times, peers) in record.of("cast").columns("time", "peers"):
        at = np.fromiter(times, float)
        training = np.ones(len(at), bool)
        for begin, end in spans:
            training &= (at < begin) | (end <= at)
        counts += compress(map(len, peers), training.tolist())
    return counts


def details_of(record: RunView) -> SlotDetails:
    """Return the plan details of a run; runs read from disk have plain values of the same names."""
    details: Any = record.plan.details
    return details  # type: ignore[no-any-return]


def _last_backward(record: RunView) -> float:
    """Return the start of the last backward; 0 without one."""
    begun = record.of("begin").columns("time", "span")
    return max(
        (
            time
            for _, row in begun
            for time, span in zip(*row, strict=False)
            if span == "backward"
        ),
        default=0.0,
    )


def _count_timeslots(record: RunView) -> float | None:
    """Count the slots by the clock, in seconds, tolerating rounding to the previous slot."""
    last, details = record.cached(_last_backward), details_of(record)
    return (last - (details.begin or 0.0) + 1e-6) // details.slot + 1 if last else None


def _time_to_good(record: RunView) -> float | None:
    """Return the training seconds until the target, without tests, as if the pipeline had never drained."""
    details = details_of(record)
    reached = (
        event.fields["step"]
        for event in record.of("evaluate")
        if event.fields["accuracy"] >= GOOD
    )
    step = next(reached, None)
    return (
        None
        if step is None
        else timetable_of(details).slot_count(step * details.micro_batches)
        * details.slot
    )


def _count_casts(record: RunView) -> int:
    return len(record.cached(_training_casts))


def _count_transmissions(record: RunView) -> int:
    """Count packets as in the paper: one per receiver."""
    return sum(record.cached(_training_casts))


def _success_rate(count: Callable[[RunView], int], record: RunView) -> float | None:
    last = record.cached(_last_backward)
    seconds = (
        last
        - (details_of(record).begin or 0.0)
        - sum(end - begin for begin, end in _test_intervals(record) if end < last)
    )
    return count(record) / seconds / len(record.plan.devices) if seconds > 0 else None


DECLARED = MetricsSpec(
    figures=(
        *(
            Metric(
                f"{passing}_passed",
                "share",
                f"share of {needed} that arrived in time",
                partial(_passed_counts, passing),
            )
            for passing, needed in (
                ("forward", "the outputs needed from other devices"),
                ("backward", "the losses needed from other devices"),
                ("sharing", "the shared results of the output layer"),
            )
        ),
        Metric(
            "training_casts",
            "number",
            "broadcasts in training, including acknowledgements",
            _count_casts,
        ),
        Metric(
            "training_transmissions",
            "number",
            "the same, counted for each receiver: the transmissions of the papers",
            _count_transmissions,
        ),
        Metric(
            "casts_rate",
            "number",
            "broadcasts per second and device in training",
            partial(_success_rate, _count_casts),
        ),
        Metric(
            "transmissions_rate",
            "number",
            (
                "transmissions per second and device in training, counted for each "
                "receiver"
            ),
            partial(_success_rate, _count_transmissions),
        ),
        Metric(
            "timeslots",
            "number",
            "timeslots until the last backward pass, including tests between steps",
            _count_timeslots,
        ),
        Metric(
            "time_to_80",
            "seconds",
            (
                "time of training without tests until the first evaluation with an "
                "accuracy of 80 %"
            ),
            _time_to_good,
        ),
        *(
            Metric(
                f"accuracy_{field}", "share", meaning, partial(_last_evaluation, field)
            )
            for field, meaning in (
                (
                    "one",
                    "accuracy by the results that the coordinator received",
                ),
                (
                    "any",
                    "accuracy by the results that at least one device of the output layer received",
                ),
                ("gathered", "accuracy by complete results"),
                ("deviation", "standard deviation of the accuracy over the test runs"),
            )
        ),
    ),
    events=(
        EventType(
            "tests", "training pauses, and test runs begin", ("batch",), ("step",)
        ),
        EventType(
            "passed",
            "parts needed from other devices so far, and parts that arrived",
            (),
            ("to", "due", "came"),
        ),
    ),
)
