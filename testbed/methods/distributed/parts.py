"""Parts of a row of elements, channels or pixels: half-open ranges, and how a row is divided among devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple


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
