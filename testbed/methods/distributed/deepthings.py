"""Beyond the paper: what else Zhao et al., "DeepThings", do with tiles, reuse of overlaps and work stealing.

Reuse: the tiles are the squares of a chessboard. Those on the first colour are computed first, halo and all. The
neighbours of one on the second colour are all of the first: of every map between the early layers it takes what they
have, and computes what lies between. Of the image it takes what it computes from, as it all comes from the source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from testbed.methods.distributed.parts import Range
from testbed.methods.distributed.plan import Region, Tile, Tiling


class Overlap(NamedTuple):
    """A part of one map that a tile takes from its neighbour; tiles by their place in the plan."""

    lender: int
    borrower: int
    layer: int
    """Index of the layer that makes the map."""
    region: Region


def is_late(row: int, column: int) -> bool:
    """Whether a tile waits for its neighbours."""
    return (row + column) % 2 == 1


def between(needed: Range, before: Range | None, after: Range | None) -> Range:
    """Return what of a range along one axis neither neighbour has; None: there is no neighbour."""
    first = needed.first if before is None else min(max(needed.first, before.last), needed.last)
    last = needed.last if after is None else max(first, min(needed.last, after.first))
    return Range(first, last)


def computed(tiling: Tiling, number: int) -> tuple[Region, ...]:
    """Return what a tile computes of each early layer's output, where neighbours' data are reused."""
    tile = tiling.tiles[number]
    if not is_late(tile.row, tile.column):
        return tile.regions[1:]
    sides = _neighbours(tiling, tile)
    found = []
    for level, region in enumerate(tile.regions[1:-1], 1):
        above, below = (None if each is None else _rows(each.regions[level]) for each in sides[:2])
        left, right = (None if each is None else _columns(each.regions[level]) for each in sides[2:])
        found.append(Region(*between(_rows(region), above, below), *between(_columns(region), left, right)))
    return (*found, tile.regions[-1])


def overlaps(tiling: Tiling) -> tuple[Overlap, ...]:
    """Return all that tiles take of each other, layer by layer for each pair.

    The neighbours above and below have all of a tile's columns; those left and right have what is left of its rows.
    """
    found = []
    for number, tile in enumerate(tiling.tiles):
        if not is_late(tile.row, tile.column):
            continue
        for side, neighbour in enumerate(_neighbours(tiling, tile)):
            if neighbour is None:
                continue
            lender = tiling.tiles.index(neighbour)
            for layer, (all_, own) in enumerate(zip(tile.regions[1:-1], computed(tiling, number), strict=False)):
                region = (
                    all_._replace(bottom=own.top),
                    all_._replace(top=own.bottom),
                    own._replace(left=all_.left, right=own.left),
                    own._replace(left=own.right, right=all_.right),
                )[side]
                if region.pixels:
                    found.append(Overlap(lender, number, layer, region))
    return tuple(found)


def _neighbours(tiling: Tiling, tile: Tile) -> tuple[Tile | None, ...]:
    """Return the tiles above, below, left and right."""

    def at(row: int, column: int) -> Tile | None:
        inside = 0 <= row < tiling.rows and 0 <= column < tiling.columns
        return tiling.tiles[row * tiling.columns + column] if inside else None

    row, column = tile.row, tile.column
    return at(row - 1, column), at(row + 1, column), at(row, column - 1), at(row, column + 1)


def _rows(region: Region) -> Range:
    return Range(region.top, region.bottom)


def _columns(region: Region) -> Range:
    return Range(region.left, region.right)


Item = tuple[int, int]
"""A request, and a tile by its place in the plan."""


class TileQueue:
    """Tiles that wait at the source, which has the image as DeepThings' gateway and data source in one.

    A device has one tile at a time: its own by the plan, or else the last of the device that would need longest for all
    that still waits for it, if it expects to be done sooner. How long a device takes for a multiplication is what its
    last tile took, with the way there and back; before that, what its speed says.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        work: Sequence[int],
        lending: Collection[tuple[int, int]],
        pace: Sequence[float],
    ) -> None:
        """Take what is known of tiles and devices before the first request.

        Args:
            tiles: of the plan.
            work: multiplications of each tile.
            lending: pairs of tiles, the second of which takes something of the first.
            pace: seconds of each device for a multiplication.

        """
        self._tiles = tiles
        # A tile of no more than pooling counts as one multiplication.
        self._work = [max(1, each) for each in work]
        self._lenders = [[one for one, other in lending if other == number] for number in range(len(tiles))]
        self._pace = [*pace]
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
