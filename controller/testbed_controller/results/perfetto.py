"""A run as a trace for ui.perfetto.dev (the Chrome trace event format, JSON).

One process per device with tracks for compute, send and receive, arrows from each send to its reception, one
process for the faults and their windows, and counters for loss and accuracy.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any

from testbed.trace.disturbances import recoveries, strikes
from testbed.trace.events import LINES, TESTBED, Event
from testbed.trace.gantt import CHARTED, Bar, bars
from testbed.trace.intervals import lanes
from testbed.trace.log import EventLog

TRACKS = {"compute": 1, "send": 100, "receive": 200, "down": 300}
"""First track number of each kind; overlapping activities use further tracks."""
MOST_BARS = 200_000
"""Bars in a trace, at most; a longer run's trace has the first ones: as much as a browser opens."""
MOST_COUNTED = 100_000
"""Maximum number of losses and accuracies in the trace; longer series are thinned."""
_AT_ONCE = 1000
CLOCK_SLACK = 0.005
"""Tolerance in seconds for a reception outside its send, due to separate clocks of containers."""


def write(
    file: IO[str], events: Sequence[Event], end: float, title: str = "testbed"
) -> None:
    """Write the trace of a run of ``end`` seconds; ``otherData`` contains the number of omitted bars."""
    log = EventLog.made_of(events)
    charted = sorted(
        islice(bars(log, end), MOST_BARS), key=lambda bar: (bar.start, bar.end)
    )
    other = {"title": title, "left_out": max(0, len(log.of(*CHARTED)) - len(charted))}
    file.write(
        f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n'
    )
    between, records = "", _trace_records(log, charted, end, title)
    while some := list(
        islice(records, _AT_ONCE)
    ):  # all of them together are large, one by one takes twice as long
        file.write(between + LINES.encode(some)[1:-1])
        between = ",\n"
    file.write("\n]}\n")


def _trace_records(
    log: EventLog, charted: Sequence[Bar], end: float, title: str
) -> Iterator[dict[str, Any]]:
    names = sorted({bar.device for bar in charted} | log.devices - {TESTBED})
    numbers = {name: index + 2 for index, name in enumerate(names)}
    yield from _process_records(1, f"{title}: faults and progress", 0)
    for name in names:
        yield from _process_records(numbers[name], name, numbers[name])
    kept: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in charted:
        kept[bar.device, bar.kind].append(bar)
    placed: dict[int, tuple[int, int]] = {}
    for name in names:
        for kind, first in TRACKS.items():
            for row, content in enumerate(_split_lanes(kept[name, kind])):
                yield _metadata_record(
                    "thread_name",
                    numbers[name],
                    first + row,
                    f"{kind} {row + 1}" if row else kind,
                )
                yield _metadata_record(
                    "thread_sort_index", numbers[name], first + row, first + row
                )
                for bar in content:
                    placed[id(bar)] = (numbers[name], first + row)
                    yield _slice_record(bar, numbers[name], first + row)
    for number, (sent, received) in enumerate(deliveries(charted)):
        yield from _flow_records(
            number, sent, placed[id(sent)], received, placed[id(received)]
        )
    yield from _window_records(log, end)
    yield from _counter_records(log)


def _split_lanes(charted: Sequence[Bar]) -> list[list[Bar]]:
    """Split bars, given in the order of their starts, into as few rows as possible without overlap in a row."""
    rows: list[list[Bar]] = []
    for bar, row in zip(
        charted, lanes((bar.start, bar.end) for bar in charted).tolist(), strict=True
    ):
        if row == len(rows):
            rows.append([])
        rows[row].append(bar)
    return rows


def deliveries(charted: Sequence[Bar]) -> Iterator[tuple[Bar, Bar]]:
    """Pair each reception with its send: same devices, kind and size, in order, at the same time."""
    waiting: dict[tuple[str, str | None, str, int | None], deque[Bar]] = defaultdict(
        deque
    )
    for bar in charted:
        if bar.kind == "send":
            waiting[bar.device, bar.peer, bar.label, bar.size].append(bar)
    for bar in sorted(
        (bar for bar in charted if bar.kind == "receive"), key=lambda bar: bar.end
    ):
        queue = waiting[bar.peer or "", bar.device, bar.label, bar.size]
        while queue and queue[0].end < bar.end - CLOCK_SLACK:
            queue.popleft()
        if queue and queue[0].start <= bar.end + CLOCK_SLACK:
            yield queue.popleft(), bar


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata_record(
    what: str, process: int, thread: int, value: str | int
) -> dict[str, Any]:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {
        "ph": "M",
        "name": what,
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
    name = bar.label or bar.kind
    if bar.batch is not None:
        name += f" {bar.batch}" + ("" if bar.micro is None else f".{bar.micro}")
    if bar.peer:
        name += f" to {bar.peer}" if bar.kind == "send" else f" from {bar.peer}"
    details = {
        "batch": bar.batch,
        "micro": bar.micro,
        "bytes": bar.size,
        "interrupted": bar.interrupted or None,
    }
    return {
        "ph": "X",
        "name": name,
        "cat": bar.kind,
        "pid": process,
        "tid": thread,
        "ts": _to_microseconds(bar.start),
        # From rounded ends, so that slices which touch do not come to overlap.
        "dur": round(_to_microseconds(bar.end) - _to_microseconds(bar.start), 3),
        "args": {key: value for key, value in details.items() if value is not None},
    }


def _flow_records(
    number: int,
    sent: Bar,
    source: tuple[int, int],
    received: Bar,
    destination: tuple[int, int],
) -> list[dict[str, Any]]:
    """Return both ends of a flow; each lies inside its slice, which binds the flow to the slice."""
    common = {"name": "message", "cat": "message", "id": number}
    middle = _to_microseconds((received.start + received.end) / 2)
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
    records = [
        _metadata_record("thread_name", 1, 1, "faults"),
        _metadata_record("thread_name", 1, 2, "recoveries"),
    ]
    windows = []
    for strike in strikes(log):
        start, stop = (
            (strike.struck, strike.struck) if strike.mends else strike.window(end)
        )
        windows.append(
            Bar(TESTBED, "down", start, stop, f"{strike.action} {strike.target}")
        )
    for row, content in enumerate(_split_lanes(windows)):
        if row:
            records.append(
                _metadata_record("thread_name", 1, 10 + row, f"faults {row + 1}")
            )
        records += [_slice_record(bar, 1, 10 + row if row else 1) for bar in content]
    for item in recoveries(log):
        stop = end if item.resumed is None else item.resumed
        records.append(
            _slice_record(Bar(TESTBED, "down", item.detected, stop, "recovery"), 1, 2)
        )
    return records


def _counter_records(log: EventLog) -> Iterator[dict[str, Any]]:
    counted = log.of("step", "evaluate")
    every = -(-len(counted) // MOST_COUNTED) or 1
    for event in islice(counted, 0, None, every):
        key = "loss" if event.event == "step" else "accuracy"
        figure = event.fields.get(key)
        if isinstance(figure, int | float) and figure == figure:
            moment = _to_microseconds(event.time)
            yield {
                "ph": "C",
                "name": key,
                "pid": 1,
                "tid": 0,
                "ts": moment,
                "args": {key: figure},
            }
