"""A plan of fully distributed inference: the device of each channel range and of each tile.

A device is an index into ``devices``; ranges of elements, channels or pixels are half-open. The classes are Pydantic
models because a plan travels as JSON to every device (`testbed_stahl.planner.DistributedDetails`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict


class Range(NamedTuple):
    """A range of elements, channels or features, ``last`` exclusive."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """Length of the range."""
        return self.last - self.first


Pieces = tuple[Range, ...]
NOTHING = Range(0, 0)


def scaled(part: Range, factor: int) -> Range:
    """Convert a range of channels to a range of elements."""
    return Range(part.first * factor, part.last * factor)


def shifted(part: Range, by: int) -> Range:
    """Return a range moved by ``by``."""
    return Range(part.first + by, part.last + by)


def intersection(one: Range, other: Range) -> Range:
    """Return the common part of two ranges, which may be empty."""
    first = max(one.first, other.first)
    return Range(first, max(first, min(one.last, other.last)))


def union(one: Pieces, other: Pieces) -> Pieces:
    """Return the union of two lists of ranges."""
    merged: list[Range] = []
    for piece in sorted(piece for piece in (*one, *other) if piece.size):
        if merged and piece.first <= merged[-1].last:
            merged[-1] = Range(merged[-1].first, max(merged[-1].last, piece.last))
        else:
            merged.append(piece)
    return tuple(merged)


def difference(pieces: Pieces, gone: Range) -> Pieces:
    """Return the ranges without the given range."""
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
    """Return the total length of the ranges."""
    return sum(piece.size for piece in pieces)


def hull(pieces: Iterable[Range]) -> Range:
    """Return the smallest range containing all pieces."""
    every = [*pieces]
    if not every:
        return NOTHING
    return Range(
        min(piece.first for piece in every), max(piece.last for piece in every)
    )


def equal(count: int) -> tuple[Fraction, ...]:
    """Return ``count`` equal shares."""
    return (Fraction(1, count),) * count


def proportional(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Return exact shares in proportion to the given weights; equal weights give equal shares."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def divide(size: int, shares: Sequence[Fraction]) -> tuple[Range, ...]:
    """Divide ``size`` pieces by shares summing to 1, in the order of the shares.

    The largest remainder method rounds: every share gets its whole pieces, and the remaining pieces go one by one to
    the largest fractions (the first on ties). Every result is within one piece of its exact share, and equal shares
    differ by at most one piece.
    """
    exact = [size * share for share in shares]
    counts = [int(amount) for amount in exact]
    by_remainder = sorted(
        range(len(shares)), key=lambda index: (counts[index] - exact[index], index)
    )
    for index in by_remainder[: size - sum(counts)]:
        counts[index] += 1
    return tuple(
        Range(first, last) for first, last in pairwise([0, *accumulate(counts)])
    )


@lru_cache(maxsize=4096)
def evenly(size: int, count: int) -> tuple[Range, ...]:
    """Divide ``size`` pieces into ranges whose lengths differ by at most one."""
    return divide(size, equal(count))


Scheme = Literal["lop", "lip", "fuse1", "fuse2", "whole", "tiled"]
"""``lop``: each device has all of the input and computes some output channels. ``lip``: each has some input channels
and computes partial sums of all outputs, which the source adds up before bias and activation. ``fuse1`` and
``fuse2``: as LOP and LIP, but what is between them stays where it is. ``whole``: one device alone. ``tiled``: each
device computes its tiles of the feature map."""


class Region(NamedTuple):
    """A rectangle of a feature map in pixels, covering all channels."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return (self.bottom - self.top) * (self.right - self.left)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class LayerPlan(_Frozen):
    """Devices and ranges of one layer."""

    scheme: Scheme
    owner: int | None = None
    """The device that computes a ``whole`` layer."""
    outputs: tuple[Range, ...] = ()
    """Each device's output channels, for ``lop`` and ``fuse1``; empty ranges for devices that take no part."""
    inputs: tuple[Range, ...] = ()
    """Each device's input channels, for ``lip`` and ``fuse2``, where they are the outputs of its ``fuse1``."""


class Tile(_Frozen):
    """One part of the fused early layers, with its owner."""

    row: int
    column: int
    device: int
    regions: tuple[Region, ...]
    """What the tile needs of the input of each early layer, and at the end what it computes of the last one's output.
    Within the map: what lies outside is padding."""


class Tiling(_Frozen):
    """Fused tile partitioning of the first layers; a tile has one region more than there are tiled layers."""

    rows: int
    columns: int
    tiles: tuple[Tile, ...]


class DistributedPlan(_Frozen):
    """A complete inference plan; `testbed_stahl.dataflow` derives the tasks of each device."""

    scheme: str
    """The scheme as the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """Holds the image, collects and merges the results of the others, and computes its own share."""
    layers: tuple[LayerPlan, ...]
    """One for each layer of the network."""
    tiling: Tiling | None = None
    shares: tuple[float, ...] = ()
    """Each device's share of every layer that is split, before rounding to whole channels; none where nothing is."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles; empty without tiling."""
        return self.tiling.tiles if self.tiling else ()

    @property
    def tiled(self) -> int:
        """Number of leading layers computed by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
