"""Channels that carry one transmission at a time: who transmits when. Pure; the time is an argument.

A cell's devices share one channel. A device that casts over a slow link has a channel of its own for that, so that its
casts take as long as the rate says, to the last byte.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


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
