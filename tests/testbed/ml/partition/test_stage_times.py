"""Partitions by measured times, against brute force and the paper's recursion; versions of weights, against a run."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.layers.versions import mean
from testbed.ml.models import create
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.layers import Linear
from testbed.ml.partition.asynchronous import (
    AsynchronousPipeline,
    UnitTimes,
    divisible_limit,
    links_at_rates,
    relative_capacities,
)
from testbed.ml.partition.cuts import Cuts
from testbed.ml.schedule import Action, actions_by_stage, one_forward_one_backward
from testbed.ml.schedule.versions import (
    is_aggregation_due,
    max_in_flight,
    max_versions,
    version_used,
)
from testbed.network.link import Link
from testbed.wire.framing import wire_bytes
from testbed.wire.message import ENVELOPE

MOBILENET = create("mobilenetv2", {}, (3, 32, 32), 10)
PAPER = (1.0, 1.0, 0.1)


def homogeneous(pipeline: AsynchronousPipeline) -> Cuts:
    """Return PipeDream's partition: the least bottleneck if all devices were as fast as the coordinator."""
    return replace(
        pipeline, capacities=(1.0,) * len(pipeline.devices)
    ).least_bottleneck()


def row(*speeds: float, memory: float = 64e9) -> tuple[DeviceSpec, ...]:
    return tuple(
        DeviceSpec(f"d{index}", 1e9 * speed, memory)
        for index, speed in enumerate(speeds)
    )


def linear(*sizes: int, bias: bool = True) -> Model:
    """Make a model of fully connected units; ``sizes`` are those of the input and of each one's output."""
    return chain(
        "linear",
        sizes[:1],
        sizes[-1],
        [(f"u{n}", [Linear(size, bias)]) for n, size in enumerate(sizes[1:])],
    )


def row_of(
    model: Model, speeds: tuple[float, ...], rate: float | None = None, **other: Any
) -> AsynchronousPipeline:
    devices = row(*speeds, memory=other.pop("memory", 64e9))
    batch = other.pop("batch_size", 256)
    links = {
        (one.name, two.name): Link(rate)
        for one in devices
        for two in devices
        if one != two
    }
    profile = UnitTimes.by_formula(model.units, batch, devices[0], update_flops=6)
    return AsynchronousPipeline(
        model,
        devices,
        links,
        batch,
        profile,
        relative_capacities(devices, model.units, batch),
        state_values=1.0,
        **other,
    )


def all_cuts(units: int, stages: int) -> list[Cuts]:
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


@st.composite
def random_chains(draw: st.DrawFn) -> AsynchronousPipeline:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    units = len(sizes) - 1
    count = draw(st.integers(1, min(units, 4)))
    devices = tuple(
        DeviceSpec(f"d{stage}", 1e6, draw(st.sampled_from([5e3, 2e4, 1e9])))
        for stage in range(count)
    )
    rates = st.sampled_from([1e4, 1e5, math.inf])
    links = links_at_rates(
        {
            (one.name, two.name): draw(rates)
            for one in devices
            for two in devices
            if one != two
        }
    )
    time = st.floats(0.01, 1.0)
    profile = UnitTimes(*(tuple(draw(time) for _ in range(units)) for _ in range(3)))
    scale = (
        1.0,
        *(draw(st.sampled_from([0.5, 1.0, 3.0, 10.0])) for _ in range(count - 1)),
    )
    return AsynchronousPipeline(
        linear(*sizes),
        devices,
        links,
        4,
        profile,
        scale,
        counts_traffic=draw(st.booleans()),
    )


def recursion(found: AsynchronousPipeline) -> float:
    """Equations (4) to (7) as printed, layers counted from 0 and ends inclusive; what does not fit is infinite."""
    times, link = found.profile.execution, found.links

    def fits(stage: int, first: int, last: int) -> bool:
        return found.memory(stage, first, last + 1) <= found.devices[stage].memory

    def execution(stage: int, first: int, last: int) -> float:
        if not fits(stage, first, last):
            return math.inf
        return sum(
            times[layer] * found.capacities[stage] for layer in range(first, last + 1)
        )

    def crossing(stage: int, layer: int) -> float:
        bits = 8 * wire_bytes(4 * found.units[layer].output_bytes + ENVELOPE)
        ways = [link[f"d{stage}", f"d{stage + 1}"], link[f"d{stage + 1}", f"d{stage}"]]
        there, back = (0.0 if way.rate is None else bits / way.rate for way in ways)
        return max(there, back) if found.counts_traffic else 2 * there

    def best(j: int, n: int) -> float:
        if n == 1:
            return execution(0, 0, j)
        return min(
            (
                max(
                    best(cut, n - 1), crossing(n - 2, cut), execution(n - 1, cut + 1, j)
                )
                for cut in range(n - 2, j)
            ),
            default=math.inf,
        )

    return best(len(found.units) - 1, len(found.devices))


@given(random_chains())
def test_the_partition_is_that_of_the_papers_recursion_and_of_brute_force(
    found: AsynchronousPipeline,
) -> None:
    fitting = [
        cuts
        for cuts in all_cuts(len(found.units), len(found.devices))
        if all(
            found.memory(stage, *ends) <= found.devices[stage].memory
            for stage, ends in enumerate(pairwise(cuts))
        )
    ]
    limit = recursion(found)
    if not fitting:
        assert math.isinf(limit)
        with pytest.raises(InputError, match="of memory, but its part of the model"):
            found.least_bottleneck()
        return
    cuts = found.least_bottleneck()
    assert cuts in fitting
    assert (
        found.bottleneck(cuts)
        == min(map(found.bottleneck, fitting))
        == pytest.approx(limit)
    )
    assert homogeneous(found) in fitting
    assert found.bottleneck(homogeneous(found)) >= found.bottleneck(cuts)
    # A full pipeline takes at least as long for a batch as its busiest part, and not longer than a batch all alone.
    found = replace(found, counts_traffic=True)
    alone = found.passage_costs.of(cuts, lambda one, other: one + other)
    assert (
        found.bottleneck(cuts) * (1 - 1e-9)
        <= found.batch_time(cuts)
        <= alone * (1 + 1e-9)
    )


def test_a_link_counts_twice_its_activations_as_in_equation_5_unless_its_traffic_is_counted() -> (
    None
):
    shared, two_way = (
        row_of(MOBILENET, PAPER, 1e4, counts_traffic=counts) for counts in (False, True)
    )
    cuts = (0, 5, 10, 20)
    seconds = 8 * wire_bytes(256 * MOBILENET.units[5].input_bytes + ENVELOPE) / 1e4
    assert two_way.bottleneck_costs.boundary(0, 5) == pytest.approx(seconds)
    assert shared.bottleneck_costs.boundary(0, 5) == pytest.approx(2 * seconds)
    assert shared.bottleneck(cuts) == pytest.approx(2 * two_way.bottleneck(cuts))


def test_seven_times_is_the_limit_of_a_finely_divisible_chain() -> None:
    assert divisible_limit(PAPER) == pytest.approx(7.0)
    assert divisible_limit((1, 1, 1)) == 1
    # Speeds add up to 2.1, so 42 equal units of next to no weights divide as finely as these devices need.
    fine = linear(*[4] * 43, bias=False)
    devices = row(*PAPER)
    links = {
        (one.name, two.name): Link() for one in devices for two in devices if one != two
    }
    profile = UnitTimes((0.1,) * 42, (0.2,) * 42, (0.0,) * 42)
    found = AsynchronousPipeline(
        fine, devices, links, 1, profile, relative_capacities(devices, fine.units, 1)
    )
    assert homogeneous(found) == (0, 14, 28, 42)
    assert found.least_bottleneck() == (0, 20, 40, 42)
    assert found.bottleneck(homogeneous(found)) / found.bottleneck(
        found.least_bottleneck()
    ) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("shape", "width", "speeds", "even", "optimal", "ratio"),
    [
        ((3, 32, 32), 1.0, PAPER, (0, 8, 14, 20), (0, 12, 19, 20), 6.64),
        ((1, 28, 28), 1.0, PAPER, (0, 9, 15, 20), (0, 13, 19, 20), 6.23),
        ((1, 28, 28), 0.75, (1.0, 0.1, 1.0), (0, 5, 14, 20), (0, 11, 12, 20), 7.16),
    ],
)
def test_what_the_units_of_mobilenet_permit(
    shape: tuple[int, ...],
    width: float,
    speeds: tuple[float, ...],
    even: Cuts,
    optimal: Cuts,
    ratio: float,
) -> None:
    """More than 7.0 where the even partition is not balanced itself."""
    found = row_of(create("mobilenetv2", {"width": width}, shape, 10), speeds)
    found = replace(found, links=dict.fromkeys(found.links, Link()))
    assert (homogeneous(found), found.least_bottleneck()) == (even, optimal)
    assert found.slowest_stage(even) / found.slowest_stage(optimal) == pytest.approx(
        ratio, abs=0.01
    )
    assert found.batch_time(even) / found.batch_time(optimal) == pytest.approx(
        ratio, abs=0.01
    )


def test_links_move_the_cut_to_where_less_crosses() -> None:
    fast, slow = row_of(MOBILENET, (1, 1)), row_of(MOBILENET, (1, 1), rate=5e5)
    at = {
        name: found.least_bottleneck()[1]
        for name, found in (("fast", fast), ("slow", slow))
    }
    assert (
        MOBILENET.units[at["slow"]].input_bytes
        < MOBILENET.units[at["fast"]].input_bytes
    )
    assert slow.bottleneck(slow.least_bottleneck()) < slow.bottleneck(
        fast.least_bottleneck()
    )


def test_what_does_not_fit_goes_elsewhere_or_is_refused() -> None:
    roomy = row_of(MOBILENET, PAPER, batch_size=8)
    cuts = roomy.least_bottleneck()
    need = max(roomy.memory(stage, *ends) for stage, ends in enumerate(pairwise(cuts)))
    tight = replace(roomy, devices=row(*PAPER, memory=need * 0.95))
    other = tight.least_bottleneck()
    assert other != cuts
    assert tight.bottleneck(other) >= roomy.bottleneck(cuts)
    tight.check(other)
    with pytest.raises(
        InputError, match=r"a batch_size of at most 7 fits, or 4 devices fit"
    ):
        replace(roomy, devices=row(*PAPER, memory=need * 0.3)).least_bottleneck()


def test_a_wrong_number_of_figures_is_refused() -> None:
    found = row_of(MOBILENET, PAPER)
    with pytest.raises(ValueError, match="3 devices need as many capacities"):
        replace(found, capacities=(1.0, 2.0))
    with pytest.raises(ValueError, match="20 units, but a profile of 1"):
        replace(found, profile=UnitTimes((1.0,), (1.0,), (1.0,)))


def test_memory_counts_versions_and_batches_in_flight() -> None:
    found = row_of(MOBILENET, (1, 1, 1), batch_size=8)
    part = MOBILENET.units[4:9]
    weights = sum(unit.weight_bytes for unit in part)
    activations = sum(unit.activation_bytes for unit in part) + part[0].input_bytes
    for stage in range(3):
        flying = (3 - stage) * 8 * activations
        assert found.memory(stage, 4, 9) == (3 + 2) * weights + flying
        assert (
            replace(found, vertical_sync=False).memory(stage, 4, 9)
            == (3 - stage + 2) * weights + flying
        )


def test_the_order_is_1f1b_and_one_batch_at_a_time_where_the_window_is_one() -> None:
    found = row_of(MOBILENET, (1, 1, 1))
    cuts = found.least_bottleneck()
    played: list[list[Action]] = [[], [], []]
    for slot in found.timeline(cuts, 7):
        if slot.action.kind != "update":
            played[slot.stage].append(slot.action)
    assert list(map(tuple, played)) == list(
        actions_by_stage(one_forward_one_backward, 3, 7)
    )
    alone = replace(found, window=1)
    # All forwards and backwards one after the other; the later stages update while gradients go on to the first.
    there_and_back = sum(found.profile.forward) + sum(found.profile.backward)
    assert alone.batch_time(cuts) == pytest.approx(
        there_and_back + alone.seconds("update", 0, *cuts[:2])
    )
    assert alone.memory(0, 0, 5) < found.memory(0, 0, 5)
    assert replace(found, window=9).memory(0, 0, 5) == found.memory(0, 0, 5)
    assert (
        found.batch_time(cuts)
        <= replace(found, window=2).batch_time(cuts)
        <= alone.batch_time(cuts)
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("vertical_sync", [True, False])
def test_versions_are_bounded_in_a_run_of_1f1b(
    stages: int, vertical_sync: bool
) -> None:
    """Played action by action: what is needed is there, what is dropped is never needed again."""
    batches = 5 * stages
    for stage, actions in enumerate(
        actions_by_stage(one_forward_one_backward, stages, batches)
    ):
        flying: dict[int, int] = {}
        stored = {0}
        done = forwarded = 0
        most_flying = most_stored = 0
        for action in actions:
            if action.kind == "forward":
                version = version_used(
                    action.micro, stages, 0 if vertical_sync else stage
                )
                assert version <= done
                assert version in stored
                if not vertical_sync:
                    assert version == done
                flying[action.micro] = version
                forwarded += 1
            else:
                assert flying.pop(action.micro) in stored
                done += 1
                stored.add(done)
            oldest = version_used(
                min(done, forwarded), stages, 0 if vertical_sync else stage
            )
            stored &= set(range(oldest, done + 1))
            assert done in stored
            most_flying, most_stored = (
                max(most_flying, len(set(flying.values()))),
                max(most_stored, len(stored)),
            )
        assert most_flying == max_in_flight(stages, stage) == stages - stage
        assert most_stored == max_versions(stages, stage, vertical_sync=vertical_sync)


def test_the_papers_figure_2() -> None:
    """Three stages: batches 0 to 2 use version 0, 3 to 5 use 1 to 3, and batch 6 version 5, for one aggregation."""
    assert [version_used(batch, 3) for batch in range(6)] == [0, 0, 0, 1, 2, 3]
    aggregations = [
        done for done in range(9) if is_aggregation_due(done, max_in_flight(3, 0))
    ]
    assert aggregations == [3, 6]
    assert (
        version_used(6, 3) + sum(done <= version_used(6, 3) for done in aggregations)
        == 5
    )
    assert [
        done
        for done in range(9)
        if is_aggregation_due(done, max_in_flight(3, 1), multiple=2)
    ] == [4, 8]
    assert not any(
        is_aggregation_due(done, max_in_flight(3, 2))
        or is_aggregation_due(done, 3, multiple=0)
        for done in range(9)
    )


def test_the_mean_of_versions() -> None:
    versions = [{"0.weight": torch.tensor([float(value), 1.0])} for value in (1, 2, 6)]
    assert torch.equal(mean(versions)["0.weight"], torch.tensor([3.0, 1.0]))
    with pytest.raises(ValueError, match="different units"):
        mean([versions[0], {"1.weight": torch.zeros(2)}])
