"""What the host added to steps and requests: the lateness that lies on their critical paths.

A device that is late delays a step only if the step waits for it. So each step (or request) is walked back from its
end: whatever ended last on a device before it went on is what it waited for, work or a message, and a message leads on
to its sender. What the host was late by along this path, the step was late by. Everything is read off the events.

Of a message on a link that only delays and limits, lateness is what it took beyond the link's own time. Where a link
also loses, reorders or varies, or shares its rate with others, that would be no lateness of the host; then what can be
told from it is counted: that the message left too late, and how late packets are let go on the average.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from testbed.experiment import Experiment
from testbed.network.link import Link, Pair
from testbed.trace.events import Event
from testbed.trace.intervals import Interval
from testbed.wire.framing import WINDOW, wire_bytes

_SAME = 1e-6
"""Seconds within which two instants are one: they went through a text of nine digits."""
_LONGEST = 10_000
"""Pieces of one path; a longer one is not followed to its beginning."""


@dataclass(frozen=True)
class PathTime:
    """Seconds of critical paths, or those that the host added to them."""

    computing: float = 0.0
    """Where it is the host's: work begun, done or handed over too late."""
    messaging: float = 0.0
    """From the call that sends a message to its arrival; the host's: beyond what its link takes."""

    def __add__(self, other: PathTime) -> PathTime:
        return PathTime(self.computing + other.computing, self.messaging + other.messaging)


class _Piece(NamedTuple):
    """Something that a device may have waited for."""

    end: float
    start: float
    """When it could begin."""
    late: float
    sender: str | None = None
    """Where a message came from; it was sent at ``start``."""


class CriticalPaths:
    """The pieces of a run's devices, in the order of their ends."""

    def __init__(self, events: Sequence[Event], experiment: Experiment, packet_lateness: float = 0.0) -> None:
        """``packet_lateness`` is by how many seconds packets were let go too late, on the average."""
        pieces: dict[str, list[_Piece]] = defaultdict(list)
        links = _LinksInForce(events, experiment)
        sent = _departures(events, links)
        for event in events:
            fields = event.fields
            if event.event == "compute":
                late = fields.get("late", fields.get("deficit", 0.0))
                pieces[event.device].append(_Piece(fields["start"] + fields["duration"], fields["start"], late))
            elif event.event == "receive":
                arrived = fields["start"] + fields["duration"]
                pair = (fields["peer"], event.device)
                known = sent.get((*pair, fields.get("message")))
                departure = None if known is None else known.take(arrived)
                if departure is None:
                    continue
                took = None if departure.broadcast else links.time(pair, fields.get("bytes", 0), departure.called)
                if took is None:
                    late = departure.late + packet_lateness
                else:
                    late = max(0.0, arrived - departure.called - departure.queued - took)
                pieces[event.device].append(_Piece(arrived, departure.called, late, fields["peer"]))
        self._pieces = {name: sorted(own, key=lambda piece: piece.end) for name, own in pieces.items()}
        self._ends = {name: [piece.end for piece in own] for name, own in self._pieces.items()}

    def lateness(self, device: str, window: Interval) -> PathTime:
        """Return what the host added to the path that ends on a device at the end of a window, within the window."""
        return self._sum(device, window, lambda piece: piece.late)

    def spent(self, device: str, window: Interval) -> PathTime:
        """Return what the path that ends on a device at the end of a window consists of; the rest was neither."""
        return self._sum(device, window, lambda piece: piece.end - max(piece.start, window[0]))

    def _sum(self, device: str, window: Interval, seconds: Callable[[_Piece], float]) -> PathTime:
        found = PathTime()
        for piece in self._path(device, window):
            found += PathTime(seconds(piece)) if piece.sender is None else PathTime(messaging=seconds(piece))
        return found

    def _path(self, device: str, window: Interval) -> Iterator[_Piece]:
        """Yield the pieces of the path that ends on a device at the end of a window, the last one first."""
        begun, instant = window
        # Each piece once: several that take no time would lead to one another for ever.
        passed: dict[str, int] = {}
        for _ in range(_LONGEST):
            index = bisect_right(self._ends.get(device, []), instant + _SAME)
            index = min(index, passed.get(device, index)) - 1
            if index < 0 or self._ends[device][index] <= begun:
                return
            piece, passed[device] = self._pieces[device][index], index
            yield piece
            device, instant = piece.sender or device, piece.start


class _LinksInForce:
    """The links as they were at each moment: as the scenario has them, and as faults and traces left them."""

    def __init__(self, events: Sequence[Event], experiment: Experiment) -> None:
        limited = {each.name for each in experiment.devices if each.uplink is not None or each.downlink is not None}
        shared = {name for cell in experiment.cells for name in cell.devices}
        self._crowded = limited | shared
        self._begun: dict[Pair, list[float]] = {}
        self._links: dict[Pair, list[Link]] = {pair: [link] for pair, link in experiment.links.items()}
        for event in events:
            if event.event == "link":
                pair = (event.fields["source"], event.fields["destination"])
                figures = {key: event.fields[key] for key in ("rate", "delay", "loss", "up")}
                others = any(event.fields.get(key) for key in _BLURRED)
                # Of what else there is to such a link it matters only that there is something.
                link = replace(Link(**figures), duplicate=1.0 if others else 0.0)
                self._links.setdefault(pair, [Link()]).append(link)
                self._begun.setdefault(pair, []).append(event.time)

    def time(self, pair: Pair, content: float, instant: float) -> float | None:
        """Return the seconds a message takes on a link that is its own, None where that cannot be told."""
        link = self._own(pair, instant)
        return None if link is None else link.delay + link.transmission_time(wire_bytes(content))

    def transmission(self, pair: Pair, content: float, instant: float) -> float | None:
        """Return the seconds for which a message occupies such a link."""
        link = self._own(pair, instant)
        return None if link is None else link.transmission_time(wire_bytes(content))

    def _own(self, pair: Pair, instant: float) -> Link | None:
        """Return the link between two devices if it only limits and delays, and is shared with nothing."""
        if pair not in self._links or self._crowded & set(pair):
            return None
        link = self._links[pair][bisect_right(self._begun.get(pair, []), instant)]
        return None if not link.up or any(getattr(link, name) for name in _BLURRED) else link


_BLURRED = ("jitter", "loss", "bursts", "duplicate", "reorder", "corrupt")
"""Figures of a link with which the time of one message says nothing."""


class _Departure(NamedTuple):
    called: float
    queued: float
    """Seconds behind earlier messages to the same device: until the link was free and the window had room."""
    late: float
    """Seconds after it could have left."""
    begun: float
    acknowledged: float = math.inf
    """When its sender knew that it had arrived; never for a cast."""
    broadcast: bool = False
    """Sent at the rate of the slowest of several links."""


class _Departures:
    """The messages of one kind from one device to another, in the order in which they left."""

    def __init__(self) -> None:
        self._begun: list[float] = []
        self._all: list[_Departure] = []
        self._next = 0
        """The first that has not arrived."""

    def add(self, departure: _Departure) -> None:
        """Note one that left later than those before it."""
        self._begun.append(departure.begun)
        self._all.append(departure)

    def take(self, instant: float) -> _Departure | None:
        """Return the one that arrives at an instant; instants only rise.

        Messages arrive in their order, before they are acknowledged. One that a restarted receiver gets again, or a
        cast, of which others may be lost, is the last to have left by then.
        """
        index = bisect_right(self._begun, instant) - 1
        following = self._all[index + 1] if index + 1 < len(self._all) else None
        arrived = index < 0 or (self._next > index and self._all[index].acknowledged < instant - _SAME)
        if following is not None and arrived and following.called <= instant:
            index += 1  # a busy host read its sender's clock after it had left
        if index < 0:
            return None
        while self._next < index and self._all[self._next].acknowledged < instant - _SAME:
            self._next += 1
        if self._next <= index and not self._all[self._next].broadcast:
            index = self._next
        self._next = index + 1
        return self._all[index]


class _Outlet:
    """One device's way to another, as far as its own messages occupy it."""

    def __init__(self) -> None:
        self._free = -math.inf
        self._unacknowledged: deque[tuple[float, float]] = deque()
        """Instant of the acknowledgement, and bytes."""

    def ready(self, called: float) -> float:
        """Return when a message could leave."""
        could = max(called, self._free)
        unacknowledged = sum(size for instant, size in self._unacknowledged if instant > could)
        while unacknowledged >= WINDOW:
            instant, size = self._unacknowledged.popleft()
            if instant > could:
                could, unacknowledged = instant, unacknowledged - size
        return could

    def occupy(self, until: float, acknowledged: float, size: float) -> None:
        """Note a message that has left by an instant."""
        self._free = until
        while self._unacknowledged and self._unacknowledged[0][0] <= until:
            self._unacknowledged.popleft()
        self._unacknowledged.append((acknowledged, size))


def _departures(events: Sequence[Event], links: _LinksInForce) -> Mapping[tuple[str, str, str | None], _Departures]:
    """Return the messages by sender, receiver and kind."""
    found: dict[tuple[str, str, str | None], _Departures] = defaultdict(_Departures)
    outlets: dict[Pair, _Outlet] = defaultdict(_Outlet)
    for event in sorted((event for event in events if event.event in ("send", "cast")), key=_begun):
        fields = event.fields
        called, begun = fields["start"], _begun(event)
        if event.event == "cast":
            departure = _Departure(called, 0.0, 0.0, begun, broadcast=True)
            for peer in fields["peers"]:
                found[event.device, peer, fields.get("message")].add(departure)
            continue
        pair, size = (event.device, fields["peer"]), fields.get("bytes", 0)
        could, acknowledged = outlets[pair].ready(called), called + fields["duration"]
        late = max(0.0, begun - could)
        found[(*pair, fields.get("message"))].add(_Departure(called, could - called, late, begun, acknowledged))
        # Where the link does not say how long it is busy, the acknowledgement does.
        busy = links.transmission(pair, size, called)
        outlets[pair].occupy(acknowledged if busy is None else could + late + busy, acknowledged, size)
    return found


def _begun(event: Event) -> float:
    fields = event.fields
    return float(fields["start"] + fields.get("queued", 0.0) + fields.get("encode", 0.0))
