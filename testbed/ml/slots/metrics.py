"""Metrics of runs in timeslots, in addition to the common ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import compress
from statistics import fmean
from typing import Any

import numpy as np

from testbed.ml.slots.planner import SlotDetails, timetable_of
from testbed.trace.events import EventType
from testbed.trace.intervals import Interval
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed.trace.record import RunView

TARGET_ACCURACY = 0.8
"""Target accuracy of the paper's time measurement."""


def _last_evaluation(field: str, record: RunView) -> float | None:
    """Return a field of the last evaluation.

    The event's field ``accuracy`` is the accuracy by the results that the coordinator received, unless results are
    gathered: then it is the accuracy by complete results, and the accuracy by received results is in the field
    ``coordinator_accuracy``. As an argument, ``coordinator_accuracy`` stands for the latter in both cases, and
    ``gathered`` for the accuracy by complete results.
    """
    evaluations = record.of("evaluate")
    fields: Mapping[str, Any] = {}
    if evaluations:
        fields = evaluations[-1].fields
    is_gathered = "coordinator_accuracy" in fields
    if field == "gathered":
        return fields["accuracy"] if is_gathered else None
    if field == "coordinator_accuracy" and not is_gathered:
        field = "accuracy"
    value: float | None = fields.get(field)
    return value


def _accuracy_mean(record: RunView) -> float | None:
    """Return the mean accuracy over all evaluations; None for a run without evaluations."""
    accuracies = [event.fields["accuracy"] for event in record.of("evaluate")]
    return fmean(accuracies) if accuracies else None


def _received_share(purpose: str, record: RunView) -> float | None:
    """Return the share of parts received in time, over all devices."""
    # The counts of a device, tests included, grow until it restarts, so its last event has its totals.
    totals: dict[str, Mapping[str, Any]] = {}
    for event in record.of("parts_received"):
        if event.fields["purpose"] == purpose:
            totals[event.device] = event.fields
    expected = sum(fields["expected"] for fields in totals.values())
    received = sum(fields["received"] for fields in totals.values())
    if not expected:
        return None
    share: float = received / expected
    return share


def _test_intervals(record: RunView) -> list[Interval]:
    """Return the intervals of tests, from the event `test_start` to an evaluation; training pauses meanwhile."""
    starts = [event.time for event in record.of("test_start")]
    ends = [event.time for event in record.of("evaluate")]
    # A run that failed during tests has no evaluation at its end.
    while len(ends) < len(starts):
        ends.append(math.inf)
    return list(zip(starts, ends, strict=False))


def _training_casts(record: RunView) -> list[int]:
    """Return the number of receivers of each cast in training."""
    tests = _test_intervals(record)
    counts: list[int] = []
    # Arrays, since a long run has millions of casts.
    for _, (times, peers) in record.of("cast").columns("time", "peers"):
        instants = np.fromiter(times, float)
        is_training = np.ones(len(instants), bool)
        for begin, end in tests:
            is_training &= (instants < begin) | (end <= instants)
        counts += compress(map(len, peers), is_training.tolist())
    return counts


def details_of(record: RunView) -> SlotDetails:
    """Return the plan details of a run; runs read from disk have plain values of the same names."""
    details: Any = record.plan.details
    return details  # type: ignore[no-any-return]


def _last_backward(record: RunView) -> float:
    """Return the start of the last backward, in seconds; 0 without one."""
    last = 0.0
    for _, (times, spans) in record.of("begin").columns("time", "span"):
        for time, span in zip(times, spans, strict=False):
            if span == "backward":
                last = max(last, time)
    return last


def _count_timeslots(record: RunView) -> float | None:
    """Return the number of timeslots until the last backward, from its time."""
    last_backward = record.cached(_last_backward)
    if not last_backward:
        return None
    details = details_of(record)
    start = details.start_time or 0.0
    # A backward may begin a rounding error before its slot.
    elapsed = last_backward - start + 1e-6
    return elapsed // details.timeslot + 1


def _time_to_target(record: RunView) -> float | None:
    """Return the seconds of training until the target accuracy, without tests, as if the pipeline had never drained."""
    details = details_of(record)
    for event in record.of("evaluate"):
        if event.fields["accuracy"] >= TARGET_ACCURACY:
            batches = event.fields["step"] * details.micro_batches
            slots = timetable_of(details).slot_count(batches)
            return slots * details.timeslot
    return None


def _count_casts(record: RunView) -> int:
    return len(record.cached(_training_casts))


def _count_transmissions(record: RunView) -> int:
    """Return the number of transmissions, of which the paper counts one for each receiver of a cast."""
    return sum(record.cached(_training_casts))


def _training_rate(count: Callable[[RunView], int], record: RunView) -> float | None:
    """Return a count per second of training, tests excluded, and per device."""
    last_backward = record.cached(_last_backward)
    test_seconds = 0.0
    for start, end in _test_intervals(record):
        # Tests after the last backward do not delay training.
        if end < last_backward:
            test_seconds += end - start
    start_time = details_of(record).start_time or 0.0
    seconds = last_backward - start_time - test_seconds
    if seconds <= 0:
        return None
    return count(record) / seconds / len(record.plan.devices)


def _received_metric(name: str, purpose: str, parts: str) -> Metric:
    """Return a metric: the share of parts received in time for one purpose."""
    meaning = f"share of {parts} that arrived in time"
    return Metric(name, "share", meaning, partial(_received_share, purpose))


def _accuracy_metric(name: str, field: str, meaning: str) -> Metric:
    """Return the metric of a field of the last evaluation."""
    return Metric(name, "share", meaning, partial(_last_evaluation, field))


DECLARED = MetricsSpec(
    former_metrics={
        "accuracy_any": "accuracy_at_any_device",
        "accuracy_one": "accuracy_at_coordinator",
        "backward_passed": "losses_received",
        "forward_passed": "outputs_received",
        "sharing_passed": "results_received",
    },
    metrics=(
        _received_metric(
            "outputs_received", "forward", "the outputs needed from other devices"
        ),
        _received_metric(
            "losses_received", "backward", "the losses needed from other devices"
        ),
        _received_metric(
            "results_received", "sharing", "the shared results of the output layer"
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
            partial(_training_rate, _count_casts),
        ),
        Metric(
            "transmissions_rate",
            "number",
            (
                "transmissions per second and device in training, counted for each "
                "receiver"
            ),
            partial(_training_rate, _count_transmissions),
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
            _time_to_target,
        ),
        _accuracy_metric(
            "accuracy_at_coordinator",
            "coordinator_accuracy",
            "accuracy by the results that the coordinator received",
        ),
        _accuracy_metric(
            "accuracy_at_any_device",
            "any_device_accuracy",
            "accuracy by the results that at least one device of the output layer received",
        ),
        _accuracy_metric(
            "accuracy_gathered", "gathered", "accuracy by complete results"
        ),
        Metric(
            "accuracy_mean",
            "share",
            (
                "mean accuracy over all evaluations, which measures the speed of "
                "learning without a target"
            ),
            _accuracy_mean,
        ),
        _accuracy_metric(
            "accuracy_deviation",
            "deviation",
            "standard deviation of the accuracy over the test runs",
        ),
    ),
    events=(
        EventType(
            "test_start", "training pauses, and test runs begin", ("batch",), ("step",)
        ),
        EventType(
            "parts_received",
            "parts needed from other devices so far, and parts that arrived",
            (),
            ("purpose", "expected", "received"),
        ),
    ),
)
