"""Who computes which tile next where idle devices steal: the work stealing of Zhao et al., "DeepThings". Pure."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.overlap import is_late
from testbed.methods.distributed.partition.tiles import multiplications

Item = tuple[int, int]
"""A request, and a tile by its place in the plan."""


class TileQueue:
    """Tiles that wait at the source, which has the image as DeepThings' gateway and data source in one.

    A device has one tile at a time: its own by the plan, or else the last of the device that would need longest for all
    that still waits for it, if it expects to be done sooner. How long a device takes for a multiplication is what its
    last tile took, with the way there and back; before that, what its speed says.
    """

    def __init__(self, flow: Dataflow, speeds: Sequence[float]) -> None:
        """``speeds`` of the plan's devices in FLOP/s."""
        layers = flow.graph.layers[: flow.tiled]
        self._tiles = flow.plan.tiles
        self._work = [sum(multiplications(layers, made)) for made in flow.computed]
        self._lenders = [[one for one, other in flow.overlaps if other == number] for number in range(len(self._tiles))]
        # A tile of no more than pooling counts as one multiplication.
        self._work = [max(1, each) for each in self._work]
        self._pace = [2.0 * flow.execution.samples / speed for speed in speeds]
        self._order = sorted(range(len(self._tiles)), key=self._rank)
        self._waiting: list[Item] = []
        self._hands: dict[int, tuple[Item, float]] = {}
        """What each device has, and since when."""
        self._done: dict[int, set[int]] = {}
        """Tiles, by request."""

    def _rank(self, number: int) -> tuple[bool, int]:
        tile = self._tiles[number]
        return is_late(tile.row, tile.column), -self._work[number]

    def add(self, request: int) -> None:
        """Let all tiles of a request wait: those that need none of the others first, and the largest of these."""
        self._done[request] = set()
        self._waiting += [(request, number) for number in self._order]

    def take(self, device: int, now: float) -> Item | None:
        """Give a device the tile that it should compute now; None where it is busy or has nothing to do."""
        if device in self._hands:
            return None
        ready = [each for each in self._waiting if self._done[each[0]].issuperset(self._lenders[each[1]])]
        own = [each for each in ready if self._tiles[each[1]].device == device]
        found = own[0] if own else self._stolen(device, ready, now)
        if found is not None:
            self._waiting.remove(found)
            self._hands[device] = found, now
        return found

    def _stolen(self, device: int, ready: Sequence[Item], now: float) -> Item | None:
        last = {self._tiles[number].device: (request, number) for request, number in ready}
        if not last:
            return None
        victim = max(last, key=lambda each: self._backlog(each, now))
        sooner = self._work[last[victim][1]] * self._pace[device] < self._backlog(victim, now)
        return last[victim] if sooner else None

    def _backlog(self, device: int, now: float) -> float:
        """Return the seconds that a device would need for what it has and what waits for it."""
        pace, left = self._pace[device], 0.0
        if device in self._hands:
            (_, number), since = self._hands[device]
            pace = max(pace, (now - since) / self._work[number])
            left = self._work[number] * pace - (now - since)
        waiting = (number for _, number in self._waiting if self._tiles[number].device == device)
        return left + pace * sum(self._work[number] for number in waiting)

    def done(self, device: int, now: float) -> None:
        """Note that a device's tile is there."""
        (request, number), since = self._hands.pop(device)
        self._pace[device] = (now - since) / self._work[number]
        self._done[request].add(number)

    def forget(self, request: int) -> None:
        """Forget a request whose tiles are all there."""
        del self._done[request]
