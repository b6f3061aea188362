"""What neighbouring tiles both need, computed once: the reuse of overlapping data of Zhao et al., "DeepThings".

The tiles are the squares of a chessboard. Those on the first colour are computed first, halo and all. The neighbours of
one on the second colour are all of the first: of every map between the early layers it takes what they have, and
computes what lies between. Of the image it takes what it computes from, as it all comes from the source.
"""

from __future__ import annotations

from typing import NamedTuple

from testbed.methods.distributed.partition.distributed_plan import Region, Tile, Tiling
from testbed.methods.distributed.partition.ranges import Range


class Overlap(NamedTuple):
    """A part of one map that a tile takes from its neighbour; tiles by their place in the plan."""

    lender: int
    borrower: int
    layer: int
    """That makes the map."""
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
