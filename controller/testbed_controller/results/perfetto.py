"""A run as a trace for ui.perfetto.dev (the Chrome trace event format, JSON).

In Perfetto's words, each device is a process, whose tracks (threads) for compute, send and receive contain slices: the
bars of `testbed.trace.gantt`. Flows are arrows from each send to its reception. A further process has the faults and
recoveries, and counters for loss and accuracy. A record is one JSON object of the format; its key ``ph`` is its type.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import IO, Any

from testbed.trace.disturbances import recoveries, strikes
from testbed.trace.events import LINES, TESTBED, Event
from testbed.trace.gantt import CHARTED, Bar, bars
from testbed.trace.intervals import lanes
from testbed.trace.log import EventLog

TRACKS = {"compute": 1, "send": 100, "receive": 200, "down": 300}
"""First thread number of each kind of bar; the numbers in between are for tracks of overlapping bars."""
FAULT_PROCESS = 1
"""Process number of faults and progress; the devices have the numbers from 2 on."""
FAULT_THREAD, RECOVERY_THREAD = 1, 2
"""Thread numbers in the process of the faults."""
FIRST_FURTHER_FAULT_THREAD = 11
"""First thread number of faults that overlap those of `FAULT_THREAD`."""
MOST_BARS = 200_000
"""Maximum number of bars in a trace, due to the memory of a browser; a longer run's trace has the first ones."""
MOST_COUNTED = 100_000
"""Maximum number of losses and accuracies in the trace; longer series are thinned."""
_RECORDS_AT_ONCE = 1000
"""Number of records encoded together: fewer take up to twice the time, all of them too much memory."""
CLOCK_SLACK = 0.005
"""Tolerance in seconds for a reception outside its send, due to separate clocks of containers."""


def write(
    file: IO[str], events: Sequence[Event], end: float, title: str = "testbed"
) -> None:
    """Write the trace of a run of ``end`` seconds.

    The entry ``otherData`` of the file has the title, and the number of omitted bars as ``left_out``.
    """
    log = EventLog.made_of(events)
    charted = list(islice(bars(log, end), MOST_BARS))
    charted.sort(key=lambda bar: (bar.start, bar.end))
    omitted = max(0, len(log.of(*CHARTED)) - len(charted))
    other = json.dumps({"title": title, "left_out": omitted})
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n')
    separator = ""
    records = _trace_records(log, charted, end, title)
    while True:
        batch = list(islice(records, _RECORDS_AT_ONCE))
        if not batch:
            break
        # Without the brackets of each list, the records of all batches form one list.
        file.write(separator + LINES.encode(batch)[1:-1])
        separator = ",\n"
    file.write("\n]}\n")


def _trace_records(
    log: EventLog, charted: Sequence[Bar], end: float, title: str
) -> Iterator[dict[str, Any]]:
    """Yield all records of a trace: names of processes and tracks, bars, messages, faults and curves."""
    names = sorted({bar.device for bar in charted} | log.devices - {TESTBED})
    processes = dict(zip(names, count(FAULT_PROCESS + 1), strict=False))
    title = f"{title}: faults and progress"
    yield from _process_records(FAULT_PROCESS, title, order=0)
    for name, process in processes.items():
        yield from _process_records(process, name, order=process)
    tracks = _assign_tracks(charted, processes)
    for (process, thread), label, track_bars in tracks:
        yield _metadata_record("thread_name", process, thread, label)
        yield _metadata_record("thread_sort_index", process, thread, thread)
        for bar in track_bars:
            yield _slice_record(bar, process, thread)
    # By identity: bars are compared by value, and two of them may be equal.
    track_of: dict[int, TrackId] = {}
    for track, _, track_bars in tracks:
        track_of |= dict.fromkeys(map(id, track_bars), track)
    for number, (sent, received) in enumerate(deliveries(charted)):
        source = track_of[id(sent)]
        destination = track_of[id(received)]
        yield from _flow_records(number, sent, source, received, destination)
    yield from _window_records(log, end)
    yield from _counter_records(log)


TrackId = tuple[int, int]
"""Process and thread of a track."""


def _assign_tracks(
    charted: Sequence[Bar], processes: Mapping[str, int]
) -> list[tuple[TrackId, str, list[Bar]]]:
    """Return the tracks of all devices with their labels and bars."""
    bars_of: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in charted:
        bars_of[bar.device, bar.kind].append(bar)
    tracks = []
    for name, process in processes.items():
        for kind, first_thread in TRACKS.items():
            for number, lane in enumerate(_split_lanes(bars_of[name, kind])):
                label = f"{kind} {number + 1}" if number else kind
                tracks.append(((process, first_thread + number), label, lane))
    return tracks


def _split_lanes(charted: Sequence[Bar]) -> list[list[Bar]]:
    """Split bars, sorted by start, into as few lanes as possible without overlapping bars in a lane."""
    bars_of_lanes: list[list[Bar]] = []
    numbers = lanes((bar.start, bar.end) for bar in charted).tolist()
    for bar, number in zip(charted, numbers, strict=True):
        # Lanes are numbered in the order of their first bars, so a new lane has the next number.
        if number == len(bars_of_lanes):
            bars_of_lanes.append([])
        bars_of_lanes[number].append(bar)
    return bars_of_lanes


def deliveries(charted: Sequence[Bar]) -> Iterator[tuple[Bar, Bar]]:
    """Pair each send with the reception of the same message type and size between the same devices.

    A reception belongs to the earliest unpaired send that overlaps it in time; both may be without a partner.
    """
    unpaired_sends: dict[_Message, deque[Bar]] = defaultdict(deque)
    receptions = []
    for bar in charted:
        if bar.kind == "send":
            key = (bar.device, bar.peer, bar.label, bar.size)
            unpaired_sends[key].append(bar)
        elif bar.kind == "receive":
            receptions.append(bar)
    receptions.sort(key=lambda bar: bar.end)
    for received in receptions:
        sender = received.peer or ""
        key = (sender, received.device, received.label, received.size)
        sends = unpaired_sends[key]
        # A send that ended before this reception was lost, or its reception was not recorded.
        while sends and sends[0].end < received.end - CLOCK_SLACK:
            sends.popleft()
        if sends and sends[0].start <= received.end + CLOCK_SLACK:
            yield sends.popleft(), received


_Message = tuple[str, str | None, str, int | None]
"""Source, destination, type and size in bytes of a message."""


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata_record(
    name: str, process: int, thread: int, value: str | int
) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {
        "ph": "M",
        "name": name,
        "pid": process,
        "tid": thread,
        "args": {key: value},
    }


def _process_records(number: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        _metadata_record("process_name", number, 0, name),
        _metadata_record("process_sort_index", number, 0, order),
    ]


def _slice_record(bar: Bar, process: int, thread: int) -> dict[str, Any]:
    details = {
        "batch": bar.batch,
        "micro": bar.micro,
        "bytes": bar.size,
        "interrupted": bar.interrupted or None,
    }
    present = {key: value for key, value in details.items() if value is not None}
    start = _to_microseconds(bar.start)
    # "X" is a complete event of the format: one record with start and duration.
    return {
        "ph": "X",
        "name": _slice_name(bar),
        "cat": bar.kind,
        "pid": process,
        "tid": thread,
        "ts": start,
        # Between rounded times, so that adjacent slices do not overlap by a rounding error.
        "dur": round(_to_microseconds(bar.end) - start, 3),
        "args": present,
    }


def _slice_name(bar: Bar) -> str:
    name = bar.label or bar.kind
    if bar.batch is not None:
        name += f" {bar.batch}"
        if bar.micro is not None:
            name += f".{bar.micro}"
    if bar.peer:
        name += f" to {bar.peer}" if bar.kind == "send" else f" from {bar.peer}"
    return name


def _flow_records(
    number: int,
    sent: Bar,
    source: TrackId,
    received: Bar,
    destination: TrackId,
) -> list[dict[str, Any]]:
    """Return the records of both ends of a flow; an end inside a slice binds the flow to the slice."""
    common = {"name": "message", "cat": "message", "id": number}
    # In the middle, the end is inside the slice of the reception, despite the rounding of times.
    middle = _to_microseconds((received.start + received.end) / 2)
    # "s" and "f" are the start and the finish of a flow; with "bp": "e", its end binds to the enclosing slice.
    return [
        {
            **common,
            "ph": "s",
            "pid": source[0],
            "tid": source[1],
            "ts": _to_microseconds(sent.start),
        },
        {
            **common,
            "ph": "f",
            "bp": "e",
            "pid": destination[0],
            "tid": destination[1],
            "ts": middle,
        },
    ]


def _window_records(log: EventLog, end: float) -> list[dict[str, Any]]:
    """Return slices from the start to the end of each fault, and from each detection to the end of the recovery."""
    process = FAULT_PROCESS
    records = [
        _metadata_record("thread_name", process, FAULT_THREAD, "faults"),
        _metadata_record("thread_name", process, RECOVERY_THREAD, "recoveries"),
    ]
    windows = []
    for strike in strikes(log):
        # A fault has a duration; its repair is an event without duration.
        start = stop = strike.struck
        if not strike.is_repair:
            start, stop = strike.window(end)
        label = f"{strike.action} {strike.target}"
        windows.append(Bar(TESTBED, "down", start, stop, label))
    for number, lane in enumerate(_split_lanes(windows)):
        thread = FAULT_THREAD
        if number:
            thread = FIRST_FURTHER_FAULT_THREAD + number - 1
            label = f"faults {number + 1}"
            records.append(_metadata_record("thread_name", process, thread, label))
        records += [_slice_record(bar, process, thread) for bar in lane]
    for recovery in recoveries(log):
        stop = end if recovery.resumed is None else recovery.resumed
        bar = Bar(TESTBED, "down", recovery.detected, stop, "recovery")
        records.append(_slice_record(bar, process, RECOVERY_THREAD))
    return records


def _counter_records(log: EventLog) -> Iterator[dict[str, Any]]:
    """Yield the training loss of steps and the accuracy of evaluations."""
    counted_events = log.of("step", "evaluate")
    # At least 1, also without events.
    stride = math.ceil(len(counted_events) / MOST_COUNTED) or 1
    for event in islice(counted_events, 0, None, stride):
        key = "loss" if event.event == "step" else "accuracy"
        value = event.fields.get(key)
        # JSON lacks NaN and infinity, the losses of a diverged run.
        if isinstance(value, int | float) and math.isfinite(value):
            # "C" is a counter, drawn as a curve.
            yield {
                "ph": "C",
                "name": key,
                "pid": FAULT_PROCESS,
                "tid": 0,
                "ts": _to_microseconds(event.time),
                "args": {key: value},
            }
