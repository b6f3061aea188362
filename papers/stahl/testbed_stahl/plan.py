"""What a fully distributed inference is: for each layer who computes which channels, and who owns which tile.

A device is an index into ``devices``; ranges of elements, channels or pixels are half-open. Pydantic models, because a
plan travels as JSON to every device (`testbed_stahl.planner.DistributedDetails`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict


class Range(NamedTuple):
    """Elements, channels or features: ``first`` up to but without ``last``."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """How many."""
        return self.last - self.first


Pieces = tuple[Range, ...]
NOTHING = Range(0, 0)


def scaled(part: Range, factor: int) -> Range:
    """Return a range of channels as elements."""
    return Range(part.first * factor, part.last * factor)


def shifted(part: Range, by: int) -> Range:
    """Return a range ``by`` further on."""
    return Range(part.first + by, part.last + by)


def intersection(one: Range, other: Range) -> Range:
    """Return what two ranges share; of size 0 where that is nothing."""
    first = max(one.first, other.first)
    return Range(first, max(first, min(one.last, other.last)))


def union(one: Pieces, other: Pieces) -> Pieces:
    """Return what is in either."""
    found: list[Range] = []
    for piece in sorted(piece for piece in (*one, *other) if piece.size):
        if found and piece.first <= found[-1].last:
            found[-1] = Range(found[-1].first, max(found[-1].last, piece.last))
        else:
            found.append(piece)
    return tuple(found)


def difference(pieces: Pieces, gone: Range) -> Pieces:
    """Return what is left when a range is taken out."""
    if not gone.size:
        return pieces
    parts = (
        part
        for piece in pieces
        for part in (
            Range(piece.first, min(piece.last, gone.first)),
            Range(max(piece.first, gone.last), piece.last),
        )
    )
    return tuple(part for part in parts if part.last > part.first)


def size(pieces: Iterable[Range]) -> int:
    """Return how many elements there are."""
    return sum(piece.size for piece in pieces)


def hull(pieces: Iterable[Range]) -> Range:
    """Return the least range that holds all pieces."""
    every = [*pieces]
    if not every:
        return NOTHING
    return Range(min(piece.first for piece in every), max(piece.last for piece in every))


def equal(count: int) -> tuple[Fraction, ...]:
    """Return as many equal shares."""
    return (Fraction(1, count),) * count


def proportional(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Return shares in proportion to what is given, exactly: equal weights give equal shares."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def divide(size: int, shares: Sequence[Fraction]) -> tuple[Range, ...]:
    """Divide ``size`` pieces by shares that add up to 1, in the order of the shares.

    Rounded by largest remainder: each gets the whole pieces of its share, and what is left goes one by one to the
    largest fractions, of equals to the first. So nobody is a whole piece away from its share, and equal shares differ
    by one piece at most.
    """
    exact = [size * share for share in shares]
    counts = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: size - sum(counts)]:
        counts[index] += 1
    return tuple(Range(first, last) for first, last in pairwise([0, *accumulate(counts)]))


@lru_cache(maxsize=4096)
def evenly(size: int, count: int) -> tuple[Range, ...]:
    """Divide ``size`` pieces into ranges that differ by one piece at most."""
    return divide(size, equal(count))


Scheme = Literal["lop", "lip", "fuse1", "fuse2", "whole", "tiled"]
"""``lop``: each device has all of the input and computes some output channels. ``lip``: each has some input channels
and computes partial sums of all outputs, which the source adds up before bias and activation. ``fuse1`` and
``fuse2``: as LOP and LIP, but what is between them stays where it is. ``whole``: one device alone. ``tiled``: each
device computes its tiles of the feature map."""


class Region(NamedTuple):
    """A rectangle of a feature map, in its pixels; all channels."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """How many."""
        return (self.bottom - self.top) * (self.right - self.left)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class LayerPlan(_Frozen):
    """Who does what of one layer."""

    scheme: Scheme
    owner: int | None = None
    """The device that computes a ``whole`` layer."""
    outputs: tuple[Range, ...] = ()
    """Each device's output channels, for ``lop`` and ``fuse1``; empty ranges for devices that take no part."""
    inputs: tuple[Range, ...] = ()
    """Each device's input channels, for ``lip`` and ``fuse2``, where they are the outputs of its ``fuse1``."""


class Tile(_Frozen):
    """One part of the fused early layers."""

    row: int
    column: int
    device: int
    regions: tuple[Region, ...]
    """What the tile needs of the input of each early layer, and at the end what it computes of the last one's output.
    Within the map: what lies outside is padding."""


class Tiling(_Frozen):
    """Fused tile partitioning of the first layers: as many as there are regions in a tile, less one."""

    rows: int
    columns: int
    tiles: tuple[Tile, ...]


class DistributedPlan(_Frozen):
    """A whole inference; `testbed_stahl.dataflow` says what that is for each device."""

    scheme: str
    """The scheme as the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """Holds the image, collects and merges what the others compute, and computes its own share."""
    layers: tuple[LayerPlan, ...]
    """One for each layer of the network."""
    tiling: Tiling | None = None
    shares: tuple[float, ...] = ()
    """Each device's share of every layer that is split, before rounding to whole channels; none where nothing is."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles; none where nothing is tiled."""
        return self.tiling.tiles if self.tiling else ()

    @property
    def tiled(self) -> int:
        """How many of the first layers are done by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
