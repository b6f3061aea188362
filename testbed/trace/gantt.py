"""What every device was doing when: the bars of a Gantt chart, read from the events of a run."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from testbed.trace.disturbances import strikes
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, Intervals, in_order, intervals, lanes
from testbed.trace.log import EventLog

BarKind = Literal["compute", "send", "receive", "down"]
CHARTED = ("compute", "send", "receive", "cast")
"""Events that each are a bar."""
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
    """Began, but a fault kept it from ending."""


def run_end(events: Sequence[Event], lead: str) -> float:
    """Return when the workload was over: the lead's program ended, else the last thing recorded."""
    log = EventLog.made_of(events)
    for event in log.of("state"):
        # A lead that a fault struck down starts again: only the last word counts.
        if event.device == lead and event.time > 0 and event.fields.get("state") == "finished":
            return event.time
    return log.latest


def outages(events: Sequence[Event], end: float) -> list[Bar]:
    """Return when which device was dead or frozen by a fault."""
    bars = []
    states = EventLog.made_of(events).of("state")
    for strike in strikes(events):
        if strike.action not in ("kill", "pause"):
            continue
        # "Undone" is when the restart was ordered; the device is back when it says so.
        back = [
            event.time
            for event in states
            if event.device == strike.target
            and event.fields.get("state") in ("up", "started")
            and event.time > strike.struck
        ]
        returned = min(back) if back and strike.action == "kill" else strike.undone
        bars.append(Bar(strike.target, "down", strike.struck, end if returned is None else returned, strike.action))
    return bars


def bars(events: Sequence[Event], end: float) -> Iterator[Bar]:
    """Yield all bars, in no order that holds throughout; ``end`` closes what was never closed."""
    log = EventLog.made_of(events)
    begun: dict[_Work, list[float]] = defaultdict(list)
    down = outages(log, end)
    fields = ("span", "batch", "micro", "start", "duration", "message", "peer", "peers", "bytes", "queued")
    found = log.of(*CHARTED, "begin").rows("event", "time", "device", *fields)
    for name, time, device, span, batch, micro, start, duration, message, peer, peers, size, queued in found:
        if name == "begin":
            begun[device, span, batch, micro].append(time)
        elif name == "compute":
            # Of several alike the last: what an earlier one began was lost in a restart.
            if waiting := begun.get((device, span, batch, micro)):
                waiting.pop()
                if not waiting:
                    del begun[device, span, batch, micro]
            yield Bar(device, "compute", float(start), float(start + duration), span or "", None, batch, micro)
        else:
            kind: BarKind = "receive" if name == "receive" else "send"
            stop = float(start + duration)
            # Waiting behind earlier messages is not sending.
            begin = min(start + (queued or 0.0), stop) if name == "send" else start
            other = ", ".join(map(str, peers or ())) if name == "cast" else str(peer)
            yield Bar(device, kind, float(begin), stop, message or "", other, size=int(size or 0))
    yield from down
    if begun:
        yield from _interrupted([(work, time) for work, alike in begun.items() for time in alike], log, down, end)


def _interrupted(lost: Sequence[tuple[_Work, float]], log: EventLog, down: Sequence[Bar], end: float) -> Iterator[Bar]:
    """Yield work that began and was never done: until its device died, or a processor was needed for other work."""
    done: dict[str, list[Interval]] = {work[0]: [] for work, _ in lost}
    for device, start, duration in log.of("compute").rows("device", "start", "duration"):
        if device in done:
            done[device].append((start, start + duration))
    for (device, span, batch, micro), time in lost:
        own = intervals(sorted(done[device]))
        starts, ends = own[:, 0], np.sort(own[:, 1])
        processors = int(lanes(own).max(initial=-1)) + 1
        later = np.sort([*starts[starts > time], *(at for work, at in lost if work[0] == device and at > time)])
        running = np.searchsorted(starts, later, "right") - np.searchsorted(ends, later, "right")
        needed = later[running >= processors]
        died = (bar.start for bar in down if bar.device == device and bar.start >= time)
        stop = min(float(needed[0]) if len(needed) else end, min(died, default=end))
        yield Bar(device, "compute", time, stop, span or "", None, batch, micro, interrupted=True)


def spans(charted: Iterable[Bar]) -> dict[str, dict[BarKind, dict[str, Intervals]]]:
    """Return the stretches of bars by device, kind and label, each in the order of their starts."""
    found: dict[tuple[str, BarKind, str], array[float]] = defaultdict(lambda: array("d"))
    for bar in charted:
        found[bar.device, bar.kind, bar.label].extend((bar.start, bar.end))
    stretches: dict[str, dict[BarKind, dict[str, Intervals]]] = {}
    for (device, kind, label), own in found.items():
        labels = stretches.setdefault(device, {}).setdefault(kind, {})
        labels[label] = in_order(np.frombuffer(own).reshape(-1, 2))
    return stretches
