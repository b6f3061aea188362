"""Dividing channels, tiles and rows of pixels among devices in whole pieces."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from testbed.methods.distributed.partition.ranges import Range


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
