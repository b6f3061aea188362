"""A plan of fully distributed inference: the device of each channel range and of each tile.

Devices are numbers, indices of `DistributedPlan.devices`; the end of a range of elements, channels or pixels is
exclusive. The classes are Pydantic models because a plan is sent as JSON to every device
(`testbed_stahl.planner.DistributedDetails`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict


class Range(NamedTuple):
    """A range of elements or channels from ``first`` to ``last`` (exclusive)."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """Length of the range."""
        return self.last - self.first


Pieces = tuple[Range, ...]
"""Ranges that do not overlap, in ascending order."""
NOTHING = Range(0, 0)
"""An empty range."""


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
    # Fractions, since the sum of floats may differ from 1, and `divide` would then lose pieces or find too many.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return tuple(weight / total for weight in exact)


def divide(size: int, shares: Sequence[Fraction]) -> tuple[Range, ...]:
    """Divide the range from 0 to ``size`` by shares with the sum 1, in the order of the shares.

    Sizes are rounded by the largest remainder method: every share gets its exact size rounded down, and the remaining
    elements go one by one to the shares with the largest fractions (the first on ties). Every size differs from the
    exact size by less than one, and equal shares differ by at most one.

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
    """Divide the range from 0 to ``size`` into ``count`` ranges whose sizes differ by at most one.

    >>> [part.size for part in divide_evenly(10, 4)]
    [3, 3, 2, 2]
    """
    return divide(size, equal_shares(count))


Scheme = Literal["lop", "lip", "fuse1", "fuse2", "whole", "tiled"]
"""Division of one layer (Sections 4.1 and 4.2).

``lop``: each device has the whole input and computes some output channels. ``lip``: each device has some input
channels and computes partial sums of all outputs, which the source adds up before bias and activation. ``fuse1`` and
``fuse2``: two successive layers as with LOP and LIP, where the values between the layers stay on the devices that made
them. ``whole``: one device computes the layer. ``tiled``: each device computes its tiles of the feature map."""


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
    """Output channels of each device, for ``lop`` and ``fuse1``; an empty range for a device without a part."""
    inputs: tuple[Range, ...] = ()
    """Input channels of each device, for ``lip`` and ``fuse2``; for ``fuse2`` the device's outputs of ``fuse1``."""


class Tile(_Frozen):
    """One part of the tiled layers, with the device computing the part."""

    row: int
    column: int
    device: int
    regions: tuple[Region, ...]
    """The region of each tiled layer's input that the tile needs, followed by its region of the last layer's output.
    Regions lie within the map; pixels outside are padding."""


class Tiling(_Frozen):
    """Fused tile partitioning of the first layers: a grid of tiles, row by row."""

    rows: int
    columns: int
    tiles: tuple[Tile, ...]


class DistributedPlan(_Frozen):
    """A complete inference plan; `testbed_stahl.dataflow` derives the tasks of each device."""

    scheme: str
    """The scheme as the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """The device with the images. It collects and merges results of the others, and computes a share as well."""
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
    def tiled_count(self) -> int:
        """Number of the first layers, which are computed by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
