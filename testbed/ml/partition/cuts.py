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
"""First unit of each stage, and the number of units at the end."""
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
        """Return the cost of a partition.

        >>> costs = Costs(lambda stage, first, last: last - first, lambda stage, cut: 0.5)
        >>> costs.of((0, 2, 5), operator.add)
        5.5
        """
        total = self.stage(0, cuts[0], cuts[1])
        for stage in range(1, len(cuts) - 1):
            first = cuts[stage]
            last = cuts[stage + 1]
            total = combine(total, self.boundary(stage - 1, first))
            total = combine(total, self.stage(stage, first, last))
        return total


def check_counts(units: int, stages: int) -> None:
    """Raise `InputError` for more stages than units."""
    if stages < 1:
        raise InputError("a partition needs at least one device", ("devices",))
    if units < stages:
        count = "1 unit" if units == 1 else f"{units} units"
        raise InputError(
            f"{stages} stages, but the model has {count}: write stages: {units}, and the devices beyond stand by; a "
            "unit is what one tensor enters and one leaves, and `testbed show models` lists them",
            ("method", "stages"),
        )


def even_cuts(units: int, stages: int) -> Cuts:
    """Return cuts into stages of equal numbers of units, the first stages having one more if necessary.

    Raises `InputError` for more stages than units, as do all functions below.

    >>> even_cuts(5, 2)
    (0, 3, 5)
    """
    check_counts(units, stages)
    size, larger_stages = divmod(units, stages)
    cuts = []
    for stage in range(stages + 1):
        # Each of the first `larger_stages` stages moves all later cuts by one unit.
        cuts.append(stage * size + min(stage, larger_stages))
    return tuple(cuts)


def best_cuts(
    units: int, stages: int, costs: Costs, combine: Combine
) -> tuple[float, Cuts]:
    """Return the least cost of a partition and the cuts; infinity and arbitrary cuts if all partitions are forbidden.

    The dynamic program is exact, because ``combine`` is monotone: the best partition of the whole model contains the
    best partition of its first units over the first stages. The cost function of a stage is evaluated
    stages x units^2 / 2 times. Ties prefer earlier cuts.

    >>> seconds = (4, 1, 1, 1, 1)
    >>> costs = Costs(lambda stage, first, last: sum(seconds[first:last]), lambda stage, cut: 0.0)
    >>> best_cuts(units=5, stages=2, costs=costs, combine=max)
    (4, (0, 1, 5))
    """
    check_counts(units, stages)
    # best[end] is the best partition of the first `end` units over the stages so far. Each later stage needs a unit, so
    # the first one ends at `last_end` at most.
    last_end = units - stages + 1
    best: dict[int, tuple[float, Cuts]] = {}
    for end in range(1, last_end + 1):
        cost = costs.stage(0, 0, end)
        best[end] = (cost, (0, end))
    for stage in range(1, stages):
        before = best
        best = {}
        # The cost of all stages before a cut with the boundary there. Computed once for each cut, since the boundary
        # does not depend on the end of the stage.
        cost_before: dict[int, float] = {}
        for cut, (cost, _) in before.items():
            boundary = costs.boundary(stage - 1, cut)
            cost_before[cut] = combine(cost, boundary)
        for end in range(stage + 1, last_end + stage + 1):
            candidates = []
            for cut, (_, cuts) in before.items():
                if cut < end:
                    own = costs.stage(stage, cut, end)
                    candidates.append((combine(cost_before[cut], own), cuts))
            # Tuples compare by cost, then by cuts: ties prefer earlier cuts.
            cost, cuts = min(candidates)
            best[end] = (cost, (*cuts, end))
    return best[units]


def least_total(units: int, stages: int, total: Costs) -> tuple[float, Cuts]:
    """Return the partition with the least sum of costs: the latency of a single sample."""
    return best_cuts(units, stages, total, operator.add)


def least_bottleneck(
    units: int, stages: int, bottleneck: Costs, total: Costs
) -> tuple[float, Cuts]:
    """Return the least bottleneck and the partition that has it; ties prefer the least total.

    Many partitions have the least bottleneck, since only the slowest part determines it.
    """
    limit, cuts = best_cuts(units, stages, bottleneck, max)
    if math.isinf(limit):
        return limit, cuts
    # Of all partitions whose parts do not exceed this bottleneck, choose the one with the least total.
    limited = _limit_bottleneck(total, bottleneck, limit)
    cost, cuts_of_least_total = least_total(units, stages, limited)
    # A total may be infinite where the bottleneck is not.
    if math.isinf(cost):
        return limit, cuts
    return limit, cuts_of_least_total


def trade_offs(units: int, stages: int, bottleneck: Costs, total: Costs) -> list[Cuts]:
    """Return the Pareto-optimal partitions of total and bottleneck, from least total to least bottleneck.

    No other partition improves both the bottleneck and the total of one of them. Empty if all are forbidden.
    """
    partitions: list[Cuts] = []
    limit = math.inf
    while True:
        # The largest float below the last bottleneck: the next partition must be strictly better.
        below = math.nextafter(limit, -math.inf)
        limited = _limit_bottleneck(total, bottleneck, below)
        cost, cuts = least_total(units, stages, limited)
        if math.isinf(cost):
            return partitions
        partitions.append(cuts)
        limit = bottleneck.of(cuts, max)


def _limit_bottleneck(total: Costs, bottleneck: Costs, limit: float) -> Costs:
    """Forbid every part whose cost by ``bottleneck`` exceeds the limit."""

    def stage(index: int, first: int, last: int) -> float:
        if bottleneck.stage(index, first, last) > limit:
            return math.inf
        return total.stage(index, first, last)

    def boundary(index: int, cut: int) -> float:
        if bottleneck.boundary(index, cut) > limit:
            return math.inf
        return total.boundary(index, cut)

    return Costs(stage, boundary)
