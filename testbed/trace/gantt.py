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


class Bar(NamedTuple):  # of which a long run has millions: made faster than a dataclass
    """One stretch of time of one device, in seconds of the run."""

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


def run_end(events: Sequence[Event], lead: str) -> float:
    """Return when the workload was over: the lead's program ended, else the last thing recorded."""
    log = EventLog.made_of(events)
    for event in log.of("state"):
        # A lead that a fault struck down starts again: only the last word counts.
        if (
            event.device == lead
            and event.time > 0
            and event.fields.get("state") == "finished"
        ):
            return event.time
    return log.latest


def outages(events: Sequence[Event], end: float) -> list[Bar]:
    """Return the outages by device; a killed device is down until its program runs again."""
    bars = []
    came: defaultdict[str, list[float]] = defaultdict(list)
    for device, time, state in (
        EventLog.made_of(events).of("state").rows("device", "time", "state")
    ):
        if state == "started":
            came[device].append(time)
    for strike in strikes(events):
        if strike.action not in ("kill", "pause"):
            continue
        # "Undone" is when the restart was ordered; booting and loading the model take their time after that.
        back = [time for time in came[strike.target] if time > strike.struck]
        returned = min(back) if back and strike.action == "kill" else strike.undone
        bars.append(
            Bar(
                strike.target,
                "down",
                strike.struck,
                end if returned is None else returned,
                strike.action,
            )
        )
    return bars


def bars(
    events: Sequence[Event], end: float, near: Sequence[Interval] | None = None
) -> Iterator[Bar]:
    """Yield all bars, or those that overlap given intervals; ``end`` closes unfinished ones.

    They come in no order that holds throughout, those of some thousand events after those of the thousands before.
    """
    log = EventLog.made_of(events)
    fields = ("device", "span", "message", "peer", "peers", "batch", "micro", "bytes")
    for name, starts, stops, columns in _charted_columns(log, *fields):
        kind = _KINDS[name]
        rows: Iterable[tuple[Any, ...]] = zip(
            starts.tolist(), stops.tolist(), *columns, strict=False
        )
        if near is not None:
            chosen = np.logical_or.reduce(
                [(starts < to) & (since < stops) for since, to in near]
            )
            rows = compress(rows, chosen) if chosen.any() else ()
        for start, stop, device, span, message, peer, peers, batch, micro, size in rows:
            if kind == "compute":
                yield Bar(device, kind, start, stop, span or "", None, batch, micro)
            else:
                other = (
                    ", ".join(map(str, peers or ())) if name == "cast" else str(peer)
                )
                yield Bar(
                    device, kind, start, stop, message or "", other, size=int(size or 0)
                )
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
        if name == "send":  # waiting behind earlier messages is not sending
            waited = np.fromiter((each or 0.0 for each in queued), float, len(starts))
            starts = np.minimum(starts + waited, stops)
        yield name, starts, stops, others


def _unrecorded_bars(log: EventLog, end: float) -> Iterator[Bar]:
    """Yield bars without a recorded end: outages and interrupted work."""
    down = outages(log, end)
    yield from down
    if waiting := _begun_more_often_than_done(log):
        for name, time, *rest in log.of("begin", "compute").rows(
            "event", "time", "device", "span", "batch", "micro"
        ):
            if (times := waiting.get(tuple(rest))) is None:
                continue
            if name == "begin":
                times.append(time)
            elif times:  # of several alike the last: what an earlier one began was lost in a restart
                times.pop()
        yield from _interrupted_bars(
            [(work, time) for work, times in waiting.items() for time in times],
            log,
            down,
            end,
        )


def _begun_more_often_than_done(log: EventLog) -> dict[_Work, list[float]]:
    """Return candidates for interrupted work by counting, to keep only unfinished work in memory."""
    left: dict[_Work, int] = {}
    if log.of("begin"):
        for name, columns in log.of("begin", "compute").columns(
            "device", "span", "batch", "micro"
        ):
            one = 1 if name == "begin" else -1
            for work in zip(*columns, strict=False):
                if more := left.pop(work, 0) + one:
                    left[work] = more
    return {work: [] for work, more in left.items() if more > 0}


def _interrupted_bars(
    lost: Sequence[tuple[_Work, float]], log: EventLog, down: Sequence[Bar], end: float
) -> Iterator[Bar]:
    """Yield unfinished work, until the device died or its processor started other work."""
    done: dict[str, list[Interval]] = {work[0]: [] for work, _ in lost}
    for device, start, duration in log.of("compute").rows(
        "device", "start", "duration"
    ):
        if device in done:
            done[device].append((start, start + duration))
    for (device, span, batch, micro), time in lost:
        own = intervals(sorted(done[device]))
        starts, ends = own[:, 0], np.sort(own[:, 1])
        processors = int(lanes(own).max(initial=-1)) + 1
        later = np.sort(
            [
                *starts[starts > time],
                *(at for work, at in lost if work[0] == device and at > time),
            ]
        )
        running = np.searchsorted(starts, later, "right") - np.searchsorted(
            ends, later, "right"
        )
        needed = later[running >= processors]
        died = (bar.start for bar in down if bar.device == device and bar.start >= time)
        stop = min(float(needed[0]) if len(needed) else end, min(died, default=end))
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
    """Return the stretches of all bars by device, kind and label, each in the order of their starts.

    As `bars` has them, of columns instead of one by one: a long run has millions.
    """
    log = EventLog.made_of(events)
    numbers: defaultdict[tuple[str, BarKind, str], int] = defaultdict(count().__next__)
    indices, began, ended = array("i"), array("d"), array("d")
    for name, begin, stop, (device, span, message) in _charted_columns(
        log, "device", "span", "message"
    ):
        called = (each or "" for each in (span if name == "compute" else message))
        indices.extend(
            map(
                numbers.__getitem__,
                zip(device, repeat(_KINDS[name]), called, strict=False),
            )
        )
        began.frombytes(begin.tobytes())
        ended.frombytes(stop.tobytes())
    for bar in _unrecorded_bars(log, end):
        indices.append(numbers[bar.device, bar.kind, bar.label])
        began.append(bar.start)
        ended.append(bar.end)
    order = np.lexsort((np.asarray(ended), np.asarray(began), np.asarray(indices)))
    counts = np.bincount(indices, minlength=len(numbers)).tolist()
    del indices  # of ten million bars all these columns are large
    both = np.empty((len(order), 2))
    both[:, 0] = np.asarray(began)[order]
    del began
    both[:, 1] = np.asarray(ended)[order]
    del ended, order
    stretches: dict[str, dict[BarKind, dict[str, Intervals]]] = {}
    first = 0
    for (device, kind, label), length in zip(numbers, counts, strict=True):
        labels = stretches.setdefault(device, {}).setdefault(kind, {})
        labels[label] = both[first : first + length]
        first += length
    return stretches
