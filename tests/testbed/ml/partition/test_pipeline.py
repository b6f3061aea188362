"""Partitions over devices in a row: the best that fit, what they keep in memory, and what they take."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.models import create
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.layers import Linear
from testbed.ml.partition.cuts import Cuts
from testbed.ml.partition.memory import training_bytes
from testbed.ml.partition.pipeline import Chain, SynchronousPipeline
from testbed.ml.schedule import SCHEDULES
from testbed.network.link import Link
from testbed.wire.framing import wire_bytes
from testbed.wire.message import ENVELOPE, Message, encode

CNN = create("cnn", {}, (1, 8, 8), 10)


def all_cuts(units: int, stages: int) -> list[Cuts]:
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


def devices(*speeds: float, memory: float = 1e9) -> tuple[DeviceSpec, ...]:
    return tuple(
        DeviceSpec(f"d{index}", speed, memory) for index, speed in enumerate(speeds)
    )


def mesh(found: tuple[DeviceSpec, ...], link: Link) -> dict[tuple[str, str], Link]:
    return {
        (one.name, other.name): link for one in found for other in found if one != other
    }


def linear(*sizes: int, bias: bool = True) -> Model:
    """Make a model of fully connected units; ``sizes`` are those of the input and of each one's output."""
    return chain(
        "linear",
        sizes[:1],
        sizes[-1],
        [(f"u{n}", [Linear(size, bias)]) for n, size in enumerate(sizes[1:])],
    )


def pipeline(
    *speeds: float, link: Link | None = None, memory: float = 1e9, **other: Any
) -> SynchronousPipeline:
    row = devices(*speeds, memory=memory)
    settings: dict[str, Any] = {
        "model": CNN,
        "batch_size": 16,
        "micro_batches": 4,
        "schedule": SCHEDULES["1f1b"],
        **other,
    }
    return SynchronousPipeline(devices=row, links=mesh(row, link or Link()), **settings)


@st.composite
def random_pipelines(draw: st.DrawFn) -> SynchronousPipeline:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    count = draw(st.integers(1, len(sizes) - 1))
    speeds = draw(
        st.lists(st.sampled_from([1e3, 3e3, 1e4]), min_size=count, max_size=count)
    )
    row = tuple(
        DeviceSpec(f"d{index}", speed, draw(st.sampled_from([3e3, 1e4, 1e9])))
        for index, speed in enumerate(speeds)
    )
    links = {
        pair: Link(
            draw(st.sampled_from([None, 1e4, 1e6])), draw(st.sampled_from([0.0, 0.05]))
        )
        for pair in mesh(row, Link())
    }
    batch = draw(st.integers(1, 9))
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    return SynchronousPipeline(
        linear(*sizes),
        row,
        links,
        batch,
        draw(st.integers(1, batch)),
        schedule,
        draw(st.booleans()),
    )


@given(random_pipelines())
def test_plans_are_the_best_that_fit(found: SynchronousPipeline) -> None:
    stages = len(found.devices)

    def fits(cuts: Cuts) -> bool:
        return all(
            found.memory(stage, first, last) <= found.devices[stage].memory
            for stage, (first, last) in enumerate(pairwise(cuts))
        )

    fitting = [cuts for cuts in all_cuts(len(found.units), stages) if fits(cuts)]
    if not fitting:
        for plan in (
            found.least_bottleneck,
            found.least_step_time,
            found.least_latency,
        ):
            with pytest.raises(
                InputError, match="of memory, but its part of the model"
            ):
                plan()
        return
    assert found.bottleneck(found.least_bottleneck()) == min(
        map(found.bottleneck, fitting)
    )
    assert found.latency(found.least_latency()) == min(map(found.latency, fitting))
    quickest = found.least_step_time()
    assert quickest in fitting
    assert found.step_time(quickest) <= found.step_time(found.least_bottleneck())
    # Every step is at least as long as the busiest stage is busy, and as one micro-batch there and back.
    busy = max(
        sum(
            found.forward_time(stage, *ends, size)
            + found.backward_time(stage, *ends, size)
            for size in found._sizes
        )
        + found.update_time(stage, *ends)
        for stage, ends in enumerate(pairwise(quickest))
    )
    assert found.step_time(quickest) >= busy * (1 - 1e-9)


def test_even_against_optimal_on_speeds_1_1_tenth_nears_seven() -> None:
    # A finely divisible chain without communication: a third on the slow device takes 10/3 against 1/2.1.
    found = pipeline(10.0, 10.0, 1.0, model=linear(*[8] * 211))
    optimal = found.least_bottleneck()
    ratio = found.bottleneck(found.even()) / found.bottleneck(optimal)
    assert optimal == (0, 100, 200, 210)
    assert ratio == pytest.approx(7.0)


def test_memory_counts_the_micro_batches_that_the_schedule_keeps() -> None:
    # 10 samples in 4 micro-batches are 3, 3, 2, 2; of three stages the first keeps three of them under 1F1B.
    kept = {
        name: [
            (
                found.memory(stage, 2, 3)
                - training_bytes(CNN, range(2, 3), 0, state_values=0.0)
            )
            / (CNN.units[2].input_bytes + CNN.units[2].activation_bytes)
            for stage in range(3)
        ]
        for name, schedule in SCHEDULES.items()
        for found in [pipeline(1.0, 1.0, 1.0, batch_size=10, schedule=schedule)]
    }
    assert kept == {
        "model-parallelism": [3, 3, 3],
        "gpipe": [10, 10, 10],
        "1f1b": [8, 6, 3],
    }


def test_step_time_of_one_device_is_its_work() -> None:
    found = pipeline(1e6, state_values=1.0, update_flops=4.0)
    work = 16 * 3 * CNN.forward_flops + 4 * CNN.parameters
    assert found.step_time((0, 6)) == pytest.approx(work / 1e6)


def test_step_time_of_even_stages_is_the_pipelines_formula() -> None:
    found = pipeline(
        100.0, 100.0, 100.0, model=linear(10, 10, 10, 10, bias=False), update_flops=0.0
    )
    forward = 4 * 200 / 100.0
    for name, slots in {
        "gpipe": 4 + 2,
        "1f1b": 4 + 2,
        "model-parallelism": 4 * 3,
    }.items():
        assert replace(found, schedule=SCHEDULES[name]).step_time(
            (0, 1, 2, 3)
        ) == pytest.approx(3 * forward * slots)


def test_model_parallelism_adds_up_compute_transfers_and_delays() -> None:
    link = Link(rate=1e6, delay=0.02)
    found = pipeline(
        1e7,
        1e6,
        link=link,
        micro_batches=1,
        schedule=SCHEDULES["model-parallelism"],
        update_flops=0.0,
    )
    cuts = (0, 3, 6)
    compute = sum(
        16
        * 3
        * sum(unit.forward_flops for unit in CNN.units[slice(*ends)])
        / device.speed
        for ends, device in zip(pairwise(cuts), found.devices, strict=True)
    )
    one_way = wire_bytes(16 * CNN.units[3].input_bytes + ENVELOPE) * 8 / 1e6 + 0.02
    assert found.step_time(cuts) == pytest.approx(compute + 2 * one_way)
    assert found.latency(cuts) == pytest.approx(compute / 3 + one_way)


def test_few_micro_batches_prefer_a_quick_passage() -> None:
    # The fast first device is idle most of the time when a batch goes through alone, and so it should have more.
    found = pipeline(3e6, 1e6, link=Link(1e6, 0.05), micro_batches=1)
    assert found.step_time(found.least_step_time()) < found.step_time(
        found.least_bottleneck()
    )


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    small = pipeline(1e6, 1e6, memory=400e3)
    with pytest.raises(InputError) as refused:
        small.least_bottleneck()
    text = str(refused.value)
    assert (
        "d0 has 400 kB of memory, but its part of the model (conv1 to conv3) needs 483 kB at batch"
        in text
    )
    batch = int(text.split("a batch_size of at most ")[1].split()[0])
    assert replace(small, batch_size=batch).least_bottleneck()
    with pytest.raises(InputError):
        replace(small, batch_size=batch + 1).least_bottleneck()
    count = int(text.split(" fits, or ")[1].split()[0])
    assert pipeline(*[1e6] * count, memory=400e3).least_bottleneck()
    with pytest.raises(InputError):
        pipeline(*[1e6] * (count - 1), memory=400e3).least_bottleneck()


def test_even_cuts_that_do_not_fit_point_to_the_optimal_ones() -> None:
    row = (DeviceSpec("small", 1e6, 200e3), DeviceSpec("large", 1e6, 1e9))
    found = Chain(CNN, row, mesh(row, Link()), 8)
    with pytest.raises(
        InputError,
        match=r"small has 200 kB .* \(conv1 to conv3\) needs .*: an optimal partition would fit",
    ):
        found.even()
    assert found.least_latency()[1] < 3


def test_nothing_fits() -> None:
    with pytest.raises(
        InputError, match="no smaller batch and no number of such devices fits"
    ):
        pipeline(1e6, 1e6, memory=1e3).least_step_time()


def test_stages_that_are_not_linked_or_have_no_unit() -> None:
    row = devices(1.0, 1.0)
    with pytest.raises(InputError, match="no link leads from d1 to d0"):
        Chain(CNN, row, {("d0", "d1"): Link()}, 1)
    with pytest.raises(InputError, match="7 stages, but the model has 6 units"):
        pipeline(*[1.0] * 7)
    with pytest.raises(
        InputError,
        match="a batch of 16 cannot be cut into 17 micro-batches: use 1 to 16",
    ):
        pipeline(1.0, micro_batches=17)


def test_the_envelope_is_about_that_of_a_message() -> None:
    fields = {
        "configuration": 1,
        "work": "train",
        "batch": 205,
        "micro": 2,
        "samples": 64,
        "micros": 4,
    }
    message = Message("activation", fields, {"tensor": torch.zeros(16, 64)})
    around = (
        len(encode(message, "worker1", incarnation=10**10, sequence=10**4))
        - 4 * 16 * 64
    )
    assert around == pytest.approx(ENVELOPE, abs=40)


def test_what_is_computed_again_takes_its_time_and_keeps_only_what_enters() -> None:
    """All stages but the last forward a second time before a backward, and keep one micro-batch's activations."""
    found = pipeline(1e6, 1e6, 1e6, schedule=SCHEDULES["gpipe"])
    again = replace(found, recompute=True)
    for stage, ends in enumerate(((0, 2), (2, 4), (4, 6))):
        forward, backward = (4 * each for each in (1, 2))
        flops = sum(unit.forward_flops for unit in CNN.units[slice(*ends)])
        assert found.backward_time(stage, *ends, 4) == pytest.approx(
            backward * flops / 1e6
        )
        more = forward if stage < 2 else 0
        assert again.backward_time(stage, *ends, 4) == pytest.approx(
            (backward + more) * flops / 1e6
        )
    entering = CNN.units[2].input_bytes
    assert (
        again.memory(1, 2, 4) == training_bytes(CNN, range(2, 4), 4, 0) + 16 * entering
    )
    assert (
        again.memory(2, 4, 6)
        == found.memory(2, 4, 6)
        == training_bytes(CNN, range(4, 6), 16, 0)
    )


def test_micro_batches_of_unlike_sizes_take_their_own_time() -> None:
    found = pipeline(1e6, batch_size=10, micro_batches=4, update_flops=0.0)
    slots = found.timeline((0, 6))
    forwards = [
        slot.end - slot.start for slot in slots if slot.action.kind == "forward"
    ]
    assert forwards == pytest.approx(
        [samples * CNN.forward_flops / 1e6 for samples in (3, 3, 2, 2)]
    )


def test_steps_of_a_timeline_follow_each_other_once_the_first_stage_has_updated() -> (
    None
):
    found = pipeline(1e6, 1e6, link=Link(1e6, 0.01))
    slots = found.timeline((0, 3, 6), steps=2)
    updated = next(
        slot.end for slot in slots if slot.stage == 0 and str(slot.action) == "U0"
    )
    begun = next(
        slot.start for slot in slots if slot.stage == 0 and str(slot.action) == "F4"
    )
    assert begun == updated
    assert found.step_time((0, 3, 6)) == pytest.approx(updated)
