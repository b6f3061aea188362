"""A rate that several sources share: a device's downlink. Pure; the time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from controller.shaping.plan import FRAME

T = TypeVar("T")


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
