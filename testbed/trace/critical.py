"""Host overhead on the critical paths of steps and requests.

A late device delays a step only if the step waits for the device. The critical path of a step (or request) is therefore
found backwards from the end of the step. An activity of a device is a computation or the reception of a message. Before
a device continued, it waited for the activity that ended last on this device. If this activity is a computation, the
path continues at its start on the same device; if it is a message, the path continues at the call of ``send`` on the
sender. The lateness that the host caused in the activities of this path has delayed the step. Everything is computed
from the events.

The lateness of a message depends on its link. If the link has only a delay and a rate, the time that the message needs
is known, and the rest of the time until its arrival is lateness. If the link is random (`_RANDOM_PROPERTIES`) or shares
its rate, the rest may be due to the link, so only a late departure and the mean lateness of packets are counted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from testbed.common.lazy import np, npt
from testbed.experiment import Experiment
from testbed.network.link import Link, Pair
from testbed.trace.events import Event
from testbed.trace.intervals import Interval
from testbed.trace.log import EventLog
from testbed.wire.framing import WINDOW, wire_bytes

_EQUAL_WITHIN = 1e-6
"""Seconds within which two times are equal, because times are rounded to nine digits in the log."""
_MAX_ACTIVITIES = 10_000
"""Maximum number of activities of one path. A path is finite in any case, since it has each activity at most once; the
limit bounds the search for one step in a run with millions of activities."""


@dataclass(frozen=True)
class PathTime:
    """Seconds of the activities on critical paths, by kind.

    `CriticalPaths.spent` returns the whole seconds, `CriticalPaths.lateness` the part that the host added.
    """

    computing: float = 0.0
    """Seconds of computations. The host adds to them when it starts, finishes or hands over work late."""
    messaging: float = 0.0
    """Seconds from the call of ``send`` to the arrival. The host adds the seconds that are not due to the link."""

    def __add__(self, other: PathTime) -> PathTime:
        return PathTime(
            self.computing + other.computing, self.messaging + other.messaging
        )


class _Activities:
    """The activities that a device may have waited for, in columns; `sort` orders them by their ends.

    Times are seconds of the run.
    """

    def __init__(self) -> None:
        # Arrays, not a list of objects: a long run has millions of activities.
        self.ends = array("d")
        self.starts = array("d")
        """Time when each activity could begin, or when the message was sent."""
        self.lateness = array("d")
        """Seconds by which the host delayed each activity."""
        self.senders: list[str | None] = []
        """Sender of each message; None for a computation."""

    def add(
        self, end: float, start: float, lateness: float, sender: str | None = None
    ) -> None:
        self.ends.append(end)
        self.starts.append(start)
        self.lateness.append(lateness)
        self.senders.append(sender)

    def sort(self) -> None:
        order = np.argsort(self.ends, kind="stable")
        self.senders = [self.senders[index] for index in order]
        self.ends = _reordered(self.ends, order)
        self.starts = _reordered(self.starts, order)
        self.lateness = _reordered(self.lateness, order)


def _reordered(column: array[float], order: npt.NDArray[np.int64]) -> array[float]:
    return array("d", np.frombuffer(column)[order].tobytes())


class CriticalPaths:
    """The critical paths of a run, found in the event log.

    A path leads back from the end of an interval, for example of a step, on a device; see the module's docstring.
    Example::

        paths = CriticalPaths(events, experiment)
        paths.lateness("coordinator", (12.0, 12.5)).computing  # seconds that the host added to this step
    """

    def __init__(
        self,
        events: Sequence[Event],
        experiment: Experiment,
        packet_lateness: float = 0.0,
    ) -> None:
        """Index the activities of each device; ``packet_lateness`` is the mean lateness of packets in seconds."""
        log = EventLog.made_of(events)
        activities: dict[str, _Activities] = defaultdict(_Activities)
        links = _LinksInForce(log, experiment)
        departures = _index_departures(log, links)
        common_fields = ("event", "device", "start", "duration")
        work_fields = ("late", "deficit")
        message_fields = ("peer", "message", "bytes")
        # One pass for both events, so that activities with equal ends keep the order of the log.
        rows = log.of("compute", "receive").rows(
            *common_fields, *work_fields, *message_fields
        )
        for event, device, start, duration, *others in rows:
            late, deficit, peer, kind, size = others
            end = start + duration
            if event == "compute":
                if late is None:
                    # Logs of older versions have the deficit alone.
                    late = deficit or 0.0
                activities[device].add(end, start, late)
                continue
            messages = departures.get((peer, device, kind))
            departure = None if messages is None else messages.take(end)
            # A sender that was killed before the acknowledgement has not recorded the message.
            if departure is None:
                continue
            # Seconds that the link itself needs; None if no single time follows from its properties, as for a cast,
            # which is sent at the rate of the slowest of several links.
            link_seconds = None
            if not departure.is_cast:
                link_seconds = links.time((peer, device), size or 0, departure.called)
            if link_seconds is None:
                lateness = departure.late + packet_lateness
            else:
                elapsed = end - departure.called - departure.link_wait
                lateness = max(0.0, elapsed - link_seconds)
            activities[device].add(end, departure.called, lateness, peer)
        self._activities = activities
        for device_activities in activities.values():
            device_activities.sort()

    def lateness(self, device: str, interval: Interval) -> PathTime:
        """Return the seconds added by the host to the path back from the end of an interval on a device.

        An activity that began before the interval counts with all of its lateness, since the events do not tell when
        the lateness occurred.
        """
        return self._sum_path(
            device, interval, lambda activities, index: activities.lateness[index]
        )

    def spent(self, device: str, interval: Interval) -> PathTime:
        """Return the seconds within an interval of the path back from the end of the interval on a device."""
        begin, _ = interval

        def seconds_within(activities: _Activities, index: int) -> float:
            return activities.ends[index] - max(activities.starts[index], begin)

        return self._sum_path(device, interval, seconds_within)

    def _sum_path(
        self,
        device: str,
        interval: Interval,
        seconds: Callable[[_Activities, int], float],
    ) -> PathTime:
        """Return the sum of ``seconds``, a function of columns and index of an activity, over a path."""
        total = PathTime()
        for activities, index in self._walk_path(device, interval):
            spent = seconds(activities, index)
            if activities.senders[index] is None:
                total += PathTime(computing=spent)
            else:
                total += PathTime(messaging=spent)
        return total

    def _walk_path(
        self, device: str, interval: Interval
    ) -> Iterator[tuple[_Activities, int]]:
        """Yield the activities of the path back from the end of an interval on a device, the last one first.

        An activity is yielded as all activities of its device and its index in them.
        """
        begin, instant = interval
        # On each device, the path continues only with activities before the one that it had last. Otherwise two
        # activities that begin and end at one instant would lead to one another for ever.
        latest_indices: dict[str, int] = {}
        for _ in range(_MAX_ACTIVITIES):
            activities = self._activities.get(device)
            if activities is None:
                return
            index = bisect_right(activities.ends, instant + _EQUAL_WITHIN)
            index = min(index, latest_indices.get(device, index)) - 1
            if index < 0 or activities.ends[index] <= begin:
                return
            latest_indices[device] = index
            yield activities, index
            # A message leads to its sender, a computation to the activity that its device waited for before.
            device = activities.senders[index] or device
            instant = activities.starts[index]


class _LinksInForce:
    """The links over time: the scenario's, as changed by faults and traces."""

    def __init__(self, log: EventLog, experiment: Experiment) -> None:
        self._sharing: set[str] = set()
        """Devices whose messages share a rate with others, so that the time of one message is not known."""
        for spec in experiment.devices:
            if spec.uplink is not None or spec.downlink is not None:
                self._sharing.add(spec.name)
        for cell in experiment.cells:
            self._sharing |= set(cell.devices)
        self._changed: dict[Pair, list[float]] = {}
        """Times of the changes of each link."""
        self._links: dict[Pair, list[Link | None]] = {}
        """Each link before its first change and after each change; None while it is random or down."""
        for pair, link in experiment.links.items():
            is_random = any(getattr(link, name) for name in _RANDOM_PROPERTIES)
            self._links[pair] = [link if link.up and not is_random else None]
        for event in log.of("link"):
            fields = event.fields
            pair = (fields["source"], fields["destination"])
            is_random = any(fields.get(name) for name in _RANDOM_PROPERTIES)
            changed = None
            if fields["up"] and not is_random:
                changed = Link(rate=fields["rate"], delay=fields["delay"])
            # A link that is missing in the scenario has no limits before its first change.
            self._links.setdefault(pair, [Link()]).append(changed)
            self._changed.setdefault(pair, []).append(event.time)

    def time(self, pair: Pair, size: float, instant: float) -> float | None:
        """Return the seconds for a message of ``size`` bytes; None if the link is random, down or shared."""
        link = self._predictable_link(pair, instant)
        if link is None:
            return None
        return link.delay + link.transmission_time(wire_bytes(size))

    def transmission(self, pair: Pair, size: float, instant: float) -> float | None:
        """Return the seconds for which a message of ``size`` bytes occupies the link: `time` without the delay."""
        link = self._predictable_link(pair, instant)
        return None if link is None else link.transmission_time(wire_bytes(size))

    def _predictable_link(self, pair: Pair, instant: float) -> Link | None:
        """Return the link at an instant; None if the link's properties do not determine the time of a message."""
        if pair not in self._links or self._sharing & set(pair):
            return None
        return self._links[pair][bisect_right(self._changed.get(pair, []), instant)]


_RANDOM_PROPERTIES = ("jitter", "loss", "bursts", "duplicate", "reorder", "corrupt")
"""Properties of a link with which the time of a message is random."""


class _Departure(NamedTuple):
    """The departure of a message from the sender; instants are seconds of the run."""

    called: float
    """Time of the call of ``send`` or ``cast``."""
    link_wait: float
    """Seconds for which the message had to wait behind earlier messages to the same device (see `_LinkQueue`)."""
    late: float
    """Seconds between the instant at which the message could have left and its first byte."""
    begun: float
    """Time when the first byte left."""
    acknowledged: float = math.inf
    """Time when the sender received the acknowledgement; infinite for a cast, which has none."""
    # `_Departures` stores each field in an array of numbers and returns 0.0 or 1.0 for this one.
    is_cast: float | bool = False


class _Departures:
    """Messages of one kind from one device to another, in the order of departure."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in _Departure._fields)
        """The values of each field of `_Departure`, in arrays because a long run has millions of messages."""
        self._next = 0
        """Index after the message that arrived last: the first one that can still arrive."""

    def add(self, departure: _Departure) -> None:
        """Add the departure of a message, later than all previous departures."""
        for column, value in zip(self._columns, departure, strict=True):
            column.append(value)

    def take(self, arrival: float) -> _Departure | None:
        """Return the departure of the message arriving at a time; None if no message had left by then.

        Calls must be in the order of the arrivals. Events of arrivals do not name the departure. Messages arrive in the
        order of their departures, each after its departure and before its acknowledgement. So the first message that
        has neither arrived in an earlier call nor been acknowledged before the arrival is returned.

        In two cases the message that left last before the arrival is returned instead. A cast may be lost and has no
        acknowledgement that would show it. And if every message that left has arrived, the receiver has been restarted
        and gets a message again.
        """
        _, _, _, _, acknowledged, is_cast = self._columns
        last = self._last_departed(arrival)
        if last < 0:
            return None
        # Acknowledged messages have arrived, even if the log lacks their receptions.
        while self._next < last and acknowledged[self._next] < arrival - _EQUAL_WITHIN:
            self._next += 1
        index = last
        if self._next <= last and not is_cast[self._next]:
            index = self._next
        self._next = index + 1
        return _Departure(*(column[index] for column in self._columns))

    def _last_departed(self, arrival: float) -> int:
        """Return the index of the last departure before an arrival; -1 if none.

        A busy host may read the sender's clock only after the message has left, so its recorded departure may even be
        later than its arrival. If no message that left by its record can be the one that arrives, the next message is
        taken, provided that it was sent (``called``) before the arrival.
        """
        called, _, _, begun, acknowledged, _ = self._columns
        last = bisect_right(begun, arrival) - 1
        next_index = last + 1
        if next_index == len(begun) or called[next_index] > arrival:
            return last
        if last < 0:
            return next_index
        has_arrived = last < self._next
        is_acknowledged = acknowledged[last] < arrival - _EQUAL_WITHIN
        return next_index if has_arrived and is_acknowledged else last


class _LinkQueue:
    """The queue of messages from one device to one peer, which determines the earliest departure of each message.

    A message leaves after the call of ``send`` as soon as two conditions hold: the bytes of all earlier messages are on
    the wire, and fewer than `WINDOW` bytes to the peer are unacknowledged (`testbed_agent.sending.Lane`).
    """

    def __init__(self) -> None:
        self._free = -math.inf
        """Time when the bytes of all earlier messages are on the wire."""
        self._unacknowledged: deque[tuple[float, float]] = deque()
        """Time of the acknowledgement, and bytes, of each message that may fill the window; the oldest first."""

    def take_turn(self, called: float) -> float:
        """Return when the next message, sent by a call at the time ``called``, can leave at the earliest.

        Removes the earlier messages whose acknowledgements this message waits for. Call it once for each message, in
        the order of departures, followed by `add`.
        """
        free = max(called, self._free)
        unacknowledged = 0.0
        for instant, size in self._unacknowledged:
            if instant > free:
                unacknowledged += size
        # Each acknowledgement makes room in the window, in the order of the messages.
        departure = free
        while unacknowledged >= WINDOW:
            instant, size = self._unacknowledged.popleft()
            # The same condition as in the sum: acknowledgements may coincide, and each must be subtracted.
            if instant > free:
                departure = max(departure, instant)
                unacknowledged -= size
        return departure

    def add(self, until: float, acknowledged: float, size: float) -> None:
        """Record a message of ``size`` bytes, occupying the link up to ``until``, with the time of acknowledgement."""
        self._free = until
        # Messages acknowledged by then leave the window before any later message can leave the device.
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
    queues: dict[Pair, _LinkQueue] = defaultdict(_LinkQueue)
    fields = ("event", "device", "start", "queued", "encode")
    further = ("peers", "peer", "message", "bytes", "duration")

    def departure_time(row: Sequence[Any]) -> float:
        _, _, called, queued, encode, *_ = row
        return float(called + (queued or 0.0) + (encode or 0.0))

    # Events are recorded with the acknowledgement, so their order is not that of the departures.
    sent = log.of("send", "cast").sorted_by(departure_time, *fields, *further)
    for row in sent:
        event, device, called, _, _, peers, peer, kind, recorded_size, duration = row
        begun = departure_time(row)
        if event == "cast":
            departure = _Departure(called, 0.0, 0.0, begun, is_cast=True)
            for receiver in peers:
                departures[device, receiver, kind].add(departure)
            continue
        pair, size = (device, peer), recorded_size or 0
        queue = queues[pair]
        # The wait that the event records (``queued``) includes the host's delays, so the link's wait is computed.
        earliest = queue.take_turn(called)
        acknowledged = called + duration
        # Encoding on the host, or a thread that woke up late: the emulated device would have sent at once.
        late = max(0.0, begun - earliest)
        departure = _Departure(called, earliest - called, late, begun, acknowledged)
        departures[(*pair, kind)].add(departure)
        busy = links.transmission(pair, size, called)
        # A shared or random link is busy until the acknowledgement at the latest.
        until = acknowledged if busy is None else earliest + late + busy
        queue.add(until, acknowledged, size)
    return departures
