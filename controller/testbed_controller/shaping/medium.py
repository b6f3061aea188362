"""The times at which packets that share a channel or a rate are transmitted. Callers pass the time: no clock, no I/O.

A channel carries one transmission at a time. The devices of a radio cell share a channel. A slow link, and the
broadcasts of a device over slow links, have a channel of their own: without it, the kernel (HTB) would release a frame
at the beginning of its transmission time, and the last frame of a message would arrive too early.

Packets for such channels pass the gate (`testbed_controller.shaping.gatekeeper`), a process of the shaper that holds
each one until its transmission ends. A route has the channels of the packets from one device to one address. Packets
without a route do not pass the gate.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from testbed.network.broadcast import broadcast_rate
from testbed.network.link import Cell, Link, Pair, cell_of, least_rate
from testbed_controller.shaping.chain import RuleChain
from testbed_controller.shaping.plan import FRAME, Endpoint, queue_limit

QUEUE = 60_000
"""Number of the gate's netfilter queue in each device's namespace; delay lines have the numbers from 1."""
GATED_BROADCAST_RATE = 25e6
"""Maximum rate of broadcasts through the gate, in bit/s: faster ones leave too early by half a millisecond at most."""
GATED_LINK_RATE = 5e6
"""Maximum rate of links through the gate, in bit/s: at this rate, a frame takes 2.4 ms, much longer than the 0.1 ms of
processor time that the gate needs for a packet."""
T = TypeVar("T")
"""The caller's representation of a packet."""


def routes_of(
    device: Endpoint,
    broadcast_address: str | None,
    endpoints: Mapping[str, Endpoint],
    links: Mapping[Pair, Link],
    cells: Sequence[Cell],
) -> dict[str, Route]:
    """Return the routes of a device, which lead through the gate, by address: for cells, broadcasts and slow links.

    ``endpoints`` has every device by name. A broadcast of a device in several cells occupies all of them at once.
    """
    outgoing = {pair: link for pair, link in links.items() if pair[0] == device.name}
    by_address = {}
    for pair, link in outgoing.items():
        peer = endpoints.get(pair[1])
        # A link may name a device that is attached later.
        if peer is None:
            continue
        access = (device.uplink, peer.downlink)
        route = _unicast_route(pair, link, cell_of(pair, cells), access)
        if route is not None:
            by_address[peer.address] = route
    broadcast_route = _broadcast_route(device.name, outgoing, cells, device.uplink)
    if broadcast_address and broadcast_route is not None:
        by_address[broadcast_address] = broadcast_route
    return by_address


def _broadcast_route(
    device: str,
    outgoing: Mapping[Pair, Link],
    cells: Iterable[Cell],
    uplink: float | None,
) -> Route | None:
    """Return the route of a device's broadcasts; None for fast broadcasts outside of all cells."""
    own_cells = []
    for cell in cells:
        if any(cell.carries(pair) for pair in outgoing):
            own_cells.append(cell)
    cell_rates = [cell.rate for cell in own_cells]
    rate = broadcast_rate(outgoing.values(), uplink, *cell_rates)
    if not outgoing or rate is None:
        return None
    if not own_cells and rate > GATED_BROADCAST_RATE:
        return None
    # Outside of cells, the broadcasts of a device have a channel of their own: they wait only for each other.
    channels = tuple(map(_channel_name, own_cells)) or (f"broadcasts of {device}",)
    return Route(channels, rate, queue_limit(Link(rate=rate)))


def _unicast_route(
    pair: Pair, link: Link, cell: Cell | None, access_rates: Iterable[float | None]
) -> Route | None:
    """Return the route of a link in a cell, or of a slow link; None for other links.

    ``access_rates`` are the uplink of the sender and the downlink of the receiver.
    """
    if cell is not None:
        rate = least_rate(cell.rate, link.rate)
        channel = _channel_name(cell)
    else:
        rate = least_rate(link.rate, *access_rates)
        channel = f"link {pair[0]} -> {pair[1]}"
    if rate is None:
        return None
    if cell is None and rate > GATED_LINK_RATE:
        return None
    return Route((channel,), rate, queue_limit(replace(link, rate=rate)))


def _channel_name(cell: Cell) -> str:
    return "cell of " + ", ".join(cell.devices)


def gate_rules(interface: str, addresses: Iterable[str]) -> RuleChain:
    """Return the iptables chain from the data interface to the gate, for packets to the given addresses.

    >>> gate_rules("eth0", ["10.0.0.2"]).rules
    ('-d 10.0.0.2/32 -j NFQUEUE --queue-num 60000',)
    """
    rules = []
    for address in addresses:
        rules.append(f"-d {address}/32 -j NFQUEUE --queue-num {QUEUE}")
    return RuleChain("TESTBED-GATE", ("OUTPUT", "-o", interface), tuple(rules))


@dataclass(frozen=True)
class Route:
    """The way of packets from a station, a device that sends, to one address."""

    channels: tuple[Hashable, ...]
    """Channels that each transmission occupies at once."""
    rate: float
    """Rate on the wire in bit/s."""
    limit: int
    """Maximum number of packets for this address waiting at the station."""


@dataclass(eq=False, slots=True)
class Transmission(Generic[T]):
    """One packet, from the station's offer to the departure of the last bit."""

    station: Hashable
    address: Hashable
    size: int
    """Bytes on the wire."""
    item: T
    channels: tuple[Hashable, ...] = ()
    """Channels occupied from ``start`` to ``end``, in seconds."""
    start: float = 0.0
    end: float = 0.0


class Media(Generic[T]):
    """All channels: transmissions start in the order of their offers, as soon as their channels are free.

    A station senses all transmissions on its channels and waits, so no collisions occur. Example::

        media = Media()
        media.set_routes("a", {"10.0.0.2": Route(("cell",), rate=1e6, limit=100)}, now=0.0)
        media.offer("a", "10.0.0.2", now=0.0, size=1250, item=packet)
        media.next_end  # 0.01
    """

    def __init__(self) -> None:
        self._routes: dict[Hashable, Mapping[Hashable, Route]] = {}
        """Routes of each station by address."""
        self._free_from: dict[Hashable, float] = {}
        """Instant in seconds from which each channel is free."""
        self._unfinished: dict[Transmission[T], None] = {}
        """Transmissions that have not ended, in the order of their offers: a dictionary as an ordered set."""
        self._ends: list[tuple[float, int, Transmission[T]]] = []
        """Heap of the ends in seconds; the number decides between equal ends, as transmissions cannot be compared."""
        self._end_count = 0
        """Number of entries of the heap so far."""
        self._waiting: Counter[tuple[Hashable, Hashable]] = Counter()
        """Number of packets by station and address, including the packet in transmission."""

    def set_routes(
        self, station: Hashable, routes: Mapping[Hashable, Route], now: float
    ) -> None:
        """Set the routes of a station; ongoing transmissions are unaffected."""
        self._routes[station] = routes
        self._reschedule(now)

    def offer(
        self, station: Hashable, address: Hashable, now: float, size: int, item: T
    ) -> bool:
        """Queue a packet for transmission; return False if too many packets wait for the address."""
        route = self._routes.get(station, {}).get(address)
        if route is not None and self._waiting[station, address] >= route.limit:
            return False
        self._waiting[station, address] += 1
        transmission = Transmission(station, address, size, item)
        self._unfinished[transmission] = None
        self._schedule(transmission, now)
        return True

    @property
    def next_end(self) -> float:
        """Earliest end of a transmission in seconds; infinite without one."""
        return self._ends[0][0] if self._ends else math.inf

    def pop_finished(self, now: float) -> list[Transmission[T]]:
        """Return and remove ended transmissions, in the order of the ends."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            transmission = heapq.heappop(self._ends)[2]
            # A removal from the heap would take linear time, so transmissions of a removed station are skipped here.
            if transmission in self._unfinished:
                self._remove(transmission)
                ended.append(transmission)
        return ended

    def _remove(self, transmission: Transmission[T]) -> None:
        del self._unfinished[transmission]
        self._waiting[transmission.station, transmission.address] -= 1

    def forget(self, station: Hashable, now: float) -> None:
        """Remove a station and its packets; a packet in transmission still occupies its channels until its end."""
        self._routes.pop(station, None)
        for transmission in list(self._unfinished):
            if transmission.station == station:
                self._remove(transmission)
        self._reschedule(now)

    def waiting(self, station: Hashable) -> int:
        """Return the number of a station's unsent packets."""
        total = 0
        for (name, _), count in self._waiting.items():
            if name == station:
                total += count
        return total

    def _schedule(self, transmission: Transmission[T], now: float) -> None:
        route = self._routes.get(transmission.station, {}).get(transmission.address)
        # If a route was removed while its packets waited, they leave at once.
        transmission.channels = route.channels if route else ()
        duration = transmission.size * 8 / route.rate if route else 0.0
        start = now
        for channel in transmission.channels:
            start = max(start, self._free_from.get(channel, now))
        transmission.start = start
        transmission.end = start + duration
        for channel in transmission.channels:
            self._free_from[channel] = transmission.end
        self._end_count += 1
        heapq.heappush(self._ends, (transmission.end, self._end_count, transmission))

    def _reschedule(self, now: float) -> None:
        """Compute the times of all waiting transmissions again, after a change of routes."""
        # A transmission that has begun keeps its rate: a station does not interrupt a frame.
        on_air = [entry for entry in self._ends if entry[2].start <= now]
        # All others get new times, in the same order.
        self._free_from = {}
        # In the order of ends, so that the latest end of a channel remains.
        for end, _, transmission in sorted(on_air):
            for channel in transmission.channels:
                self._free_from[channel] = end
        self._ends = on_air
        heapq.heapify(self._ends)
        for transmission in list(self._unfinished):
            if transmission.start > now:
                self._schedule(transmission, now)


class Bottleneck(Generic[T]):
    """A rate shared by several sources, such as a device's downlink: their queues are served packet by packet in turn.

    HTB serves classes with a common parent in this way. Unlike on a channel of `Media`, the order is not that of the
    offers, so that one source cannot keep the others waiting.

    >>> bottleneck = Bottleneck(rate=1e6, limit=10)
    >>> bottleneck.enter("a", now=0.0, size=1250, item="first")
    True
    >>> bottleneck.leave()
    'first'
    >>> bottleneck.enter("a", now=0.0, size=1250, item="second"), bottleneck.next_departure
    (True, 0.01)
    """

    def __init__(self, rate: float, limit: int) -> None:
        self.rate = rate
        """Rate in bit/s; if infinite, all packets pass at once."""
        self.limit = limit
        """Maximum number of waiting packets of one source."""
        self.dropped = 0
        """Number of packets dropped by a full queue."""
        self._waiting: dict[Hashable, deque[tuple[int, T]]] = {}
        self._turn: deque[Hashable] = deque()
        """Sources with waiting packets, the next one first."""
        self._free_from = -math.inf
        """Instant in seconds from which the next packet can leave."""

    def alter(self, now: float, rate: float, limit: int) -> None:
        """Change rate and limit; the next packet waits for at most one full frame at the new rate."""
        self.rate = rate
        self.limit = limit
        self._free_from = min(self._free_from, now + 8 * FRAME / rate)

    def enter(self, source: Hashable, now: float, size: int, item: T) -> bool:
        """Queue a packet of ``size`` bytes; return False for a full queue."""
        queue = self._waiting.setdefault(source, deque())
        if len(queue) >= self.limit:
            self.dropped += 1
            return False
        # Idle time earns no credit: the next packet leaves at once, and the one after it a transmission time later.
        if not self._turn and now > self._free_from:
            self._free_from = now
        if not queue:
            self._turn.append(source)
        queue.append((size, item))
        return True

    @property
    def next_departure(self) -> float:
        """Departure of the next packet in seconds; infinite without one."""
        return self._free_from if self._turn else math.inf

    def leave(self) -> T:
        """Remove and return the packet leaving at `next_departure`, and delay the next by the transmission time."""
        source = self._turn.popleft()
        queue = self._waiting[source]
        size, item = queue.popleft()
        self._free_from += size * 8 / self.rate
        if queue:
            self._turn.append(source)
        return item
