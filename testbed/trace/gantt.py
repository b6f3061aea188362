"""What every device was doing when: the bars of a Gantt chart, read from the events of a run."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

from testbed.trace.disturbances import strikes
from testbed.trace.events import Event

BarKind = Literal["compute", "send", "receive", "down"]


class Bar(NamedTuple):  # of which a long run has a million: made faster than a dataclass
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
    for event in events:
        ended = event.event == "state" and event.fields.get("state") in ("finished", "failed", "stopped")
        # A lead that a fault struck down starts again: only the last word counts.
        if ended and event.device == lead and event.time > 0 and event.fields.get("state") == "finished":
            return event.time
    return max((event.time for event in events), default=0.0)


def _communication(event: Event) -> Bar:
    fields = event.fields
    start, size = float(fields["start"]), int(fields.get("bytes", 0))
    end = start + float(fields["duration"])
    label = str(fields.get("message", ""))
    if event.event == "send":
        # Waiting behind earlier messages is not sending.
        begin = min(start + float(fields.get("queued") or 0.0), end)
        return Bar(event.device, "send", begin, end, label, peer=str(fields["peer"]), size=size)
    if event.event == "receive":
        return Bar(event.device, "receive", start, end, label, peer=str(fields["peer"]), size=size)
    peers = ", ".join(str(peer) for peer in fields.get("peers", ()))
    return Bar(event.device, "send", start, end, label, peer=peers, size=size)


def outages(events: Sequence[Event], end: float) -> list[Bar]:
    """Return when which device was dead or frozen by a fault."""
    bars = []
    for strike in strikes(events):
        if strike.action not in ("kill", "pause"):
            continue
        # "Undone" is when the restart was ordered; the device is back when it says so.
        back = [
            event.time
            for event in events
            if event.device == strike.target
            and event.event == "state"
            and event.fields.get("state") in ("up", "started")
            and event.time > strike.struck
        ]
        returned = min(back) if back and strike.action == "kill" else strike.undone
        bars.append(Bar(strike.target, "down", strike.struck, end if returned is None else returned, strike.action))
    return bars


def bars(events: Sequence[Event], end: float) -> list[Bar]:
    """Return all bars in the order of their starts; ``end`` closes what was never closed."""
    found: list[Bar] = []
    begun: dict[tuple[Hashable, ...], list[Event]] = defaultdict(list)
    down = outages(events, end)
    for event in events:
        if event.event == "begin":
            begun[_work(event)].append(event)
        elif event.event == "compute":
            # Of several alike the last: what an earlier one began was lost in a restart.
            waiting = begun[_work(event)]
            if waiting:
                waiting.pop()
            start = float(event.fields["start"])
            found.append(_span(event, start, start + float(event.fields["duration"])))
        elif event.event in ("send", "receive", "cast"):
            found.append(_communication(event))
    lost = [event for alike in begun.values() for event in alike]
    done = [bar for bar in found if bar.kind == "compute"] if lost else []
    return sorted([*found, *down, *_interrupted(lost, done, down, end)], key=lambda bar: (bar.start, bar.end))


def _work(event: Event) -> tuple[Hashable, ...]:
    said = event.fields.get
    return event.device, said("span"), said("batch"), said("micro")


def _interrupted(lost: Sequence[Event], done: Sequence[Bar], down: Sequence[Bar], end: float) -> list[Bar]:
    """Return work that began and was never done: until its device died, or a processor was needed for other work."""
    found = []
    for event in lost:
        own = [bar for bar in done if bar.device == event.device]
        processors = len(lanes(sorted(own, key=lambda bar: bar.start)))
        later = sorted(bar.start for bar in own if bar.start > event.time)
        later += sorted(other.time for other in lost if other.device == event.device and other.time > event.time)
        needed = (at for at in sorted(later) if sum(bar.start <= at < bar.end for bar in own) >= processors)
        died = (bar.start for bar in down if bar.device == event.device and bar.start >= event.time)
        found.append(_span(event, event.time, min(next(needed, end), min(died, default=end)), interrupted=True))
    return found


def _span(event: Event, start: float, end: float, interrupted: bool = False) -> Bar:
    fields = event.fields
    return Bar(
        event.device,
        "compute",
        start,
        end,
        str(fields.get("span", "")),
        batch=fields.get("batch"),
        micro=fields.get("micro"),
        interrupted=interrupted,
    )


def lanes(intervals: Iterable[Bar]) -> list[list[Bar]]:
    """Split bars, given in the order of their starts, into as few rows as possible without overlap in a row."""
    rows: list[list[Bar]] = []
    free: list[tuple[float, int]] = []
    for bar in intervals:
        if free and free[0][0] <= bar.start:
            _, number = heapq.heappop(free)
            rows[number].append(bar)
        else:
            number = len(rows)
            rows.append([bar])
        heapq.heappush(free, (bar.end, number))
    return rows
