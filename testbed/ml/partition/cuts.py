"""Cuts of a chain of units into contiguous stages: even cuts, and exact optima by dynamic programming.

Cuts include both ends of the chain: ``(0, 2, 5)`` assigns units 0 and 1 to stage 0, and units 2 to 4 to stage 1. Costs
are functions that each planner supplies; an infinite cost forbids a stage or a cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from testbed.common.errors import InputError

Cuts = tuple[int, ...]
"""The first unit of each stage, followed by the number of units."""
Combine = Callable[[float, float], float]
"""Combines costs along the chain: ``max`` or ``operator.add``, or any function monotone in both arguments."""


@dataclass(frozen=True)
class Costs:
    """Cost functions of a partition's stages and cuts."""

    stage: Callable[[int, int, int], float]
    """(stage, first, stop) -> cost of computing units ``first`` to ``stop`` (exclusive) on the stage."""
    boundary: Callable[[int, int], float]
    """(stage, cut) -> cost of the transfer between this stage and the next if the next one begins with unit ``cut``."""

    def of(self, cuts: Cuts, combine: Combine) -> float:
        """Return the combined cost of all stages and boundaries of a partition.

        >>> costs = Costs(lambda stage, first, stop: stop - first, lambda stage, cut: 0.5)
        >>> costs.of((0, 2, 5), operator.add)
        5.5
        """
        total = self.stage(0, cuts[0], cuts[1])
        for stage in range(1, len(cuts) - 1):
            first = cuts[stage]
            stop = cuts[stage + 1]
            total = combine(total, self.boundary(stage - 1, first))
            total = combine(total, self.stage(stage, first, stop))
        return total


def check_counts(units: int, stages: int) -> None:
    """Raise `InputError` for more stages than units."""
    if stages < 1:
        raise InputError("a partition needs at least one device", ("devices",))
    if units < stages:
        count = "1 unit" if units == 1 else f"{units} units"
        raise InputError(
            f"{stages} stages, but the model has {count}: write stages: {units}, and the other devices stand by; "
            "`testbed show models` lists the units",
            ("method", "stages"),
        )


def even_cuts(units: int, stages: int) -> Cuts:
    """Return cuts into stages of equal numbers of units; after an inexact division the first stages have one more.

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
    """Return the least cost of a partition, and the corresponding cuts.

    If all partitions are forbidden, the cost is infinite and the cuts are arbitrary.

    The dynamic program is exact, because ``combine`` is monotone: the best partition of the whole model contains the
    best partition of its first units over the first stages. The cost function of a stage is evaluated
    stages x units^2 / 2 times. Ties prefer earlier cuts.

    >>> seconds = (4, 1, 1, 1, 1)
    >>> costs = Costs(lambda stage, first, stop: sum(seconds[first:stop]), lambda stage, cut: 0.0)
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
        best_before = best
        best = {}
        # The cost of all stages before a cut, with the boundary at the cut. The boundary does not depend on the end of
        # this stage, so it is computed once for each cut.
        cost_before: dict[int, float] = {}
        for cut, (cost, _) in best_before.items():
            boundary = costs.boundary(stage - 1, cut)
            cost_before[cut] = combine(cost, boundary)
        # The end moves by one unit with each stage, since every stage before needs a unit.
        for end in range(stage + 1, last_end + stage + 1):
            candidates = []
            for cut, (_, cuts) in best_before.items():
                if cut < end:
                    stage_cost = costs.stage(stage, cut, end)
                    cost = combine(cost_before[cut], stage_cost)
                    candidates.append((cost, cuts))
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
    """Return the least bottleneck, and the cuts of a partition with it; a bottleneck is a partition's largest cost.

    Many partitions have the least bottleneck, since only their costliest stage or boundary determines it. The result is
    the one with the least sum of the costs ``total``.
    """
    limit, cuts = best_cuts(units, stages, bottleneck, max)
    if math.isinf(limit):
        return limit, cuts
    # Of all partitions without a stage or boundary beyond this bottleneck, choose the one with the least total.
    limited = _limit_bottleneck(total, bottleneck, limit)
    cost, cuts_of_least_total = least_total(units, stages, limited)
    # The total may forbid partitions that the bottleneck permits.
    if math.isinf(cost):
        return limit, cuts
    return limit, cuts_of_least_total


def trade_offs(units: int, stages: int, bottleneck: Costs, total: Costs) -> list[Cuts]:
    """Return the Pareto-optimal partitions of total and bottleneck, from least total to least bottleneck.

    No partition improves both the bottleneck and the total of a returned one. Empty if all partitions are forbidden.
    """
    partitions: list[Cuts] = []
    limit = math.inf
    while True:
        # The next partition must have a smaller bottleneck, so its limit is the next smaller float.
        next_limit = math.nextafter(limit, -math.inf)
        limited = _limit_bottleneck(total, bottleneck, next_limit)
        cost, cuts = least_total(units, stages, limited)
        if math.isinf(cost):
            return partitions
        partitions.append(cuts)
        limit = bottleneck.of(cuts, max)


def _limit_bottleneck(total: Costs, bottleneck: Costs, limit: float) -> Costs:
    """Return the costs ``total``, infinite for stages and boundaries whose cost by ``bottleneck`` exceeds the limit."""

    def stage(index: int, first: int, stop: int) -> float:
        if bottleneck.stage(index, first, stop) > limit:
            return math.inf
        return total.stage(index, first, stop)

    def boundary(index: int, cut: int) -> float:
        if bottleneck.boundary(index, cut) > limit:
            return math.inf
        return total.boundary(index, cut)

    return Costs(stage, boundary)
