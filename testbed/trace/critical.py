"""Host overhead on the critical paths of steps and requests.

A late device delays a step only if the step waits for the device. Each step (or request) is therefore walked back from
its end: the activity that ended last on a device before it continued is the awaited one, either work or a message, and
a message leads to its sender. Lateness of the host along this path delays the step. Everything is computed from the
events.

For a message on a link with only delay and rate, the lateness is the time beyond the link's own. For a link that also
loses, reorders or varies, or shares its rate, this difference would not be the host's; only a late departure and the
mean lateness of packets are counted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from testbed.common.lazy import np, npt
from testbed.experiment import Experiment
from testbed.network.link import Link, Pair
from testbed.trace.events import Event
from testbed.trace.intervals import Interval
from testbed.trace.log import EventLog
from testbed.wire.framing import WINDOW, wire_bytes

_SAME = 1e-6
"""Seconds within which two times are equal, because times are rounded to nine digits in the log."""
_LONGEST = 10_000
"""Maximum number of segments of one path."""


@dataclass(frozen=True)
class PathTime:
    """Seconds spent on critical paths, or added by the host."""

    computing: float = 0.0
    """Seconds of computation; for the host: work started, finished or handed over late."""
    messaging: float = 0.0
    """Seconds from the send call to the arrival; for the host: time beyond the link's own."""

    def __add__(self, other: PathTime) -> PathTime:
        return PathTime(
            self.computing + other.computing, self.messaging + other.messaging
        )


class _Pieces:
    """Activities that a device may have waited for, ordered by end time, in seconds of the run."""

    def __init__(self) -> None:
        # Arrays, not a list of objects: a long run has millions of activities.
        self.ends = array("d")
        self.starts = array("d")
        """Time when each activity could begin, or when the message was sent."""
        self.late = array("d")
        self.senders: list[str | None] = []
        """Sender of each message; None for a computation."""

    def add(
        self, end: float, start: float, lateness: float, sender: str | None = None
    ) -> None:
        self.ends.append(end)
        self.starts.append(start)
        self.late.append(lateness)
        self.senders.append(sender)

    def sort(self) -> None:
        order = np.argsort(self.ends, kind="stable")
        self.senders = [self.senders[index] for index in order]
        self.ends = _reordered(self.ends, order)
        self.starts = _reordered(self.starts, order)
        self.late = _reordered(self.late, order)


def _reordered(column: array[float], order: npt.NDArray[np.int64]) -> array[float]:
    return array("d", np.frombuffer(column)[order].tobytes())


class CriticalPaths:
    """The pieces of a run's devices, in the order of their ends."""

    def __init__(
        self,
        events: Sequence[Event],
        experiment: Experiment,
        packet_lateness: float = 0.0,
    ) -> None:
        """Build the paths; ``packet_lateness`` is the mean lateness of packets in seconds."""
        log = EventLog.made_of(events)
        pieces: dict[str, _Pieces] = defaultdict(_Pieces)
        links = _LinksInForce(log, experiment)
        sent = _index_departures(log, links)
        fields = ("event", "device", "start", "duration")
        of_work = ("late", "deficit")
        of_message = ("peer", "message", "bytes")
        # One pass for both: activities that end at one instant keep the order of the log.
        ended = log.of("compute", "receive").rows(*fields, *of_work, *of_message)
        for event, device, start, duration, *others in ended:
            late, deficit, peer, message, size = others
            end = start + duration
            if event == "compute":
                if late is None:
                    # Logs of older versions have the deficit alone.
                    late = deficit or 0.0
                pieces[device].add(end, start, late)
                continue
            departures = sent.get((peer, device, message))
            departure = None if departures is None else departures.take(end)
            # A sender that was killed before the acknowledgement has not recorded the message.
            if departure is None:
                continue
            # Seconds that the link itself needs; None where no single time follows from its properties.
            needed = None
            if not departure.broadcast:
                needed = links.time((peer, device), size or 0, departure.called)
            if needed is None:
                beyond = departure.late + packet_lateness
            else:
                beyond = max(0.0, end - departure.called - departure.queued - needed)
            pieces[device].add(end, departure.called, beyond, peer)
        self._pieces = pieces
        for own in pieces.values():
            own.sort()

    def lateness(self, device: str, window: Interval) -> PathTime:
        """Return the host's additions to the path from the end of a window on a device."""
        return self._sum_path(device, window, lambda own, index: own.late[index])

    def spent(self, device: str, window: Interval) -> PathTime:
        """Return computation and messaging time of the path from the end of a window on a device."""
        return self._sum_path(
            device,
            window,
            lambda own, index: own.ends[index] - max(own.starts[index], window[0]),
        )

    def _sum_path(
        self, device: str, window: Interval, seconds: Callable[[_Pieces, int], float]
    ) -> PathTime:
        total = PathTime()
        for own, index in self._walk_path(device, window):
            is_computation = own.senders[index] is None
            spent = seconds(own, index)
            total += PathTime(spent) if is_computation else PathTime(messaging=spent)
        return total

    def _walk_path(
        self, device: str, window: Interval
    ) -> Iterator[tuple[_Pieces, int]]:
        """Yield the segments of the path back from the end of a window on a device."""
        begun, instant = window
        # Each piece once: several that take no time would lead to one another for ever.
        passed: dict[str, int] = {}
        for _ in range(_LONGEST):
            own = self._pieces.get(device)
            if own is None:
                return
            index = bisect_right(own.ends, instant + _SAME)
            index = min(index, passed.get(device, index)) - 1
            if index < 0 or own.ends[index] <= begun:
                return
            passed[device] = index
            yield own, index
            # A message leads to its sender, a computation to what its device waited for before.
            device = own.senders[index] or device
            instant = own.starts[index]


class _LinksInForce:
    """The links over time: the scenario's, as changed by faults and traces."""

    def __init__(self, log: EventLog, experiment: Experiment) -> None:
        self._crowded: set[str] = set()
        """Devices whose messages share a rate with others, so that the duration of one says nothing."""
        for spec in experiment.devices:
            if spec.uplink is not None or spec.downlink is not None:
                self._crowded.add(spec.name)
        for cell in experiment.cells:
            self._crowded |= set(cell.devices)
        self._begun: dict[Pair, list[float]] = {}
        """Times of the changes of each link."""
        self._links: dict[Pair, list[Link]] = {
            pair: [link] for pair, link in experiment.links.items()
        }
        for event in log.of("link"):
            pair = (event.fields["source"], event.fields["destination"])
            common = {key: event.fields[key] for key in ("rate", "delay", "loss", "up")}
            is_blurred = any(event.fields.get(key) for key in _BLURRED)
            # Any blurred property stands for all: only their presence matters here.
            link = replace(Link(**common), duplicate=1.0 if is_blurred else 0.0)
            self._links.setdefault(pair, [Link()]).append(link)
            self._begun.setdefault(pair, []).append(event.time)

    def time(self, pair: Pair, content: float, instant: float) -> float | None:
        """Return the seconds for a message on an unshared deterministic link; None for other links."""
        link = self._unshared_link(pair, instant)
        if link is None:
            return None
        return link.delay + link.transmission_time(wire_bytes(content))

    def transmission(self, pair: Pair, content: float, instant: float) -> float | None:
        """Return the seconds for which a message occupies an unshared deterministic link; None for other links."""
        link = self._unshared_link(pair, instant)
        return None if link is None else link.transmission_time(wire_bytes(content))

    def _unshared_link(self, pair: Pair, instant: float) -> Link | None:
        if pair not in self._links or self._crowded & set(pair):
            return None
        link = self._links[pair][bisect_right(self._begun.get(pair, []), instant)]
        is_blurred = any(getattr(link, name) for name in _BLURRED)
        return link if link.up and not is_blurred else None


_BLURRED = ("jitter", "loss", "bursts", "duplicate", "reorder", "corrupt")
"""Random properties of a link, with which the time of one message says nothing."""


class _Departure(NamedTuple):
    """A message that has left its sender; instants are seconds of the run."""

    called: float
    """Time of the call of ``send`` or ``cast``."""
    queued: float
    """Seconds behind earlier messages to the same device: until the link was free and the window had room."""
    late: float
    """Seconds of avoidable delay before departure."""
    begun: float
    """Time when the first byte left."""
    acknowledged: float = math.inf
    """Time when the sender received the acknowledgement; infinite for a broadcast."""
    # A number as well, since `_Departures` stores all fields in arrays of numbers.
    broadcast: float | bool = False
    """Whether the message was sent at the rate of the slowest of several links."""


class _Departures:
    """Messages of one kind between two devices in the order of departure."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in _Departure._fields)
        """The values of each field of `_Departure`, in arrays because a long run has millions of messages."""
        self._next = 0
        """Index of the first message still in transit."""

    def add(self, departure: _Departure) -> None:
        """Add a message that left after all previous ones."""
        for column, value in zip(self._columns, departure, strict=True):
            column.append(value)

    def take(self, instant: float) -> _Departure | None:
        """Return the message that arrives at a time; times never decrease.

        Messages arrive in their order, before their acknowledgement. A message that a restarted receiver gets again, or
        a broadcast after lost ones, is the last one that has left by that time.
        """
        called, _, _, begun, acknowledged, broadcast = self._columns
        index = bisect_right(begun, instant) - 1
        is_over = self._next > index and acknowledged[index] < instant - _SAME
        may_be_next = index + 1 < len(begun) and (index < 0 or is_over)
        # A busy host may have read the sender's clock after the message had left.
        if may_be_next and called[index + 1] <= instant:
            index += 1
        if index < 0:
            return None
        while self._next < index and acknowledged[self._next] < instant - _SAME:
            self._next += 1
        if self._next <= index and not broadcast[self._next]:
            index = self._next
        self._next = index + 1
        return _Departure(*(column[index] for column in self._columns))


class _Outlet:
    """Occupation of a link by one device's own messages."""

    def __init__(self) -> None:
        self._free = -math.inf
        """Time when the last message so far has left."""
        self._unacknowledged: deque[tuple[float, float]] = deque()
        """Time of the acknowledgement and bytes of each message that may fill the window, the oldest first."""

    def ready(self, called: float) -> float:
        """Return when a message could leave."""
        ready = max(called, self._free)
        unacknowledged = 0.0
        for instant, size in self._unacknowledged:
            if instant > ready:
                unacknowledged += size
        # Each acknowledgement makes room in the window, in the order of the messages.
        while unacknowledged >= WINDOW:
            instant, size = self._unacknowledged.popleft()
            if instant > ready:
                ready = instant
                unacknowledged -= size
        return ready

    def occupy(self, until: float, acknowledged: float, size: float) -> None:
        """Record the departure of a message."""
        self._free = until
        # Acknowledged before the next message could leave: no longer in its way.
        while self._unacknowledged and self._unacknowledged[0][0] <= until:
            self._unacknowledged.popleft()
        self._unacknowledged.append((acknowledged, size))


def _index_departures(
    log: EventLog, links: _LinksInForce
) -> Mapping[tuple[str, str, str | None], _Departures]:
    """Return the messages by sender, receiver and kind."""
    departures: dict[tuple[str, str, str | None], _Departures] = defaultdict(
        _Departures
    )
    outlets: dict[Pair, _Outlet] = defaultdict(_Outlet)
    fields = ("event", "device", "start", "queued", "encode")
    further = ("peers", "peer", "message", "bytes", "duration")

    def departure_time(row: Sequence[Any]) -> float:
        _, _, called, queued, encode, *_ = row
        return float(called + (queued or 0.0) + (encode or 0.0))

    # Events are recorded with the acknowledgement, so their order is not that of the departures.
    sent = log.of("send", "cast").sorted_by(departure_time, *fields, *further)
    for row in sent:
        event, device, called, _, _, peers, peer, message, size, duration = row
        begun = departure_time(row)
        if event == "cast":
            departure = _Departure(called, 0.0, 0.0, begun, broadcast=True)
            for receiver in peers:
                departures[device, receiver, message].add(departure)
            continue
        pair, content = (device, peer), size or 0
        outlet = outlets[pair]
        ready = outlet.ready(called)
        acknowledged = called + duration
        # Encoding on the host, or a thread that woke up late: the emulated device would have sent at once.
        late = max(0.0, begun - ready)
        departure = _Departure(called, ready - called, late, begun, acknowledged)
        departures[(*pair, message)].add(departure)
        busy = links.transmission(pair, content, called)
        # A shared or random link is busy until the acknowledgement at the latest.
        until = acknowledged if busy is None else ready + late + busy
        outlet.occupy(until, acknowledged, content)
    return departures
