"""Metrics of training in rounds: round times, participation, idle times of server and devices."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean
from typing import Any

from testbed.trace.events import Event, EventType
from testbed.trace.intervals import Interval, clip, total, union
from testbed.trace.metrics_spec import Column, Metric, MetricsSpec, Row, Table
from testbed.trace.record import RunView
from testbed.trace.rounds import ROUND, ROUND_TIME, rounds_of


def _round_window(event: Event) -> Interval:
    """Return start and end of a round, in seconds."""
    start = event.fields["start"]
    return start, start + event.fields["duration"]


def _epoch_time(record: RunView) -> float | None:
    """Return the seconds of an epoch, extrapolated from the first round.

    A round may be only a part of an epoch: the missing iterations count as long as those of the round. The slowest
    device decides. The time after the last iteration, in which models are exchanged and averaged, counts once.
    """
    rounds = rounds_of(record)
    if not rounds:
        return None
    start, end = _round_window(rounds[0])
    last_updates = []
    epoch_ends = []
    # The plan of a run read from a folder has its details as plain data, without their class.
    for name, client in record.plan.details.model_dump()["clients"].items():
        updates = []
        for _, done in record.spans(name, "compute", "update").tolist():
            # Updates of the first round, one for each iteration.
            if start <= done <= end:
                updates.append(done)
        # A single update has no period.
        if len(updates) > 1:
            period = (updates[-1] - updates[0]) / (len(updates) - 1)
            missing_iterations = client["epoch_iterations"] - len(updates)
            last_updates.append(updates[-1])
            epoch_ends.append(updates[-1] + missing_iterations * period)
    if not epoch_ends:
        return None
    return float(max(epoch_ends) - start + end - max(last_updates))


def _idle_time(record: RunView, devices: Collection[str]) -> float | None:
    """Return the idle seconds of a device in a round, averaged over all rounds and these devices."""
    windows = [_round_window(event) for event in rounds_of(record)]
    if not windows or not devices:
        return None
    means = []
    for name in devices:
        computing = record.spans(name, "compute")
        idle = []
        for start, end in windows:
            busy = total(clip(computing, start, end))
            idle.append(end - start - busy)
        means.append(fmean(idle))
    return fmean(means)


def _bytes_per_second(record: RunView) -> float | None:
    """Return the message bytes per second of all links together during the rounds."""
    windows = [_round_window(event) for event in rounds_of(record)]
    # Time in which rounds overlap counts once.
    seconds = total(union(windows))
    if not seconds:
        return None
    sent = 0
    for time, size in record.of("send").rows("time", "bytes"):
        if any(start <= time <= end for start, end in windows):
            sent += size
    return float(sent / seconds)


def _missed_rounds(record: RunView) -> int | None:
    """Return the number of updates that missed their rounds; None without rounds."""
    if not rounds_of(record):
        return None
    counts = [len(item["missed"]) for item in _round_list(record)]
    return sum(counts)


def _device_idle_time(record: RunView) -> float | None:
    """Return the idle seconds of a device other than the coordinator, as a mean."""
    coordinator = record.plan.coordinator
    names = []
    for spec in record.experiment.devices:
        if spec.name != coordinator:
            names.append(spec.name)
    return _idle_time(record, names)


def _round_list(record: RunView) -> list[dict[str, Any]]:
    """List the rounds; a device late in one attempt at a round and present in another did not miss the round."""
    # Dictionaries as sets that keep the order of the events.
    late: dict[int, dict[str, None]] = {}
    for event in record.of("missed"):
        names = late.setdefault(event.fields["round"], {})
        names.update(dict.fromkeys(event.fields["devices"]))
    rounds = []
    for event in rounds_of(record):
        participants = event.fields["samples"]
        names = late.get(event.fields["round"], {})
        missed = [name for name in names if name not in participants]
        rounds.append({"time": event.time, **event.fields, "missed": missed})
    return rounds


ROUNDS = Table(
    "Rounds",
    "Each ends when the server has averaged the models that it was sent. Took part: devices with an update in the "
    "average. Missed: devices that were invited and are not among these, or the number of their updates.",
    "round_list",
    (
        Column("Round", "number", "round"),
        Column("Ended", "moment", "time"),
        Column("Time", "seconds", "duration"),
        Column("Samples", "number", lambda item: sum(item["samples"].values())),
        Column(
            "Took part", "text", lambda item: _format_names(item["samples"], "devices")
        ),
        Column("Missed", "text", lambda item: _format_names(item["missed"], "updates")),
    ),
)


def _format_names(devices: Collection[str], many: str) -> str:
    """Return the names of a few devices, or the number of more, with the noun ``many``."""
    # More names would make the column too wide.
    if len(devices) > 8:
        return f"{len(devices)} {many}"
    return ", ".join(devices)


DECLARED = MetricsSpec(
    metrics=(
        ROUND_TIME,
        Metric(
            "epoch_time",
            "seconds",
            "time of an epoch, from the iterations of the first round",
            _epoch_time,
        ),
        Metric(
            "server_idle_time",
            "seconds",
            "idle time of the server, mean of a round",
            lambda record: _idle_time(record, [record.plan.coordinator]),
        ),
        Metric(
            "device_idle_time",
            "seconds",
            "idle time of a device, mean of a round and of all devices",
            _device_idle_time,
        ),
        Metric(
            "throughput",
            "bytes",
            "bytes of messages on all links per second of the rounds",
            _bytes_per_second,
        ),
        Metric(
            "missed_updates",
            "number",
            "updates that missed the deadline of their round",
            _missed_rounds,
        ),
    ),
    lists={"round_list": _round_list},
    events=(
        ROUND,
        EventType(
            "missed",
            "devices that missed the deadline of a round",
            fields=("round", "devices"),
        ),
    ),
    rows=(
        Row("Round", "{round_time}", "median"),
        Row(
            "Idle",
            "{server_idle_time}",
            "a round the server, {device_idle_time} a device in the mean",
        ),
        Row(
            "Missed",
            "{missed_updates}",
            "updates",
            when=lambda metrics: metrics.get("missed_updates"),
        ),
    ),
    tables=(ROUNDS,),
)
