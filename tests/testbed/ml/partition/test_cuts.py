"""Tests of the dynamic programs that cut a chain of units, against brute force."""

import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.partition.cuts import (
    Costs,
    Cuts,
    best_cuts,
    even_cuts,
    least_bottleneck,
    trade_offs,
)
from tests.testbed.ml.partition.chains import all_cuts

CNN = create("cnn", {}, (1, 8, 8), 10)


def draw_costs(draw: st.DrawFn, units: int, stages: int) -> Costs:
    """Draw a cost for each possible stage and cut; an infinite cost forbids a stage or cut."""
    # Few different values, so that many partitions have equal costs.
    cost = st.integers(0, 6).map(float) | st.just(math.inf)
    stage_costs = {}
    boundary_costs = {}
    for stage in range(stages):
        for first in range(units):
            for last in range(first + 1, units + 1):
                stage_costs[stage, first, last] = draw(cost)
        for cut in range(1, units):
            boundary_costs[stage, cut] = draw(cost)
    return Costs(lambda *key: stage_costs[key], lambda *key: boundary_costs[key])


@st.composite
def random_costs(draw: st.DrawFn) -> tuple[int, int, Costs, Costs]:
    """Draw the number of units and stages, and two kinds of cost of one chain."""
    units = draw(st.integers(1, 6))
    stages = draw(st.integers(1, units))
    bottleneck = draw_costs(draw, units, stages)
    total = draw_costs(draw, units, stages)
    return units, stages, bottleneck, total


def costs_of_partitions(
    partitions: list[Cuts], bottleneck: Costs, total: Costs
) -> list[tuple[float, float]]:
    """Return bottleneck and total of each partition."""
    costs = []
    for cuts in partitions:
        costs.append((bottleneck.of(cuts, max), total.of(cuts, operator.add)))
    return costs


@given(random_costs())
def test_best_cuts_equal_brute_force(case: tuple[int, int, Costs, Costs]) -> None:
    units, stages, _, costs = case
    partitions = all_cuts(units, stages)
    for combine in (max, operator.add):
        cost, cuts = best_cuts(units, stages, costs, combine)
        assert cost == min(costs.of(partition, combine) for partition in partitions)
        # If all partitions are forbidden, the returned cuts are arbitrary.
        if math.isfinite(cost):
            assert costs.of(cuts, combine) == cost


@given(random_costs())
def test_least_bottleneck_equals_brute_force_and_prefers_least_total(
    case: tuple[int, int, Costs, Costs],
) -> None:
    units, stages, bottleneck, total = case
    costs = costs_of_partitions(all_cuts(units, stages), bottleneck, total)
    cost, cuts = least_bottleneck(units, stages, bottleneck, total)
    assert cost == min(slowest for slowest, _ in costs)
    if math.isfinite(cost):
        cuts_total = total.of(cuts, operator.add)
        assert bottleneck.of(cuts, max) == cost or math.isinf(cuts_total)
        assert cuts_total == min(
            sum_of_costs for slowest, sum_of_costs in costs if slowest == cost
        )


@given(random_costs())
def test_trade_offs_are_pareto_front_by_brute_force(
    case: tuple[int, int, Costs, Costs],
) -> None:
    units, stages, bottleneck, total = case
    costs = costs_of_partitions(all_cuts(units, stages), bottleneck, total)
    front = trade_offs(units, stages, bottleneck, total)
    front_costs = costs_of_partitions(front, bottleneck, total)
    for limit, least_total in front_costs:
        # No partition with at most this bottleneck has a smaller total.
        totals = [sum_of_costs for slowest, sum_of_costs in costs if slowest <= limit]
        assert least_total == min(totals)
    bottlenecks = [limit for limit, _ in front_costs]
    assert bottlenecks == sorted(bottlenecks, reverse=True)
    # The front ends with the least bottleneck of all allowed partitions; it is empty if none is allowed.
    allowed = []
    for slowest, sum_of_costs in costs:
        if math.isfinite(slowest) and math.isfinite(sum_of_costs):
            allowed.append(slowest)
    assert bottlenecks[-1:] == ([min(allowed)] if allowed else [])


def test_even_cuts_differ_by_at_most_one_unit() -> None:
    assert even_cuts(6, 3) == (0, 2, 4, 6)
    assert even_cuts(8, 3) == (0, 3, 6, 8)
    assert even_cuts(3, 3) == (0, 1, 2, 3)


def test_more_stages_than_units_are_rejected() -> None:
    with pytest.raises(
        InputError,
        match="4 stages, but the model has 3 units: write stages: 3, and the other devices",
    ):
        even_cuts(3, 4)


def test_partition_with_infinite_total_keeps_least_bottleneck() -> None:
    # The only partition with a finite bottleneck has an infinite total, so the total cannot choose between ties.
    only_allowed = {(0, 0, 2), (1, 2, 3)}
    bottleneck = Costs(
        stage=lambda *key: 0.0 if key in only_allowed else math.inf,
        boundary=lambda *_: 0.0,
    )
    total = Costs(
        stage=lambda *key: math.inf if key in only_allowed else 0.0,
        boundary=lambda *_: 0.0,
    )
    assert least_bottleneck(3, 2, bottleneck, total) == (0.0, (0, 2, 3))
