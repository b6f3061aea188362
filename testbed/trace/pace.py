"""Metrics of training steps: their number and duration, before, during and after disturbances.

`testbed.trace.record` defines steady (undisturbed) steps, disturbances and the last change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress
from statistics import fmean, median

from testbed.common.lazy import np
from testbed.network.link import Pair
from testbed.trace.intervals import contains, lanes, subtract, total, union
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView, Step, steps_after
from testbed.wire.framing import wire_bytes


def _final_steps(record: RunView) -> list[Step]:
    """Return the last execution of each step of each device."""
    # A recovery repeats the steps since the checkpoint, so their first execution had no lasting effect.
    return list({(step.device, step.step): step for step in record.steps}.values())


def _count_samples(record: RunView) -> int:
    return sum(step.samples or 0 for step in record.cached(_final_steps))


def _step_seconds(record: RunView) -> list[float]:
    return [step.seconds for step in record.steady]


def _median_seconds(steps: Sequence[Step]) -> float | None:
    return median(step.seconds for step in steps) if steps else None


def _first_detected_fault(record: RunView) -> float | None:
    """Return the time of the first detected fault; None without one."""
    times = [item.struck for item in record.recoveries if item.struck is not None]
    return min(times, default=None)


def _step_time_before(record: RunView) -> float | None:
    first = _first_detected_fault(record)
    if first is None:
        return None
    steps = [step for step in record.steps if step.steady and step.time <= first]
    return _median_seconds(steps)


def _step_time_after(record: RunView) -> float | None:
    return _median_seconds(steps_after(record.steps, record.last_change))


def _mean_seconds(steps: Sequence[Step]) -> float | None:
    return fmean(step.seconds for step in steps) if steps else None


def _step_time_mean_before(record: RunView) -> float | None:
    first = _first_detected_fault(record)
    if first is None:
        return None
    # Steps before a pause, such as a change of the partition, belong to another arrangement of the work.
    pauses = [pause.end for pause in record.pauses if pause.end <= first]
    begin = max(pauses, default=0.0)
    steps = steps_after(record.steps, begin)
    return _mean_seconds([step for step in steps if step.time <= first])


def _step_time_mean_after(record: RunView) -> float | None:
    return _mean_seconds(steps_after(record.steps, record.last_change))


def _step_time_during(record: RunView) -> float | None:
    spans = union(interval for _, interval in record.disturbances)
    steps = []
    for step in record.steps:
        begin, end = step.window
        is_inside = ((spans[:, 0] <= begin) & (end <= spans[:, 1])).any()
        if step.usual and is_inside:
            steps.append(step)
    return _median_seconds(steps)


def busiest_share(record: RunView) -> float | None:
    """Return the utilisation of the busiest device or link during the steps after the last change.

    None without such steps. Processors of one device count with their mean.
    """
    steps = steps_after(record.steps, record.last_change)
    windows = union(step.window for step in steps)
    seconds = total(windows)
    if seconds <= 0:
        return None
    device_seconds = []
    for spec in record.experiment.devices:
        computing = record.spans(spec.name, "compute")
        # Computations that overlap ran on different processors, whose busy times add up.
        processors = lanes(computing)
        busy = 0.0
        for number in range(processors.max(initial=-1) + 1):
            work = union(computing[processors == number])
            # Only the work within the windows counts.
            busy += total(work) - total(subtract(work, windows))
        device_seconds.append(busy / spec.processors)
    link_seconds: defaultdict[Pair, float] = defaultdict(float)
    sent = record.of("send")
    times = np.fromiter((time for (time,) in sent.rows("time")), float)
    rows = sent.rows("device", "peer", "bytes")
    for device, peer, size in compress(rows, contains(windows, times)):
        link = record.experiment.links.get((device, peer))
        if link is not None:
            link_seconds[device, peer] += link.transmission_time(wire_bytes(size))
    busiest = max([*device_seconds, *link_seconds.values()], default=0.0)
    # More than 1 is possible, since a message acknowledged within the windows may have left before them.
    return min(1.0, busiest / seconds)


def _of_steps(compute: Callable[[RunView], float]) -> Callable[[RunView], float | None]:
    """Extend a metric of steps to runs without steps, which have the value None."""
    return lambda record: compute(record) if record.steps else None


def _samples_per_second(record: RunView) -> float:
    return _count_samples(record) / record.end if record.end > 0 else 0.0


def _samples_left_out(record: RunView) -> int | None:
    events = record.of("left_out")
    return events[-1].fields["samples"] if events else None


METRICS = (
    Metric(
        "steps",
        "number",
        "completed training steps, each counted once",
        lambda record: len(record.cached(_final_steps)),
        compared=True,
    ),
    Metric(
        "steps_repeated",
        "number",
        "training steps repeated after a recovery",
        _of_steps(lambda record: len(record.steps) - len(record.cached(_final_steps))),
    ),
    Metric(
        "samples",
        "number",
        "training samples of all steps, each step counted once",
        _of_steps(_count_samples),
    ),
    Metric(
        "samples_per_second",
        "number",
        "training samples divided by the duration",
        _of_steps(_samples_per_second),
        compared=True,
    ),
    Metric(
        "left_out",
        "number",
        ("training samples left out of each epoch because they do not fill a batch"),
        _samples_left_out,
    ),
    Metric(
        "step_time",
        "seconds",
        (
            "median of the undisturbed steps; a step lasts from the previous step "
            "of the same device"
        ),
        _of_steps(lambda record: median(_step_seconds(record))),
        brief=True,
        compared=True,
    ),
    Metric(
        "step_time_mean",
        "seconds",
        "mean of the undisturbed steps",
        _of_steps(lambda record: fmean(_step_seconds(record))),
        compared=True,
    ),
    Metric(
        "step_time_p95",
        "seconds",
        "95th percentile of the undisturbed steps",
        _of_steps(lambda record: float(np.percentile(_step_seconds(record), 95))),
        compared=True,
    ),
    Metric(
        "steady_steps",
        "number",
        "number of undisturbed steps; 0 if every step was disturbed and all were used",
        _of_steps(lambda record: sum(step.steady for step in record.steps)),
    ),
    Metric(
        "predicted_step_time",
        "seconds",
        "step time predicted by the planner",
        lambda record: record.plan.step_time,
    ),
    Metric(
        "step_time_before",
        "seconds",
        "median of the undisturbed steps before the first detected fault",
        _step_time_before,
        compared=True,
    ),
    Metric(
        "step_time_after",
        "seconds",
        (
            "median of the undisturbed steps after the last recovery or pause; of "
            "all steps without any"
        ),
        _step_time_after,
        compared=True,
    ),
    Metric(
        "step_time_mean_before",
        "seconds",
        (
            "mean of the undisturbed steps between the last pause and the first "
            "detected fault"
        ),
        _step_time_mean_before,
        compared=True,
    ),
    Metric(
        "step_time_mean_after",
        "seconds",
        (
            "mean of the undisturbed steps after the last recovery or pause; of all "
            "steps without any"
        ),
        _step_time_mean_after,
        compared=True,
    ),
    Metric(
        "step_time_disturbed",
        "seconds",
        "median of the steps during disturbances, such as a long fault",
        _step_time_during,
        compared=True,
    ),
    Metric(
        "busiest_share",
        "share",
        (
            "share of these steps in which the busiest device computes or the "
            "busiest link transmits"
        ),
        busiest_share,
        compared=True,
    ),
)


def _steps_note(metrics: Metrics) -> str:
    note = "{samples_per_second} samples/s"
    if metrics["steps_repeated"]:
        note += ", {steps_repeated} of them done again"
    return note


def _time_note(metrics: Metrics) -> str:
    note = "median, no step was undisturbed"
    if metrics["steady_steps"]:
        note = "median of {steady_steps} undisturbed steps"
    if metrics.get("predicted_step_time"):
        note += "; predicted {predicted_step_time}"
    return note


ROWS = (
    Row("Steps", "{steps}", _steps_note, when=lambda metrics: metrics["steps"]),
    Row(
        "Left out",
        "{left_out}",
        "training samples of each epoch that do not fill a batch (drop_last)",
    ),
    Row("Step time", "{step_time}", _time_note),
)
