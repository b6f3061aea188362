"""Parts of a row of elements: half-open ranges, and several of them in order that do not touch."""

from __future__ import annotations

from collections.abc import Iterable
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


def common(one: Range, other: Range) -> Range:
    """Return what two ranges share; of size 0 where that is nothing."""
    first = max(one.first, other.first)
    return Range(first, max(first, min(one.last, other.last)))


def both(one: Pieces, other: Pieces) -> Pieces:
    """Return what is in either."""
    found: list[Range] = []
    for piece in sorted(piece for piece in (*one, *other) if piece.size):
        if found and piece.first <= found[-1].last:
            found[-1] = Range(found[-1].first, max(found[-1].last, piece.last))
        else:
            found.append(piece)
    return tuple(found)


def without(pieces: Pieces, gone: Range) -> Pieces:
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
