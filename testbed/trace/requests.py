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
    """Return when requests were answered and their latencies, in seconds, and how many were given up.

    What counts is what became of each in the end: a lead that starts over after its own death asks all again. Programs
    of the user's may ask on several devices; each counts its own requests.
    """
    ends = record.events.of("request", "failed")
    last = {
        (device, request): place
        for place, (device, request) in enumerate(ends.rows("device", "request"))
    }
    counts = bytearray(len(ends))
    for place in last.values():
        counts[place] = 1
    times, latencies, failed = [], [], 0
    for event, time, latency in compress(ends.rows("event", "time", "latency"), counts):
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
    return [
        (time - latency, time) for time, latency in zip(times, latencies, strict=True)
    ]


def _whole_window(record: RunView) -> Interval | None:
    """Return the time from the first request to the last answer; None where nothing was answered."""
    windows = record.cached(_request_windows)
    return (
        (min(begin for begin, _ in windows), max(end for _, end in windows))
        if windows
        else None
    )


def _of_latencies(
    compute: Callable[[list[float]], float],
) -> Callable[[RunView], float | None]:
    """Wrap a metric of all latencies to return None without answers."""

    def figure(record: RunView) -> float | None:
        latencies = record.cached(_request_latencies)
        return compute(latencies) if latencies else None

    return figure


def _per_second(record: RunView) -> float | None:
    latencies = record.cached(_request_latencies)
    if not latencies:
        return None
    return len(latencies) / record.end if record.end > 0 else 0.0


def _count_objects(record: RunView) -> int | None:
    seen = {
        (event.fields["request"], event.fields["sample"]): event
        for event in record.of("objects")
    }
    counts = [len(event.fields["boxes"]) for event in seen.values()]
    if not counts or not record.cached(_request_latencies):
        return None
    return sum(counts)


def _count_failed(record: RunView) -> int | None:
    times, _, failed = record.cached(_answered_requests)
    return failed if times or failed else None


def _path_times(record: RunView) -> list[PathTime]:
    windows = record.cached(_request_windows)
    if not windows:
        return []
    paths = CriticalPaths(record.events, record.experiment)
    return [paths.spent(record.plan.lead, window) for window in windows]


def busiest(events: Sequence[Event], experiment: Experiment, window: Interval) -> float:
    """Return the busy seconds of the busiest processor or link for the work of a window.

    A link, and a device's access to the network, carries bytes / rate, at the rates of the scenario; what arrived
    within the window counts. Channels that several devices share are left out.
    """
    computing: dict[str, array[float]] = defaultdict(lambda: array("d"))
    carried: dict[tuple[str, ...], float] = defaultdict(float)
    access = {
        spec.name: (spec.uplink or inf, spec.downlink or inf)
        for spec in experiment.devices
    }
    log = EventLog.made_of(events)
    for device, start, duration in log.of("compute").rows(
        "device", "start", "duration"
    ):
        computing[device].extend((start, start + duration))
    for device, peer, content, cast in (
        log.of("receive").within(*window).rows("device", "peer", "bytes", "cast")
    ):
        if not cast:
            size, link = 8 * wire_bytes(content), experiment.links.get((peer, device))
            carried["link", peer, device] += (
                link.transmission_time(wire_bytes(content)) if link is not None else 0.0
            )
            carried["up", peer] += size / access[peer][0]
            carried["down", device] += size / access[device][1]
    processors = (
        length(clip(np.frombuffer(computing[spec.name]).reshape(-1, 2), *window))
        / spec.processors
        for spec in experiment.devices
    )
    return max([0.0, *processors, *carried.values()])


def _over_predicted(record: RunView) -> float | None:
    whole, predicted = record.cached(_whole_window), record.plan.step_time
    if whole is None or not predicted:
        return None
    return (whole[1] - whole[0]) / len(record.cached(_request_windows)) / predicted


def _over_bound(record: RunView) -> float | None:
    whole = record.cached(_whole_window)
    needed = busiest(record.events, record.experiment, whole) if whole else 0.0
    return (whole[1] - whole[0]) / needed if whole and needed else None


def _mean_spent(part: Callable[[PathTime], float]) -> Callable[[RunView], float | None]:
    def figure(record: RunView) -> float | None:
        return (
            fmean(map(part, record.cached(_path_times)))
            if record.cached(_path_times)
            else None
        )

    return figure


FIGURES = (
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
    # The first unit of each piece and the one after its last: those of a program are the same.
    return "requests" in metrics and any(
        len(set(row.get("units", ()))) > 1 for row in metrics["devices"].values()
    )


def _describe_weights(metrics: Metrics) -> str:
    return "random" if metrics["weights"] is None else Path(metrics["weights"]).name


def _weights_note(metrics: Metrics) -> str:
    if metrics["weights"] is None:
        return "drawn from the seed: the answers are meaningless"
    return (
        "read from this file"
        if metrics["status"] == "finished"
        else "given to begin with; the run did not finish"
    )


def _requests_note(metrics: Metrics) -> str:
    return "{requests_per_second} a second" + (
        ", {requests_failed} failed" if metrics["requests_failed"] else ""
    )


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
