"""Metrics of inference requests, and their rows in the report."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress
from math import inf
from pathlib import Path
from statistics import fmean, median

from testbed.common.lazy import np
from testbed.experiment import Experiment
from testbed.trace.critical import CriticalPaths, PathTime
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, clip, length
from testbed.trace.log import EventLog
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView
from testbed.wire.framing import wire_bytes


def _answered_requests(record: RunView) -> tuple[list[float], list[float], int]:
    """Return the times of answers and their latencies, in seconds, and the number of failed requests.

    A coordinator that restarts repeats all its requests, so only the last answer or failure of a request is used. In
    user programs, several devices may send requests, and a request's number is unique only within its device.
    """
    # The event `request` is recorded when the answer arrives.
    outcomes = record.events.of("request", "failed")
    # Two passes, so that times and latencies of repeated requests are never read into memory.
    last_index = {}
    for index, (device, request) in enumerate(outcomes.rows("device", "request")):
        last_index[device, request] = index
    is_last = bytearray(len(outcomes))
    for index in last_index.values():
        is_last[index] = 1
    times, latencies, failed = [], [], 0
    rows = outcomes.rows("event", "time", "latency")
    for event, time, latency in compress(rows, is_last):
        if event == "request":
            times.append(time)
            latencies.append(float(latency))
        else:
            failed += 1
    return times, latencies, failed


def _request_latencies(record: RunView) -> list[float]:
    return record.cached(_answered_requests)[1]


def _request_windows(record: RunView) -> list[Interval]:
    times, latencies, _ = record.cached(_answered_requests)
    pairs = zip(times, latencies, strict=True)
    return [(time - latency, time) for time, latency in pairs]


def _whole_window(record: RunView) -> Interval | None:
    """Return the interval from the start of the first request to the last answer; None without answers."""
    windows = record.cached(_request_windows)
    if not windows:
        return None
    first = min(begin for begin, _ in windows)
    last = max(end for _, end in windows)
    return (first, last)


def _latency_metric(
    compute: Callable[[list[float]], float],
) -> Callable[[RunView], float | None]:
    """Make a metric from a function of all latencies; the metric is None if no request was answered."""

    def compute_metric(record: RunView) -> float | None:
        latencies = record.cached(_request_latencies)
        return compute(latencies) if latencies else None

    return compute_metric


def _per_second(record: RunView) -> float | None:
    latencies = record.cached(_request_latencies)
    if not latencies:
        return None
    if record.end <= 0:
        return 0.0
    # The duration of the whole run, as the metric's description says.
    return len(latencies) / record.end


def _count_objects(record: RunView) -> int | None:
    counts = {}
    for event in record.of("objects"):
        # Only coordinators record objects. A repeated request counts once.
        sample = (event.fields["request"], event.fields["sample"])
        counts[sample] = len(event.fields["boxes"])
    if not counts or not record.cached(_request_latencies):
        return None
    return sum(counts.values())


def _count_failed(record: RunView) -> int | None:
    times, _, failed = record.cached(_answered_requests)
    if not times and not failed:
        return None
    return failed


def _path_times(record: RunView) -> list[PathTime]:
    windows = record.cached(_request_windows)
    if not windows:
        return []
    paths = CriticalPaths(record.events, record.experiment)
    return [paths.spent(record.plan.coordinator, window) for window in windows]


def busiest_seconds(
    events: Sequence[Event], experiment: Experiment, window: Interval
) -> float:
    """Return the seconds for which the busiest processor or link was in use within an interval.

    A message occupies its link, the sender's uplink and the receiver's downlink for bytes / rate, at the rates of the
    scenario. Messages that arrived within the interval count. Channels that several devices share are left out,
    because the events do not tell which transmissions overlapped.
    """
    computing: dict[str, array[float]] = defaultdict(lambda: array("d"))
    transmitting: dict[tuple[str, ...], float] = defaultdict(float)
    uplinks = {spec.name: spec.uplink or inf for spec in experiment.devices}
    downlinks = {spec.name: spec.downlink or inf for spec in experiment.devices}
    log = EventLog.made_of(events)
    computations = log.of("compute")
    for device, start, duration in computations.rows("device", "start", "duration"):
        # Starts and ends alternate.
        computing[device].extend((start, start + duration))
    arrivals = log.of("receive").within(*window)
    rows = arrivals.rows("device", "peer", "bytes", "cast")
    for receiver, sender, content_bytes, cast_number in rows:
        # Other devices share the channel of a broadcast.
        if cast_number:
            continue
        size = wire_bytes(content_bytes)
        link = experiment.links.get((sender, receiver))
        if link is not None:
            transmitting["link", sender, receiver] += link.transmission_time(size)
        transmitting["up", sender] += 8 * size / uplinks[sender]
        transmitting["down", receiver] += 8 * size / downlinks[receiver]
    busy = list(transmitting.values())
    for spec in experiment.devices:
        work = np.frombuffer(computing[spec.name]).reshape(-1, 2)
        busy.append(length(clip(work, *window)) / spec.processors)
    return max(busy)


def _measured_to_predicted(record: RunView) -> float | None:
    window = record.cached(_whole_window)
    # In inference, the step of a plan is a request.
    predicted = record.plan.step_time
    if window is None or not predicted:
        return None
    start, end = window
    interval = (end - start) / len(record.cached(_request_windows))
    return interval / predicted


def _duration_to_bound(record: RunView) -> float | None:
    window = record.cached(_whole_window)
    if window is None:
        return None
    # However the work is scheduled, it cannot finish before the busiest processor or link has done its share.
    bound = busiest_seconds(record.events, record.experiment, window)
    if not bound:
        return None
    start, end = window
    return (end - start) / bound


def _mean_path_time(
    select: Callable[[PathTime], float],
) -> Callable[[RunView], float | None]:
    def compute_metric(record: RunView) -> float | None:
        times = record.cached(_path_times)
        return fmean(map(select, times)) if times else None

    return compute_metric


METRICS = (
    Metric(
        "requests",
        "number",
        "completed inference requests",
        _latency_metric(len),
        compared=True,
    ),
    Metric(
        "requests_per_second",
        "number",
        "completed requests divided by the duration of the run",
        _per_second,
        compared=True,
    ),
    Metric(
        "objects",
        "number",
        "objects detected in the samples of all requests",
        _count_objects,
    ),
    Metric(
        "latency",
        "seconds",
        "median latency of a request",
        _latency_metric(median),
        brief=True,
        compared=True,
    ),
    Metric(
        "latency_mean", "seconds", "mean latency of a request", _latency_metric(fmean)
    ),
    Metric(
        "latency_p95",
        "seconds",
        "95th percentile of the latency",
        _latency_metric(lambda latencies: float(np.percentile(latencies, 95))),
        compared=True,
    ),
    Metric(
        "latency_p99",
        "seconds",
        "99th percentile of the latency",
        _latency_metric(lambda latencies: float(np.percentile(latencies, 99))),
    ),
    Metric(
        "latency_max", "seconds", "maximum latency of a request", _latency_metric(max)
    ),
    Metric("requests_failed", "number", "requests that failed", _count_failed),
    Metric(
        "path_compute",
        "seconds",
        "mean computing time on the critical path of a request",
        _mean_path_time(lambda path: path.computing),
    ),
    Metric(
        "path_network",
        "seconds",
        "mean message time on the critical path of a request",
        _mean_path_time(lambda path: path.messaging),
    ),
    Metric(
        "over_predicted",
        "number",
        "interval between results, divided by the predicted interval",
        _measured_to_predicted,
    ),
    Metric(
        "over_bound",
        "number",
        (
            "time of all requests divided by the busy time of the busiest processor "
            "or link; at least 1"
        ),
        _duration_to_bound,
    ),
)


def _has_model(metrics: Metrics) -> bool:
    """Return whether some device holds units of a model."""
    if "requests" not in metrics:
        return False
    # The field lists start and stop of each assignment, which are equal for a user program, since it holds no units.
    rows = metrics["devices"].values()
    return any(len(set(row.get("units", ()))) > 1 for row in rows)


def _describe_weights(metrics: Metrics) -> str:
    return "random" if metrics["weights"] is None else Path(metrics["weights"]).name


def _weights_note(metrics: Metrics) -> str:
    if metrics["weights"] is None:
        return "drawn from the seed: the answers are meaningless"
    if metrics["status"] == "finished":
        return "read from this file"
    return "named by the scenario; the run did not finish"


def _requests_note(metrics: Metrics) -> str:
    note = "{requests_per_second} a second"
    if metrics["requests_failed"]:
        note += ", {requests_failed} failed"
    return note


ROWS = (
    Row("Weights", _describe_weights, _weights_note, when=_has_model),
    Row("Requests", "{requests}", _requests_note),
    Row("Objects", "{objects}", "found in all requests together; boxes.json has them"),
    Row("Latency", "{latency}", "median; 95% within {latency_p95}"),
    Row(
        "Path",
        "{path_compute}",
        "of computing on the critical path of a request, and {path_network} of messages; means",
        when=_has_model,
    ),
    Row(
        "Predicted",
        "{predicted_step_time}",
        "a request, by the plan; measured over predicted: {over_predicted}",
    ),
)
