"""Cuts of a chain: the dynamic programs against brute force."""

import math
import operator
from itertools import combinations

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

CNN = create("cnn", {}, (1, 8, 8), 10)


def all_cuts(units: int, stages: int) -> list[Cuts]:
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


@st.composite
def random_costs(draw: st.DrawFn) -> tuple[int, int, Costs, Costs]:
    """Two kinds of cost over one random chain; some pieces are forbidden."""
    units = draw(st.integers(1, 6))
    stages = draw(st.integers(1, units))
    cost = st.integers(0, 6).map(float) | st.just(math.inf)

    def table() -> Costs:
        stage = {
            (index, first, last): draw(cost)
            for index in range(stages)
            for first in range(units)
            for last in range(first + 1, units + 1)
        }
        between = {
            (index, cut): draw(cost)
            for index in range(stages)
            for cut in range(1, units)
        }
        return Costs(lambda *key: stage[key], lambda *key: between[key])

    return units, stages, table(), table()


@given(random_costs())
def test_the_dynamic_programs_equal_brute_force(
    case: tuple[int, int, Costs, Costs],
) -> None:
    units, stages, bottleneck, total = case
    everything = all_cuts(units, stages)
    for combine in (max, operator.add):
        cost, cuts = best_cuts(units, stages, total, combine)
        assert cost == min(total.of(each, combine) for each in everything)
        assert math.isinf(cost) or total.of(cuts, combine) == cost

    cost, cuts = least_bottleneck(units, stages, bottleneck, total)
    assert cost == min(bottleneck.of(each, max) for each in everything)
    tied = [each for each in everything if bottleneck.of(each, max) == cost]
    if math.isfinite(cost):
        assert bottleneck.of(cuts, max) == cost or math.isinf(
            total.of(cuts, operator.add)
        )
        assert total.of(cuts, operator.add) == min(
            total.of(each, operator.add) for each in tied
        )

    pairs = [
        (bottleneck.of(each, max), total.of(each, operator.add)) for each in everything
    ]
    front = trade_offs(units, stages, bottleneck, total)
    for each in front:
        value, passage = bottleneck.of(each, max), total.of(each, operator.add)
        assert passage == min(other for limit, other in pairs if limit <= value)
    reached = [bottleneck.of(each, max) for each in front]
    assert reached == sorted(reached, reverse=True)
    allowed = [
        limit
        for limit, passage in pairs
        if math.isfinite(limit) and math.isfinite(passage)
    ]
    assert reached[-1:] == ([min(allowed)] if allowed else [])


def test_even_cuts_differ_by_one_unit_at_most() -> None:
    assert even_cuts(6, 3) == (0, 2, 4, 6)
    assert even_cuts(8, 3) == (0, 3, 6, 8)
    assert even_cuts(3, 3) == (0, 1, 2, 3)
    with pytest.raises(
        InputError,
        match="4 stages, but the model has 3 units: write stages: 3, and the devices beyond",
    ):
        even_cuts(3, 4)


def test_equals_that_no_total_tells_apart_keep_the_least_bottleneck() -> None:
    """The one partition with a finite bottleneck has an infinite total."""
    allowed = Costs(
        stage=lambda *key: 0.0 if key in {(0, 0, 2), (1, 2, 3)} else math.inf,
        boundary=lambda *_: 0.0,
    )
    total = Costs(
        stage=lambda *key: math.inf if key in {(0, 0, 2), (1, 2, 3)} else 0.0,
        boundary=lambda *_: 0.0,
    )
    assert least_bottleneck(3, 2, allowed, total) == (0.0, (0, 2, 3))
