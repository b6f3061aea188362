"""Tests of asynchronous partitions by measured times, against brute force and equations (4) to (7) of FTPipeHD."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.models import create
from testbed.ml.models.chain import Model, TiedWeight
from testbed.ml.partition.asynchronous import (
    AsynchronousPipeline,
    UnitTimes,
    divisible_limit,
    links_at_rates,
    relative_capacities,
)
from testbed.ml.partition.cuts import Cuts
from testbed.ml.schedule import Action, actions_by_stage, one_forward_one_backward
from testbed.network.link import Link
from testbed.wire.framing import wire_bytes
from testbed.wire.message import ENVELOPE
from tests.testbed.ml.partition.chains import all_cuts, fits, linear_model, mesh

MOBILENET = create("mobilenetv2", {}, (3, 32, 32), 10)
PAPER_SPEEDS = (1.0, 1.0, 0.1)
"""Relative speeds of FTPipeHD's devices, one of them ten times slower."""


def homogeneous(pipeline: AsynchronousPipeline) -> Cuts:
    """Return PipeDream's partition: the least bottleneck if all devices were as fast as the coordinator."""
    equal_capacities = (1.0,) * len(pipeline.devices)
    return replace(pipeline, capacities=equal_capacities).least_bottleneck()


def make_devices(*speeds: float, memory: float = 64e9) -> tuple[DeviceSpec, ...]:
    devices = []
    for index, speed in enumerate(speeds):
        devices.append(DeviceSpec(f"d{index}", 1e9 * speed, memory))
    return tuple(devices)


def make_pipeline(
    model: Model,
    speeds: tuple[float, ...],
    rate: float | None = None,
    batch_size: int = 256,
    **options: Any,
) -> AsynchronousPipeline:
    devices = make_devices(*speeds)
    profile = UnitTimes.by_formula(model.units, batch_size, devices[0], update_flops=6)
    return AsynchronousPipeline(
        model,
        devices,
        mesh(devices, Link(rate)),
        batch_size,
        profile,
        relative_capacities(devices, model.units, batch_size),
        state_values=1.0,
        **options,
    )


@st.composite
def random_chains(draw: st.DrawFn) -> AsynchronousPipeline:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    units = len(sizes) - 1
    count = draw(st.integers(1, min(units, 4)))
    devices = []
    for stage in range(count):
        memory = draw(st.sampled_from([5e3, 2e4, 1e9]))
        devices.append(DeviceSpec(f"d{stage}", 1e6, memory))
    rates = {}
    for pair in mesh(devices, Link()):
        rates[pair] = draw(st.sampled_from([1e4, 1e5, math.inf]))
    unit_times = st.tuples(*[st.floats(0.01, 1.0)] * units)
    profile = UnitTimes(draw(unit_times), draw(unit_times), draw(unit_times))
    # The capacity of the coordinator is 1 by definition.
    capacities = [1.0]
    for _ in range(count - 1):
        capacities.append(draw(st.sampled_from([0.5, 1.0, 3.0, 10.0])))
    return AsynchronousPipeline(
        linear_model(*sizes),
        tuple(devices),
        links_at_rates(rates),
        4,
        profile,
        tuple(capacities),
        counts_traffic=draw(st.booleans()),
    )


def execution_time(
    pipeline: AsynchronousPipeline, stage: int, first: int, last: int
) -> float:
    """Return equation (7) for layers ``first`` to ``last`` (inclusive); infinite for insufficient memory."""
    if pipeline.memory(stage, first, last + 1) > pipeline.devices[stage].memory:
        return math.inf
    seconds = 0.0
    for layer in range(first, last + 1):
        seconds += pipeline.profile.execution[layer] * pipeline.capacities[stage]
    return seconds


def crossing_time(pipeline: AsynchronousPipeline, stage: int, layer: int) -> float:
    """Return the transfer time after a layer, as equation (5) or as the larger of both directions."""
    # Four samples in a batch.
    bits = 8 * wire_bytes(4 * pipeline.units[layer].output_bytes + ENVELOPE)
    this, following = f"d{stage}", f"d{stage + 1}"
    seconds = []
    for pair in ((this, following), (following, this)):
        rate = pipeline.links[pair].rate
        seconds.append(0.0 if rate is None else bits / rate)
    if pipeline.counts_traffic:
        return max(seconds)
    return 2 * seconds[0]


def bottleneck_by_recursion(pipeline: AsynchronousPipeline) -> float:
    """Return the least bottleneck by equations (4) to (7) as printed, with layers counted from 0."""

    def best(j: int, n: int) -> float:
        if n == 1:
            return execution_time(pipeline, 0, 0, j)
        least = math.inf
        for cut in range(n - 2, j):
            slowest = max(
                best(cut, n - 1),
                crossing_time(pipeline, n - 2, cut),
                execution_time(pipeline, n - 1, cut + 1, j),
            )
            least = min(least, slowest)
        return least

    return best(len(pipeline.units) - 1, len(pipeline.devices))


@given(random_chains())
def test_least_bottleneck_equals_brute_force_and_recursion_of_paper(
    pipeline: AsynchronousPipeline,
) -> None:
    fitting: list[Cuts] = []
    for cuts in all_cuts(len(pipeline.units), len(pipeline.devices)):
        if fits(cuts, pipeline.devices, pipeline.memory):
            fitting.append(cuts)
    limit = bottleneck_by_recursion(pipeline)
    if not fitting:
        assert math.isinf(limit)
        with pytest.raises(InputError, match="of memory, but its part of the model"):
            pipeline.least_bottleneck()
        return
    optimal = pipeline.least_bottleneck()
    assert optimal in fitting
    bottleneck = pipeline.bottleneck(optimal)
    assert bottleneck == min(map(pipeline.bottleneck, fitting))
    assert bottleneck == pytest.approx(limit)
    of_equal_devices = homogeneous(pipeline)
    assert of_equal_devices in fitting
    assert pipeline.bottleneck(of_equal_devices) >= bottleneck
    # A full pipeline takes at least as long for a batch as its busiest part, and not longer than a batch all alone.
    with_traffic = replace(pipeline, counts_traffic=True)
    alone = with_traffic.passage_costs.of(optimal, operator.add)
    batch_time = with_traffic.batch_time(optimal)
    assert with_traffic.bottleneck(optimal) * (1 - 1e-9) <= batch_time
    assert batch_time <= alone * (1 + 1e-9)


def test_link_counts_twice_its_activations_unless_traffic_is_counted() -> None:
    # Equation (5) counts activations and gradients on one link.
    as_printed = make_pipeline(MOBILENET, PAPER_SPEEDS, 1e4, counts_traffic=False)
    two_way = make_pipeline(MOBILENET, PAPER_SPEEDS, 1e4, counts_traffic=True)
    cuts = (0, 5, 10, 20)
    seconds = 8 * wire_bytes(256 * MOBILENET.units[5].input_bytes + ENVELOPE) / 1e4
    assert two_way.bottleneck_costs.boundary(0, 5) == pytest.approx(seconds)
    assert as_printed.bottleneck_costs.boundary(0, 5) == pytest.approx(2 * seconds)
    # At this rate a link is the bottleneck.
    assert as_printed.bottleneck(cuts) == pytest.approx(2 * two_way.bottleneck(cuts))


def test_finely_divisible_chain_is_7_times_faster_with_optimal_partition() -> None:
    assert divisible_limit(PAPER_SPEEDS) == pytest.approx(7.0)
    assert divisible_limit((1, 1, 1)) == 1
    # Speeds add up to 2.1, so 42 equal units of next to no weights divide as finely as these devices need.
    model = linear_model(*[4] * 43, bias=False)
    devices = make_devices(*PAPER_SPEEDS)
    profile = UnitTimes((0.1,) * 42, (0.2,) * 42, (0.0,) * 42)
    capacities = relative_capacities(devices, model.units, 1)
    pipeline = AsynchronousPipeline(
        model, devices, mesh(devices, Link()), 1, profile, capacities
    )
    even = homogeneous(pipeline)
    optimal = pipeline.least_bottleneck()
    assert even == (0, 14, 28, 42)
    assert optimal == (0, 20, 40, 42)
    ratio = pipeline.bottleneck(even) / pipeline.bottleneck(optimal)
    assert ratio == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("shape", "width", "speeds", "even", "optimal", "ratio"),
    [
        ((3, 32, 32), 1.0, PAPER_SPEEDS, (0, 8, 14, 20), (0, 12, 19, 20), 6.64),
        ((1, 28, 28), 1.0, PAPER_SPEEDS, (0, 9, 15, 20), (0, 13, 19, 20), 6.23),
        ((1, 28, 28), 0.75, (1.0, 0.1, 1.0), (0, 5, 14, 20), (0, 11, 12, 20), 7.16),
    ],
)
def test_speedup_of_optimal_partition_of_mobilenet(
    shape: tuple[int, ...],
    width: float,
    speeds: tuple[float, ...],
    even: Cuts,
    optimal: Cuts,
    ratio: float,
) -> None:
    # More than 7.0 is possible where the even partition is not balanced itself.
    model = create("mobilenetv2", {"width": width}, shape, 10)
    pipeline = make_pipeline(model, speeds)
    pipeline = replace(pipeline, links=dict.fromkeys(pipeline.links, Link()))
    assert homogeneous(pipeline) == even
    assert pipeline.least_bottleneck() == optimal

    def speedup(time_of: Callable[[Cuts], float]) -> float:
        return time_of(even) / time_of(optimal)

    assert speedup(pipeline.slowest_stage) == pytest.approx(ratio, abs=0.01)
    assert speedup(pipeline.batch_time) == pytest.approx(ratio, abs=0.01)


def test_slow_link_moves_cut_to_smaller_activation() -> None:
    fast = make_pipeline(MOBILENET, (1, 1))
    slow = make_pipeline(MOBILENET, (1, 1), rate=5e5)
    fast_cuts = fast.least_bottleneck()
    slow_cuts = slow.least_bottleneck()
    fast_unit = MOBILENET.units[fast_cuts[1]]
    slow_unit = MOBILENET.units[slow_cuts[1]]
    assert slow_unit.input_bytes < fast_unit.input_bytes
    assert slow.bottleneck(slow_cuts) < slow.bottleneck(fast_cuts)


def test_units_exceeding_memory_move_or_plan_is_rejected() -> None:
    roomy = make_pipeline(MOBILENET, PAPER_SPEEDS, batch_size=8)
    cuts = roomy.least_bottleneck()
    needs = [roomy.memory(stage, *ends) for stage, ends in enumerate(pairwise(cuts))]
    need = max(needs)
    tight_devices = make_devices(*PAPER_SPEEDS, memory=need * 0.95)
    tight = replace(roomy, devices=tight_devices)
    tight_cuts = tight.least_bottleneck()
    assert tight_cuts != cuts
    assert tight.bottleneck(tight_cuts) >= roomy.bottleneck(cuts)
    tight.check_memory(tight_cuts)
    small_devices = make_devices(*PAPER_SPEEDS, memory=need * 0.3)
    with pytest.raises(
        InputError, match=r"a batch_size of at most 7 fits, or 4 devices fit"
    ):
        replace(roomy, devices=small_devices).least_bottleneck()


def test_plan_is_rejected_if_only_cut_that_fits_separates_tied_weight() -> None:
    tied = TiedWeight(("2.weight", "3.weight"), values=1)
    model = replace(linear_model(4, 4, 4, 4, 400), tied_weights=(tied,))
    roomy = make_pipeline(model, (1.0, 1.0), batch_size=8)
    # The last unit alone fills a device.
    need = roomy.memory(1, 3, 4)
    tight = replace(roomy, devices=make_devices(1.0, 1.0, memory=need))
    tight.check_memory((0, 3, 4))
    with pytest.raises(InputError, match="units u2 and u3 share a weight"):
        tight.least_bottleneck()


def test_wrong_number_of_capacities_or_unit_times_is_rejected() -> None:
    pipeline = make_pipeline(MOBILENET, PAPER_SPEEDS)
    with pytest.raises(ValueError, match="3 devices need as many capacities"):
        replace(pipeline, capacities=(1.0, 2.0))
    with pytest.raises(ValueError, match="profile must have 20 units, not 1"):
        replace(pipeline, profile=UnitTimes((1.0,), (1.0,), (1.0,)))


def test_memory_counts_weight_versions_and_batches_in_flight() -> None:
    pipeline = make_pipeline(MOBILENET, (1, 1, 1), batch_size=8)
    without_sync = replace(pipeline, vertical_sync=False)
    units = MOBILENET.units[4:9]
    weights = sum(unit.weight_bytes for unit in units)
    outputs = sum(unit.activation_bytes for unit in units)
    per_sample = outputs + units[0].input_bytes
    for stage in range(3):
        in_flight = 3 - stage
        activations = in_flight * 8 * per_sample
        # Beside the versions, gradients and momentum are as large as the weights.
        assert pipeline.memory(stage, 4, 9) == (3 + 2) * weights + activations
        own_versions = (in_flight + 2) * weights
        assert without_sync.memory(stage, 4, 9) == own_versions + activations


def test_timeline_follows_1f1b() -> None:
    pipeline = make_pipeline(MOBILENET, (1, 1, 1))
    actions: list[list[Action]] = [[], [], []]
    for slot in pipeline.timeline(pipeline.least_bottleneck(), 7):
        if slot.action.kind != "update":
            actions[slot.stage].append(slot.action)
    expected = actions_by_stage(one_forward_one_backward, 3, 7)
    assert [tuple(of_stage) for of_stage in actions] == list(expected)


def test_window_of_one_runs_one_batch_at_a_time() -> None:
    pipeline = make_pipeline(MOBILENET, (1, 1, 1))
    cuts = pipeline.least_bottleneck()
    alone = replace(pipeline, window=1)
    # All forwards and backwards one after the other; the later stages update while gradients continue to the first.
    round_trip = sum(pipeline.profile.forward) + sum(pipeline.profile.backward)
    update = alone.seconds("update", 0, *cuts[:2])
    assert alone.batch_time(cuts) == pytest.approx(round_trip + update)
    full_memory = pipeline.memory(0, 0, 5)
    assert alone.memory(0, 0, 5) < full_memory
    # A window beyond the number of stages changes nothing.
    assert replace(pipeline, window=9).memory(0, 0, 5) == full_memory
    two_batches = replace(pipeline, window=2)
    assert pipeline.batch_time(cuts) <= two_batches.batch_time(cuts)
    assert two_batches.batch_time(cuts) <= alone.batch_time(cuts)
