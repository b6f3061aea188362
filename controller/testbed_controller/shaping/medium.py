"""Rates and channels that several share: who waits where, and who sends when. Pure; the time is an argument.

A cell's devices share one channel. A slow link, and the casts of a device over slow links, have a channel of their own,
so that a message takes as long as the rate says, to the last byte: HTB lets a frame go at the beginning of its time.
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
"""Number of the netfilter queue in each device's namespace; the delay line's count from 1."""
GATED_RATE = 25e6
"""bit/s up to which casts wait at the gate: above this rate a frame takes less than half a millisecond."""
SLOW_RATE = 5e6
"""bit/s up to which links wait at the gate as well: a frame takes 2.4 ms or more there. A packet costs the host some
0.1 ms of processor time at the gate."""
T = TypeVar("T")


def routes(
    device: Endpoint,
    broadcast: str | None,
    endpoints: Mapping[str, Endpoint],
    links: Mapping[Pair, Link],
    cells: Sequence[Cell],
) -> dict[str, Route]:
    """Return, by address, the routes of a device over shared media: within its cells, for its casts, and slow links.

    ``endpoints`` holds every device by name. A cast of a device in several cells takes all of them at once.
    """
    outgoing = {pair: link for pair, link in links.items() if pair[0] == device.name}
    found = {}
    for pair, link in outgoing.items():
        peer = endpoints.get(pair[1])
        if peer is not None:
            route = _unicast_route(pair, link, cell_of(pair, cells), (device.uplink, peer.downlink))
            if route is not None:
                found[peer.address] = route
    cast = _cast_route(device.name, outgoing, cells, device.uplink)
    if broadcast and cast is not None:
        found[broadcast] = cast
    return found


def _cast_route(device: str, links: Mapping[Pair, Link], cells: Iterable[Cell], uplink: float | None) -> Route | None:
    """Return the route of a device's casts over its links, if a cell carries one of them or they are slow."""
    own = [cell for cell in cells if any(cell.carries(pair) for pair in links)]
    rate = broadcast_rate(links.values(), uplink, *(cell.rate for cell in own))
    if not links or rate is None or (not own and rate > GATED_RATE):
        return None
    channels = tuple(map(_channel, own)) or (f"casts of {device}",)
    return Route(channels, rate, queue_limit(Link(rate=rate)))


def _unicast_route(pair: Pair, link: Link, cell: Cell | None, access: Iterable[float | None]) -> Route | None:
    """Return the route of a link that a cell carries or that is slow, itself or by an access limit."""
    if cell is not None:
        rate, channel = least_rate(cell.rate, link.rate), _channel(cell)
    else:
        rate, channel = least_rate(link.rate, *access), f"link {pair[0]} -> {pair[1]}"
    if rate is None or (cell is None and rate > SLOW_RATE):
        return None
    return Route((channel,), rate, queue_limit(replace(link, rate=rate)))


def _channel(cell: Cell) -> str:
    return "cell of " + ", ".join(cell.devices)


def gate_rules(interface: str, gated: Mapping[str, Route]) -> RuleChain:
    """Return the chain that leads what leaves by the data interface for these addresses into the queue."""
    rules = tuple(f"-d {address}/32 -j NFQUEUE --queue-num {QUEUE}" for address in gated)
    return RuleChain("TESTBED-GATE", ("OUTPUT", "-o", interface), rules)


@dataclass(frozen=True)
class Route:
    """How a station reaches one address: over which channels, all of them at once, and how fast."""

    channels: tuple[Hashable, ...]
    rate: float
    """bit/s on the wire"""
    limit: int
    """Packets for this address that may wait at the station."""


@dataclass(eq=False, slots=True)
class Transmission(Generic[T]):
    """One packet, from when its sender had it ready to when its last bit has left."""

    station: Hashable
    address: Hashable
    size: int
    """Bytes on the wire"""
    item: T
    channels: tuple[Hashable, ...] = ()
    """Occupied from ``start`` to ``end``."""
    start: float = 0.0
    end: float = 0.0


class Media(Generic[T]):
    """All channels: transmissions in the order in which they became ready, each as soon as its channels are free.

    A station hears whatever goes on in its channels and waits; nothing collides.
    """

    def __init__(self) -> None:
        self._routes: dict[Hashable, Mapping[Hashable, Route]] = {}
        self._free: dict[Hashable, float] = {}
        self._order: dict[Transmission[T], None] = {}
        self._ends: list[tuple[float, int, Transmission[T]]] = []
        self._ties = 0
        self._waiting: Counter[tuple[Hashable, Hashable]] = Counter()

    def set_routes(self, station: Hashable, routes: Mapping[Hashable, Route], now: float) -> None:
        """Say how a station reaches whom, from now on; what is on the air stays as it was."""
        self._routes[station] = routes
        self._reschedule(now)

    def offer(self, station: Hashable, address: Hashable, now: float, size: int, item: T) -> bool:
        """Take a packet that is ready to be transmitted; False when too many wait for the same address."""
        route = self._routes.get(station, {}).get(address)
        if route is not None and self._waiting[station, address] >= route.limit:
            return False
        self._waiting[station, address] += 1
        made = Transmission(station, address, size, item)
        self._order[made] = None
        self._schedule(made, now)
        return True

    @property
    def next_end(self) -> float:
        """When the next transmission ends; infinite when there is none."""
        return self._ends[0][0] if self._ends else math.inf

    def finished(self, now: float) -> list[Transmission[T]]:
        """Return, and forget, the transmissions that have ended by now, in the order of their ends."""
        over = []
        while self._ends and self._ends[0][0] <= now:
            made = heapq.heappop(self._ends)[2]
            if made in self._order:
                self._drop(made)
                over.append(made)
        return over

    def _drop(self, made: Transmission[T]) -> None:
        del self._order[made]
        self._waiting[made.station, made.address] -= 1

    def forget(self, station: Hashable, now: float) -> None:
        """Forget a station that is gone; what it had not begun to transmit leaves its channels to the others."""
        self._routes.pop(station, None)
        for made in [each for each in self._order if each.station == station]:
            self._drop(made)
        self._reschedule(now)

    def waiting(self, station: Hashable) -> int:
        """Return how many packets of a station have not left it."""
        return sum(count for (name, _), count in self._waiting.items() if name == station)

    def _schedule(self, made: Transmission[T], now: float) -> None:
        route = self._routes.get(made.station, {}).get(made.address)
        made.channels = route.channels if route else ()
        made.start = max([now, *(self._free.get(channel, now) for channel in made.channels)])
        made.end = made.start + (made.size * 8 / route.rate if route else 0.0)
        for channel in made.channels:
            self._free[channel] = made.end
        self._ties += 1
        heapq.heappush(self._ends, (made.end, self._ties, made))

    def _reschedule(self, now: float) -> None:
        """Schedule again what has not begun."""
        on_air = [each for each in self._ends if each[2].start <= now]
        self._free = {channel: end for end, _, made in sorted(on_air) for channel in made.channels}
        self._ends = on_air
        heapq.heapify(self._ends)
        for made in [each for each in self._order if each.start > now]:
            self._schedule(made, now)


class Bottleneck(Generic[T]):
    """Queues by source, served packet by packet in turn, as HTB serves classes that borrow from one parent."""

    def __init__(self, rate: float, limit: int) -> None:
        self.rate = rate
        """bit/s; infinite lets everything pass at once."""
        self.limit = limit
        """Packets of one source that may wait."""
        self.refused = 0
        """Packets that found their queue full."""
        self._waiting: dict[Hashable, deque[tuple[int, T]]] = {}
        self._turn: deque[Hashable] = deque()
        self._free = -math.inf

    def alter(self, now: float, rate: float, limit: int) -> None:
        """Have another rate and limit from now on; those who wait at a rate that was slow need not sit it out."""
        self.rate, self.limit = rate, limit
        self._free = min(self._free, now + 8 * FRAME / rate)

    def enter(self, source: Hashable, now: float, size: int, item: T) -> bool:
        """Let a packet of this many bytes wait for its turn; False when its source's queue is full."""
        queue = self._waiting.setdefault(source, deque())
        if len(queue) >= self.limit:
            self.refused += 1
            return False
        if not self._turn and now > self._free:
            self._free = now
        if not queue:
            self._turn.append(source)
        queue.append((size, item))
        return True

    @property
    def due(self) -> float:
        """When the next packet leaves; infinite when none waits."""
        return self._free if self._turn else math.inf

    def leave(self) -> T:
        """Return the packet that leaves at `due`; the rate is busy for its length from then on."""
        source = self._turn.popleft()
        queue = self._waiting[source]
        size, item = queue.popleft()
        self._free += size * 8 / self.rate
        if queue:
            self._turn.append(source)
        return item
