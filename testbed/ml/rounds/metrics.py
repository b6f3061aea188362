"""Metrics of training in rounds: round times, participation, idle times of server and devices.

They are computed from the events ``round`` and ``missed`` of the server, and from the computations and messages of all
devices. `DECLARED` lists them.
"""

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
    """Return start and end of the round of an event, in seconds."""
    start = event.fields["start"]
    return start, start + event.fields["duration"]


def _epoch_time(record: RunView) -> float | None:
    """Return the seconds of an epoch, extrapolated from the first round.

    A round may have fewer iterations than an epoch: the missing iterations are added to each device's last update, at
    the device's mean time between updates. The epoch ends with the slowest device. The time from the last update to the
    end of the round, in which models are exchanged and averaged, counts once.
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
        # Each iteration has one update.
        for _, update_end in record.spans(name, "compute", "update").tolist():
            if start <= update_end <= end:
                updates.append(update_end)
        # The mean time between updates needs two of them.
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
    """Return the bytes of messages sent on all links during rounds, per second of the rounds."""
    windows = [_round_window(event) for event in rounds_of(record)]
    # The union counts the time of overlapping rounds once.
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
    counts = [len(round_row["missed"]) for round_row in _round_list(record)]
    return sum(counts)


def _device_idle_time(record: RunView) -> float | None:
    """Return the mean idle seconds in a round of all devices except the coordinator."""
    coordinator = record.plan.coordinator
    names = []
    for spec in record.experiment.devices:
        if spec.name != coordinator:
            names.append(spec.name)
    return _idle_time(record, names)


def _round_list(record: RunView) -> list[dict[str, Any]]:
    """Return a row for each round, with the devices that missed it.

    A device that was late in one attempt at a round and took part in another attempt did not miss the round.
    """
    # The inner dictionaries are sets that keep the order of the events.
    late_devices: dict[int, dict[str, None]] = {}
    for event in record.of("missed"):
        names = late_devices.setdefault(event.fields["round"], {})
        names.update(dict.fromkeys(event.fields["devices"]))
    rows = []
    for event in rounds_of(record):
        participants = event.fields["samples"]
        names = late_devices.get(event.fields["round"], {})
        missed = [name for name in names if name not in participants]
        rows.append({"time": event.time, **event.fields, "missed": missed})
    return rows


def _format_names(devices: Collection[str], noun: str) -> str:
    """Return the names of up to eight devices, or else their number with a noun, such as "9 devices"."""
    # More names would make the column too wide.
    if len(devices) > 8:
        return f"{len(devices)} {noun}"
    return ", ".join(devices)


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
