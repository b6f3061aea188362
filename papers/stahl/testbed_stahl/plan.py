"""A plan of fully distributed inference: the device of each channel range and of each tile.

A device is an index into ``devices``; ranges of elements, channels or pixels are half-open. The classes are Pydantic
models because a plan travels as JSON to every device (`testbed_stahl.planner.DistributedDetails`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
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
"""Ranges that do not overlap, in ascending order."""
NOTHING = Range(0, 0)


def scaled(part: Range, factor: int) -> Range:
    """Convert a range of channels to a range of elements.

    >>> scaled(Range(2, 5), 10)
    Range(first=20, last=50)
    """
    return Range(part.first * factor, part.last * factor)


def shifted(part: Range, by: int) -> Range:
    """Return a range moved by ``by``.

    >>> shifted(Range(2, 5), -2)
    Range(first=0, last=3)
    """
    return Range(part.first + by, part.last + by)


def intersection(one: Range, other: Range) -> Range:
    """Return the common part of two ranges, which may be empty.

    >>> intersection(Range(0, 4), Range(2, 8)), intersection(Range(0, 4), Range(6, 8)).size
    (Range(first=2, last=4), 0)
    """
    first = max(one.first, other.first)
    last = min(one.last, other.last)
    # Ranges without a common part would otherwise have a negative size.
    return Range(first, max(first, last))


def union(one: Pieces, other: Pieces) -> Pieces:
    """Return the union of two lists of ranges.

    >>> union((Range(0, 2), Range(6, 8)), (Range(1, 4),))
    (Range(first=0, last=4), Range(first=6, last=8))
    """
    merged: list[Range] = []
    for piece in sorted((*one, *other)):
        if not piece.size:
            continue
        if not merged or piece.first > merged[-1].last:
            merged.append(piece)
            continue
        # Pieces that touch become one, so that equal unions are equal tuples.
        first, last = merged[-1]
        merged[-1] = Range(first, max(last, piece.last))
    return tuple(merged)


def difference(pieces: Pieces, removed: Range) -> Pieces:
    """Return the ranges without the range ``removed``.

    >>> difference((Range(0, 8),), Range(2, 3))
    (Range(first=0, last=2), Range(first=3, last=8))
    """
    # An empty range inside a piece would cut the piece in two.
    if not removed.size:
        return pieces
    remaining = []
    for piece in pieces:
        end_before = min(piece.last, removed.first)
        begin_after = max(piece.first, removed.last)
        before = Range(piece.first, end_before)
        after = Range(begin_after, piece.last)
        for part in (before, after):
            # A piece outside the removed range leaves one part whole, and the other one with a negative size.
            if part.size > 0:
                remaining.append(part)
    return tuple(remaining)


def total_size(pieces: Iterable[Range]) -> int:
    """Return the total length of the ranges.

    >>> total_size([Range(0, 2), Range(6, 8)])
    4
    """
    return sum(piece.size for piece in pieces)


def hull(pieces: Iterable[Range]) -> Range:
    """Return the smallest range containing all pieces; empty without pieces.

    >>> hull([Range(0, 2), Range(6, 8)])
    Range(first=0, last=8)
    """
    ordered = sorted(pieces)
    if not ordered:
        return NOTHING
    last = max(piece.last for piece in ordered)
    return Range(ordered[0].first, last)


def equal_shares(count: int) -> tuple[Fraction, ...]:
    """Return ``count`` equal shares.

    >>> equal_shares(2)
    (Fraction(1, 2), Fraction(1, 2))
    """
    return (Fraction(1, count),) * count


def proportional_shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Return exact shares in proportion to the given weights; equal weights give equal shares.

    >>> proportional_shares([1.0, 3.0])
    (Fraction(1, 4), Fraction(3, 4))
    """
    # Fractions, since shares of floats need not sum to exactly 1, and a remainder would be lost.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return tuple(weight / total for weight in exact)


def divide(size: int, shares: Sequence[Fraction]) -> tuple[Range, ...]:
    """Divide ``size`` pieces by shares summing to 1, in the order of the shares.

    The largest remainder method rounds: every share gets its whole pieces, and the remaining pieces go one by one to
    the largest fractions (the first on ties). Every result is within one piece of its exact share, and equal shares
    differ by at most one piece.

    >>> divide(5, equal_shares(2))
    (Range(first=0, last=3), Range(first=3, last=5))
    """
    exact = [size * share for share in shares]
    counts = [int(amount) for amount in exact]

    def negative_remainder(index: int) -> tuple[Fraction, int]:
        # Negative, so that the largest remainders come first, and of equal ones the first share.
        return counts[index] - exact[index], index

    by_remainder = sorted(range(len(shares)), key=negative_remainder)
    unassigned = size - sum(counts)
    for index in by_remainder[:unassigned]:
        counts[index] += 1
    ranges = []
    first = 0
    for count in counts:
        ranges.append(Range(first, first + count))
        first += count
    return tuple(ranges)


@lru_cache(maxsize=4096)
def divide_evenly(size: int, count: int) -> tuple[Range, ...]:
    """Divide ``size`` pieces into ranges whose lengths differ by at most one.

    >>> [part.size for part in divide_evenly(10, 4)]
    [3, 3, 2, 2]
    """
    return divide(size, equal_shares(count))


Scheme = Literal["lop", "lip", "fuse1", "fuse2", "whole", "tiled"]
"""Division of one layer (Sections 4.1 and 4.2).

``lop``: each device has the whole input and computes some output channels. ``lip``: each device has some input
channels and computes partial sums of all outputs, which the source adds up before bias and activation. ``fuse1`` and
``fuse2``: as LOP and LIP, but the values between both layers stay on their devices. ``whole``: one device computes the
layer. ``tiled``: each device computes its tiles of the feature map."""


class Region(NamedTuple):
    """A rectangle of a feature map in pixels, covering all channels."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """Number of pixels.

        >>> Region(top=0, bottom=4, left=2, right=5).pixels
        12
        """
        height = self.bottom - self.top
        width = self.right - self.left
        return height * width


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
    """The required region of each early layer's input, and finally the computed region of the last layer's output.
    Regions lie within the map, since pixels outside are padding."""


class Tiling(_Frozen):
    """Fused tile partitioning of the first layers; a tile has one more region than the number of tiled layers."""

    rows: int
    columns: int
    tiles: tuple[Tile, ...]


class DistributedPlan(_Frozen):
    """A complete inference plan; `testbed_stahl.dataflow` derives the tasks of each device."""

    scheme: str
    """The scheme as the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """The device with the image, which collects and merges the results of the others, and computes its own share."""
    layers: tuple[LayerPlan, ...]
    """One for each layer of the network."""
    tiling: Tiling | None = None
    shares: tuple[float, ...] = ()
    """Each device's share of every divided layer, before rounding to whole channels; empty if no layer is divided."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles; empty without tiling."""
        return self.tiling.tiles if self.tiling else ()

    @property
    def tiled(self) -> int:
        """Number of leading layers computed by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
