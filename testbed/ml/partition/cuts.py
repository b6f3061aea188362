"""Cuts of a chain of units into contiguous stages: even cuts, and exact optima by dynamic programming.

Cuts include both ends: ``(0, 2, 5)`` assigns units 0 and 1 to stage 0, and units 2 to 4 to stage 1. Costs are functions
supplied by each planner; an infinite cost forbids a part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from testbed.common.errors import InputError

Cuts = tuple[int, ...]
Combine = Callable[[float, float], float]
"""Combines costs along the chain: ``max`` or ``operator.add``, or any function monotone in both arguments."""


@dataclass(frozen=True)
class Costs:
    """Cost functions of a partition's stages and cuts."""

    stage: Callable[[int, int, int], float]
    """(stage, first unit, last unit exclusive) -> cost of computing the units on the stage."""
    boundary: Callable[[int, int], float]
    """(stage, cut) -> cost between this stage and the next when the next begins with unit ``cut``."""

    def of(self, cuts: Cuts, combine: Combine) -> float:
        """Return the cost of a partition."""
        total = self.stage(0, cuts[0], cuts[1])
        for stage in range(1, len(cuts) - 1):
            between = self.boundary(stage - 1, cuts[stage])
            total = combine(
                combine(total, between), self.stage(stage, cuts[stage], cuts[stage + 1])
            )
        return total


def check_counts(units: int, stages: int) -> None:
    """Raise `InputError` for more stages than units."""
    if stages < 1:
        raise InputError("a partition needs at least one device", ("devices",))
    if units < stages:
        has = f"the model has {units} unit{'' if units == 1 else 's'}"
        rest = f"write stages: {units}, and the devices beyond stand by; a unit is what one tensor enters and one "
        rest += "leaves, and `testbed show models` lists them"
        raise InputError(f"{stages} stages, but {has}: {rest}", ("method", "stages"))


def even(units: int, stages: int) -> Cuts:
    """Return cuts into stages of equal numbers of units, the first stages having one more if necessary.

    >>> even(5, 2)
    (0, 3, 5)
    """
    check_counts(units, stages)
    small, larger = divmod(units, stages)
    return tuple(stage * small + min(stage, larger) for stage in range(stages + 1))


def best(units: int, stages: int, costs: Costs, combine: Combine) -> tuple[float, Cuts]:
    """Return the least cost of a partition and its cuts; infinity and arbitrary cuts if all are forbidden.

    Exact, because ``combine`` is monotone: the best whole contains the best partition of its first units over its first
    stages. The cost function of a stage is evaluated stages x units^2 / 2 times. Ties prefer earlier cuts.
    """
    check_counts(units, stages)
    # table[end] is the best for the first `end` units over the stages so far.
    table: dict[int, tuple[float, Cuts]] = {
        end: (costs.stage(0, 0, end), (0, end)) for end in range(1, units - stages + 2)
    }
    for stage in range(1, stages):
        longer: dict[int, tuple[float, Cuts]] = {}
        arriving = {
            cut: (combine(cost, costs.boundary(stage - 1, cut)), cuts)
            for cut, (cost, cuts) in table.items()
        }
        for end in range(stage + 1, units - stages + stage + 2):
            cost, cuts = min(
                (combine(before, costs.stage(stage, cut, end)), cuts)
                for cut, (before, cuts) in arriving.items()
                if cut < end
            )
            longer[end] = (cost, (*cuts, end))
        table = longer
    return table[units]


def least_total(units: int, stages: int, total: Costs) -> tuple[float, Cuts]:
    """Return the partition with the least sum of costs: the latency of a single sample."""
    return best(units, stages, total, operator.add)


def least_bottleneck(
    units: int, stages: int, bottleneck: Costs, total: Costs
) -> tuple[float, Cuts]:
    """Return the partition whose largest cost is least; ties prefer the least total."""
    limit, cuts = best(units, stages, bottleneck, max)
    if math.isinf(limit):
        return limit, cuts
    cost, among_equals = least_total(
        units, stages, _limit_bottleneck(total, bottleneck, limit)
    )
    return limit, cuts if math.isinf(cost) else among_equals


def trade_offs(units: int, stages: int, bottleneck: Costs, total: Costs) -> list[Cuts]:
    """Return the Pareto-optimal partitions of total and bottleneck, from least total to least bottleneck.

    No other partition improves both the bottleneck and the total of one of them. Empty if all are forbidden.
    """
    partitions: list[Cuts] = []
    limit = math.inf
    while True:
        cost, cuts = least_total(
            units,
            stages,
            _limit_bottleneck(total, bottleneck, math.nextafter(limit, -math.inf)),
        )
        if math.isinf(cost):
            return partitions
        partitions.append(cuts)
        limit = bottleneck.of(cuts, max)


def _limit_bottleneck(total: Costs, bottleneck: Costs, limit: float) -> Costs:
    """Forbid every part whose cost by ``bottleneck`` exceeds the limit."""

    def stage(index: int, first: int, last: int) -> float:
        return (
            total.stage(index, first, last)
            if bottleneck.stage(index, first, last) <= limit
            else math.inf
        )

    def boundary(index: int, cut: int) -> float:
        return (
            total.boundary(index, cut)
            if bottleneck.boundary(index, cut) <= limit
            else math.inf
        )

    return Costs(stage, boundary)
