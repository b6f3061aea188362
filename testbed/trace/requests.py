"""Latency of inference requests and its composition."""

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

    The final result of each request counts: a coordinator that restarts repeats all requests. User
    programs may ask on several devices; each counts its own requests.
    """
    ends = record.events.of("request", "failed")
    # Two passes with a mark for each event: a long run has millions of requests, and their values stay on disk.
    last = {}
    for index, (device, request) in enumerate(ends.rows("device", "request")):
        last[device, request] = index
    is_final = bytearray(len(ends))
    for index in last.values():
        is_final[index] = 1
    times, latencies, failed = [], [], 0
    rows = ends.rows("event", "time", "latency")
    for event, time, latency in compress(rows, is_final):
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
    """Return the time from the first request to the last answer; None where nothing was answered."""
    windows = record.cached(_request_windows)
    if not windows:
        return None
    first = min(begin for begin, _ in windows)
    return (first, max(end for _, end in windows))


def _of_latencies(
    compute: Callable[[list[float]], float],
) -> Callable[[RunView], float | None]:
    """Wrap a metric of all latencies to return None without answers."""

    def compute_metric(record: RunView) -> float | None:
        latencies = record.cached(_request_latencies)
        return compute(latencies) if latencies else None

    return compute_metric


def _per_second(record: RunView) -> float | None:
    latencies = record.cached(_request_latencies)
    if not latencies:
        return None
    return len(latencies) / record.end if record.end > 0 else 0.0


def _count_objects(record: RunView) -> int | None:
    counts = {}
    for event in record.of("objects"):
        # A request that is asked again counts once.
        sample = (event.fields["request"], event.fields["sample"])
        counts[sample] = len(event.fields["boxes"])
    if not counts or not record.cached(_request_latencies):
        return None
    return sum(counts.values())


def _count_failed(record: RunView) -> int | None:
    times, _, failed = record.cached(_answered_requests)
    return failed if times or failed else None


def _path_times(record: RunView) -> list[PathTime]:
    windows = record.cached(_request_windows)
    if not windows:
        return []
    paths = CriticalPaths(record.events, record.experiment)
    return [paths.spent(record.plan.coordinator, window) for window in windows]


def busiest(events: Sequence[Event], experiment: Experiment, window: Interval) -> float:
    """Return the busy seconds of the busiest processor or link for the work of a window.

    A link, and a device's access to the network, is busy for bytes / rate, at the rates of the scenario; messages that
    arrived within the window count. Channels shared by several devices are left out.
    """
    computing: dict[str, array[float]] = defaultdict(lambda: array("d"))
    carried: dict[tuple[str, ...], float] = defaultdict(float)
    uplinks = {spec.name: spec.uplink or inf for spec in experiment.devices}
    downlinks = {spec.name: spec.downlink or inf for spec in experiment.devices}
    log = EventLog.made_of(events)
    computations = log.of("compute")
    for device, start, duration in computations.rows("device", "start", "duration"):
        computing[device].extend((start, start + duration))
    arrivals = log.of("receive").within(*window)
    for device, peer, content, cast in arrivals.rows("device", "peer", "bytes", "cast"):
        # Other devices share the channel of a broadcast.
        if cast:
            continue
        size = wire_bytes(content)
        link = experiment.links.get((peer, device))
        if link is not None:
            carried["link", peer, device] += link.transmission_time(size)
        carried["up", peer] += 8 * size / uplinks[peer]
        carried["down", device] += 8 * size / downlinks[device]
    busy = [0.0, *carried.values()]
    for spec in experiment.devices:
        work = np.frombuffer(computing[spec.name]).reshape(-1, 2)
        busy.append(length(clip(work, *window)) / spec.processors)
    return max(busy)


def _over_predicted(record: RunView) -> float | None:
    whole, predicted = record.cached(_whole_window), record.plan.step_time
    if whole is None or not predicted:
        return None
    return (whole[1] - whole[0]) / len(record.cached(_request_windows)) / predicted


def _over_bound(record: RunView) -> float | None:
    whole = record.cached(_whole_window)
    # No order of the work lets all requests together take less time than the busiest processor or link.
    needed = busiest(record.events, record.experiment, whole) if whole else 0.0
    return (whole[1] - whole[0]) / needed if whole and needed else None


def _mean_spent(part: Callable[[PathTime], float]) -> Callable[[RunView], float | None]:
    def compute_metric(record: RunView) -> float | None:
        times = record.cached(_path_times)
        return fmean(map(part, times)) if times else None

    return compute_metric


METRICS = (
    Metric(
        "requests",
        "number",
        "completed inference requests",
        _of_latencies(len),
        compared=True,
    ),
    Metric(
        "requests_per_second",
        "number",
        "completed requests divided by the duration",
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
        _of_latencies(median),
        brief=True,
        compared=True,
    ),
    Metric(
        "latency_mean", "seconds", "mean latency of a request", _of_latencies(fmean)
    ),
    Metric(
        "latency_p95",
        "seconds",
        "95th percentile of the latency",
        _of_latencies(lambda latencies: float(np.percentile(latencies, 95))),
        compared=True,
    ),
    Metric(
        "latency_p99",
        "seconds",
        "99th percentile of the latency",
        _of_latencies(lambda latencies: float(np.percentile(latencies, 99))),
    ),
    Metric(
        "latency_max", "seconds", "maximum latency of a request", _of_latencies(max)
    ),
    Metric("requests_failed", "number", "requests that failed", _count_failed),
    Metric(
        "path_compute",
        "seconds",
        "mean computing time on the critical path of a request",
        _mean_spent(lambda spent: spent.computing),
    ),
    Metric(
        "path_network",
        "seconds",
        "mean message time on the critical path of a request",
        _mean_spent(lambda spent: spent.messaging),
    ),
    Metric(
        "over_predicted",
        "number",
        "interval between results, divided by the predicted interval",
        _over_predicted,
    ),
    Metric(
        "over_bound",
        "number",
        (
            "time of all requests divided by the busy time of the busiest processor "
            "or link; at least 1"
        ),
        _over_bound,
    ),
)


def _has_model(metrics: Metrics) -> bool:
    """Return whether some device holds units of a model."""
    if "requests" not in metrics:
        return False
    # The first unit of each piece and the one after its last: those of a program are equal.
    rows = metrics["devices"].values()
    return any(len(set(row.get("units", ()))) > 1 for row in rows)


def _describe_weights(metrics: Metrics) -> str:
    return "random" if metrics["weights"] is None else Path(metrics["weights"]).name


def _weights_note(metrics: Metrics) -> str:
    if metrics["weights"] is None:
        return "drawn from the seed: the answers are meaningless"
    if metrics["status"] == "finished":
        return "read from this file"
    return "given to begin with; the run did not finish"


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
        "of what a request waited for was computing, {path_network} messages; mean",
        when=_has_model,
    ),
    Row(
        "Predicted",
        "{predicted_step_time}",
        "a request, by the plan; measured over predicted: {over_predicted}",
    ),
)
