"""The bars of a Gantt chart, computed from the events of a run."""

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
CHARTED = tuple(_KINDS)
"""Events drawn as bars."""
Moments: TypeAlias = "npt.NDArray[np.float64]"
"""Seconds of the run, (events,)."""
_Work = tuple[str, str | None, int | None, int | None]
"""Device, span, batch and micro-batch of a computation."""


# A named tuple, which is created faster than a dataclass: a long run has millions.
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
        # Other states of the coordinator do not count: after a fault, its program starts again.
        is_finished = event.fields.get("state") == "finished"
        if is_finished and event.device == coordinator and event.time > 0:
            return event.time
    return log.latest


def outages(events: Sequence[Event], end: float) -> list[Bar]:
    """Return the outages by device; a killed device is down until its program runs again."""
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
        later = [time for time in starts[strike.target] if time > strike.struck]
        if later and strike.action == "kill":
            # `undone` is the order to restart; booting and loading the model take time after that.
            returned = min(later)
        until = end if returned is None else returned
        bars.append(Bar(strike.target, "down", strike.struck, until, strike.action))
    return bars


def bars(
    events: Sequence[Event], end: float, near: Sequence[Interval] | None = None
) -> Iterator[Bar]:
    """Yield all bars, or those that overlap given intervals; ``end`` closes unfinished ones.

    The bars are in no particular order within a few thousand events.
    """
    log = EventLog.made_of(events)
    fields = ("device", "span", "message", "peer", "peers", "batch", "micro", "bytes")
    for name, starts, stops, columns in _charted_columns(log, *fields):
        kind = _KINDS[name]
        times = (starts.tolist(), stops.tolist())
        rows: Iterable[tuple[Any, ...]] = zip(*times, *columns, strict=False)
        if near is not None:
            # Selected as arrays: a report draws a few steps of a run of millions of events.
            inside = [(starts < to) & (since < stops) for since, to in near]
            chosen = np.logical_or.reduce(inside)
            rows = compress(rows, chosen) if chosen.any() else ()
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
    """Yield, for groups of similar events, their name, start and end times, ``(events,)``, and the requested fields."""
    for name, columns in log.of(*CHARTED).columns(
        "start", "duration", "queued", *fields
    ):
        start, duration, queued, *others = columns
        starts = np.fromiter(start, float)
        stops = starts + np.fromiter(duration, float, len(starts))
        # Waiting behind earlier messages is not sending.
        if name == "send":
            waited = np.fromiter((each or 0.0 for each in queued), float, len(starts))
            starts = np.minimum(starts + waited, stops)
        yield name, starts, stops, others


def _unrecorded_bars(log: EventLog, end: float) -> Iterator[Bar]:
    """Yield bars without a recorded end: outages and interrupted work."""
    down = outages(log, end)
    yield from down
    unfinished = _begun_more_often_than_done(log)
    if not unfinished:
        return
    fields = ("event", "time", "device", "span", "batch", "micro")
    for name, time, *work in log.of("begin", "compute").rows(*fields):
        times = unfinished.get(tuple(work))
        if times is None:
            continue
        if name == "begin":
            times.append(time)
        elif times:
            # The last of several equal ones has ended: an earlier one was lost in a restart.
            times.pop()
    lost = []
    for key, times in unfinished.items():
        lost += [(key, time) for time in times]
    yield from _interrupted_bars(lost, log, down, end)


def _begun_more_often_than_done(log: EventLog) -> dict[_Work, list[float]]:
    """Return candidates for interrupted work by counting, to keep only unfinished work in memory."""
    if not log.of("begin"):
        return {}
    left: dict[_Work, int] = {}
    fields = ("device", "span", "batch", "micro")
    for name, columns in log.of("begin", "compute").columns(*fields):
        change = 1 if name == "begin" else -1
        for work in zip(*columns, strict=False):
            balance = left.pop(work, 0) + change
            # Finished work leaves the dictionary, which would otherwise grow to all computations of the run.
            if balance:
                left[work] = balance
    return {work: [] for work, balance in left.items() if balance > 0}


def _interrupted_bars(
    lost: Sequence[tuple[_Work, float]], log: EventLog, down: Sequence[Bar], end: float
) -> Iterator[Bar]:
    """Yield unfinished work, until the device died or its processor started other work."""
    done: dict[str, list[Interval]] = {work[0]: [] for work, _ in lost}
    begun: defaultdict[str, list[float]] = defaultdict(list)
    for work, time in lost:
        begun[work[0]].append(time)
    computations = log.of("compute")
    for device, start, duration in computations.rows("device", "start", "duration"):
        if device in done:
            done[device].append((start, start + duration))
    for (device, span, batch, micro), time in lost:
        own = intervals(sorted(done[device]))
        starts, ends = own[:, 0], np.sort(own[:, 1])
        # The log does not say when lost work ended. The device has as many processors as ever computed at once: the
        # first later start that finds all of them busy shows that the lost work no longer occupied one.
        processors = int(lanes(own).max(initial=-1)) + 1
        lost_later = [start for start in begun[device] if start > time]
        later = np.sort([*starts[starts > time], *lost_later])
        started = np.searchsorted(starts, later, "right")
        running = started - np.searchsorted(ends, later, "right")
        needed = later[running >= processors]
        died = [bar.start for bar in down if bar.device == device and bar.start >= time]
        stop = min(*(needed[:1].tolist() or [end]), *(died or [end]))
        yield Bar(
            device,
            "compute",
            time,
            stop,
            span or "",
            None,
            batch,
            micro,
            interrupted=True,
        )


def spans(
    events: Sequence[Event], end: float
) -> dict[str, dict[BarKind, dict[str, Intervals]]]:
    """Return the intervals of all bars by device, kind and label, each in the order of their starts.

    The intervals are those of `bars`, computed by columns instead of one by one: a long run has millions.
    """
    log = EventLog.made_of(events)
    # Each (device, kind, label) gets the next number at its first use.
    numbers: defaultdict[tuple[str, BarKind, str], int] = defaultdict(count().__next__)
    indices, began, ended = array("i"), array("d"), array("d")
    for name, begin, stop, (device, span, message) in _charted_columns(
        log, "device", "span", "message"
    ):
        # A computation has a span, and a transmission the kind of its message.
        texts = span if name == "compute" else message
        labels = (text or "" for text in texts)
        keys = zip(device, repeat(_KINDS[name]), labels, strict=False)
        indices.extend(map(numbers.__getitem__, keys))
        began.frombytes(begin.tobytes())
        ended.frombytes(stop.tobytes())
    for bar in _unrecorded_bars(log, end):
        indices.append(numbers[bar.device, bar.kind, bar.label])
        began.append(bar.start)
        ended.append(bar.end)
    # By device, kind and label, then by start, then by end.
    order = np.lexsort((np.asarray(ended), np.asarray(began), np.asarray(indices)))
    counts = np.bincount(indices, minlength=len(numbers)).tolist()
    # Each of these columns has 80 MB for ten million bars, so they are freed as early as possible.
    del indices
    both = np.empty((len(order), 2))
    both[:, 0] = np.asarray(began)[order]
    del began
    both[:, 1] = np.asarray(ended)[order]
    del ended, order
    stretches: dict[str, dict[BarKind, dict[str, Intervals]]] = {}
    first = 0
    for (device, kind, label), length in zip(numbers, counts, strict=True):
        by_label = stretches.setdefault(device, {}).setdefault(kind, {})
        by_label[label] = both[first : first + length]
        first += length
    return stretches
