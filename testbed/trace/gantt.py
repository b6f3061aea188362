"""The bars of a Gantt chart, computed from the events of a run.

A bar is one activity of one device: a computation, a transmission, a reception, or an outage.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, repeat
from typing import Any, Literal, NamedTuple, TypeAlias

from testbed.common.lazy import np, npt
from testbed.trace.disturbances import strikes
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, Intervals, intervals, lanes, overlaps
from testbed.trace.log import EventLog

BarKind = Literal["compute", "send", "receive", "down"]
_KINDS: dict[str, BarKind] = {
    "compute": "compute",
    "send": "send",
    "receive": "receive",
    "cast": "send",
}
"""Event -> kind of its bar."""
CHARTED = tuple(_KINDS)
"""Events drawn as bars."""
Moments: TypeAlias = "npt.NDArray[np.float64]"
"""Times of several events in seconds of the run, (events,)."""
_Work = tuple[str, str | None, int | None, int | None]
"""Device, span, batch and micro-batch of a computation."""


# A named tuple, which is created faster than a dataclass: a long run has millions of bars.
class Bar(NamedTuple):
    """One activity of one device, in seconds of the run."""

    device: str
    kind: BarKind
    start: float
    end: float
    label: str
    """Name of the span for compute, kind of the message for send and receive."""
    peer: str | None = None
    batch: int | None = None
    micro: int | None = None
    size: int | None = None
    """Bytes of the message."""
    interrupted: bool = False
    """Whether a fault interrupted the activity."""


def run_end(events: Sequence[Event], coordinator: str) -> float:
    """Return the end of the workload: the end of the coordinator's program, or else the time of the last event."""
    log = EventLog.made_of(events)
    for event in log.of("state"):
        # A stopped or failed program of the coordinator is no end, because the program starts again after a fault.
        is_finished = event.fields.get("state") == "finished"
        if is_finished and event.device == coordinator and event.time > 0:
            return event.time
    return log.latest


def outages(events: Sequence[Event], end: float) -> list[Bar]:
    """Return the outages by device; a killed device is down until the next start of the program."""
    bars = []
    starts: defaultdict[str, list[float]] = defaultdict(list)
    states = EventLog.made_of(events).of("state")
    for device, time, state in states.rows("device", "time", "state"):
        if state == "started":
            starts[device].append(time)
    for strike in strikes(events):
        if strike.action not in ("kill", "pause"):
            continue
        returned = strike.undone
        later_starts = [time for time in starts[strike.target] if time > strike.struck]
        if later_starts and strike.action == "kill":
            # `undone` is the time of the restart, after which the device boots and loads its model.
            returned = min(later_starts)
        until = end if returned is None else returned
        bars.append(Bar(strike.target, "down", strike.struck, until, strike.action))
    return bars


def bars(
    events: Sequence[Event], end: float, near: Sequence[Interval] | None = None
) -> Iterator[Bar]:
    """Yield all bars, or only bars overlapping one of the intervals ``near``.

    Bars without a recorded end last until ``end``, the end of the run. The order of the bars is arbitrary within a few
    thousand events.
    """
    log = EventLog.made_of(events)
    fields = ("device", "span", "message", "peer", "peers", "batch", "micro", "bytes")
    for name, starts, stops, columns in _charted_columns(log, *fields):
        kind = _KINDS[name]
        times = (starts.tolist(), stops.tolist())
        rows: Iterable[tuple[Any, ...]] = zip(*times, *columns, strict=False)
        if near is not None:
            # Selected by arrays, since a report draws few of the millions of events of a run.
            overlapping = [(starts < to) & (since < stops) for since, to in near]
            is_near = np.logical_or.reduce(overlapping)
            rows = compress(rows, is_near) if is_near.any() else ()
        for start, stop, device, span, message, peer, peers, batch, micro, size in rows:
            if kind == "compute":
                yield Bar(device, kind, start, stop, span or "", None, batch, micro)
                continue
            other = str(peer)
            if name == "cast":
                other = ", ".join(map(str, peers or ()))
            content = int(size or 0)
            yield Bar(device, kind, start, stop, message or "", other, size=content)
    for bar in _unrecorded_bars(log, end):
        if near is None or overlaps((bar.start, bar.end), near):
            yield bar


def _charted_columns(
    log: EventLog, *fields: str
) -> Iterator[tuple[str, Moments, Moments, Sequence[Iterable[Any]]]]:
    """Yield the event name, the start and end times, and the requested fields of each group of `CHARTED` events."""
    for name, columns in log.of(*CHARTED).columns(
        "start", "duration", "queued", *fields
    ):
        start, duration, queued, *others = columns
        starts = np.fromiter(start, float)
        stops = starts + np.fromiter(duration, float, len(starts))
        # The wait behind earlier messages does not count as sending.
        if name == "send":
            waited = np.fromiter((each or 0.0 for each in queued), float, len(starts))
            starts = np.minimum(starts + waited, stops)
        yield name, starts, stops, others


def _unrecorded_bars(log: EventLog, end: float) -> Iterator[Bar]:
    """Yield bars without a recorded end: outages and interrupted work."""
    down = outages(log, end)
    yield from down
    start_times: dict[_Work, list[float]] = {
        work: [] for work in _find_unfinished_work(log)
    }
    if not start_times:
        return
    fields = ("event", "time", "device", "span", "batch", "micro")
    for name, time, *work in log.of("begin", "compute").rows(*fields):
        times = start_times.get(tuple(work))
        if times is None:
            continue
        if name == "begin":
            times.append(time)
        elif times:
            # The computation that began last has ended; an earlier equal one was lost in a restart.
            times.pop()
    interrupted = []
    for key, times in start_times.items():
        interrupted += [(key, time) for time in times]
    yield from _interrupted_bars(interrupted, log, down, end)


def _find_unfinished_work(log: EventLog) -> list[_Work]:
    """Return the computations with more begins than ends."""
    if not log.of("begin"):
        return []
    # Starts minus ends of each computation.
    balances: dict[_Work, int] = {}
    fields = ("device", "span", "batch", "micro")
    for name, columns in log.of("begin", "compute").columns(*fields):
        change = 1 if name == "begin" else -1
        for work in zip(*columns, strict=False):
            balance = balances.pop(work, 0) + change
            # Finished work leaves the dictionary, which would otherwise grow to all computations of the run.
            if balance:
                balances[work] = balance
    return [work for work, balance in balances.items() if balance > 0]


def _interrupted_bars(
    interrupted: Sequence[tuple[_Work, float]],
    log: EventLog,
    down: Sequence[Bar],
    end: float,
) -> Iterator[Bar]:
    """Yield the bars of interrupted computations, given with their start times.

    A bar ends when the device died or when its processor started other work.
    """
    completed: dict[str, list[Interval]] = {}
    interrupted_starts: defaultdict[str, list[float]] = defaultdict(list)
    for (device, *_), start in interrupted:
        completed[device] = []
        interrupted_starts[device].append(start)
    computations = log.of("compute")
    for device, start, duration in computations.rows("device", "start", "duration"):
        if device in completed:
            completed[device].append((start, start + duration))
    for (device, span, batch, micro), start in interrupted:
        work = intervals(sorted(completed[device]))
        starts, ends = work[:, 0], np.sort(work[:, 1])
        # The log lacks the end of interrupted work. The device has as many processors as ever computed at once. The
        # first later start that finds all of them busy shows that the interrupted work no longer occupied a processor.
        processors = int(lanes(work).max(initial=-1)) + 1
        later_interrupted = [
            each for each in interrupted_starts[device] if each > start
        ]
        later_starts = np.sort([*starts[starts > start], *later_interrupted])
        started = np.searchsorted(starts, later_starts, "right")
        running = started - np.searchsorted(ends, later_starts, "right")
        reused = later_starts[running >= processors][:1].tolist()
        died = [
            bar.start for bar in down if bar.device == device and bar.start >= start
        ]
        stop = min(*(reused or [end]), *(died or [end]))
        yield Bar(
            device=device,
            kind="compute",
            start=start,
            end=stop,
            label=span or "",
            batch=batch,
            micro=micro,
            interrupted=True,
        )


def spans(
    events: Sequence[Event], end: float
) -> dict[str, dict[BarKind, dict[str, Intervals]]]:
    """Return the intervals of all bars by device, kind and label, each in the order of their starts.

    The intervals are those of `bars`, computed by columns instead of one by one, since a long run has millions.
    """
    log = EventLog.made_of(events)
    # Each group (device, kind, label) gets the next number at its first use.
    numbers: defaultdict[tuple[str, BarKind, str], int] = defaultdict(count().__next__)
    # Three columns with a value for each bar.
    groups, starts, ends = array("i"), array("d"), array("d")
    for name, begin, stop, (device, span, message) in _charted_columns(
        log, "device", "span", "message"
    ):
        # A computation has a span, and a transmission the kind of its message.
        texts = span if name == "compute" else message
        labels = (text or "" for text in texts)
        keys = zip(device, repeat(_KINDS[name]), labels, strict=False)
        groups.extend(map(numbers.__getitem__, keys))
        starts.frombytes(begin.tobytes())
        ends.frombytes(stop.tobytes())
    for bar in _unrecorded_bars(log, end):
        groups.append(numbers[bar.device, bar.kind, bar.label])
        starts.append(bar.start)
        ends.append(bar.end)
    # `lexsort` sorts by its last argument first: by group, then by start, then by end.
    order = np.lexsort((np.asarray(ends), np.asarray(starts), np.asarray(groups)))
    counts = np.bincount(groups, minlength=len(numbers)).tolist()
    # Each of these columns has up to 80 MB for ten million bars, so they are freed as early as possible.
    del groups
    ordered = np.empty((len(order), 2))
    ordered[:, 0] = np.asarray(starts)[order]
    del starts
    ordered[:, 1] = np.asarray(ends)[order]
    del ends, order
    by_device: dict[str, dict[BarKind, dict[str, Intervals]]] = {}
    first = 0
    for (device, kind, label), length in zip(numbers, counts, strict=True):
        by_label = by_device.setdefault(device, {}).setdefault(kind, {})
        by_label[label] = ordered[first : first + length]
        first += length
    return by_device
