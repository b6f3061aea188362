"""Tests of partitions over devices in a row: optimality, memory, and predicted times of synchronous pipelines."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.models import create
from testbed.ml.models.chain import Unit
from testbed.ml.partition.cuts import Cuts
from testbed.ml.partition.memory import training_bytes
from testbed.ml.partition.pipeline import Chain, SynchronousPipeline
from testbed.ml.schedule import SCHEDULES, Slot
from testbed.network.link import Link
from testbed.wire.framing import wire_bytes
from testbed.wire.message import ENVELOPE, Message, encode
from tests.testbed.ml.partition.chains import all_cuts, fits, linear_model, mesh

CNN = create("cnn", {}, (1, 8, 8), 10)


def make_devices(*speeds: float, memory: float = 1e9) -> tuple[DeviceSpec, ...]:
    devices = []
    for index, speed in enumerate(speeds):
        devices.append(DeviceSpec(f"d{index}", speed, memory))
    return tuple(devices)


def make_pipeline(
    *speeds: float, link: Link | None = None, memory: float = 1e9, **options: Any
) -> SynchronousPipeline:
    """Build a pipeline of the CNN; ``options`` replace the defaults, such as 4 micro-batches under 1F1B."""
    devices = make_devices(*speeds, memory=memory)
    settings: dict[str, Any] = {
        "model": CNN,
        "batch_size": 16,
        "micro_batches": 4,
        "schedule": SCHEDULES["1f1b"],
        **options,
    }
    links = mesh(devices, link or Link())
    return SynchronousPipeline(devices=devices, links=links, **settings)


def forward_flops(units: Sequence[Unit]) -> float:
    return sum(unit.forward_flops for unit in units)


def first_slot(slots: Sequence[Slot], action: str) -> Slot:
    """Return the slot of an action of the first stage."""
    return next(
        slot for slot in slots if slot.stage == 0 and str(slot.action) == action
    )


@st.composite
def random_pipelines(draw: st.DrawFn) -> SynchronousPipeline:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=6))
    count = draw(st.integers(1, len(sizes) - 1))
    devices = []
    for index in range(count):
        speed = draw(st.sampled_from([1e3, 3e3, 1e4]))
        memory = draw(st.sampled_from([3e3, 1e4, 1e9]))
        devices.append(DeviceSpec(f"d{index}", speed, memory))
    links = {}
    for pair in mesh(devices, Link()):
        rate = draw(st.sampled_from([None, 1e4, 1e6]))
        delay = draw(st.sampled_from([0.0, 0.05]))
        links[pair] = Link(rate, delay)
    batch_size = draw(st.integers(1, 9))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    return SynchronousPipeline(
        linear_model(*sizes),
        tuple(devices),
        links,
        batch_size,
        draw(st.integers(1, batch_size)),
        SCHEDULES[schedule],
        draw(st.booleans()),
    )


def busy_time(
    pipeline: SynchronousPipeline, stage: int, ends: tuple[int, int]
) -> float:
    """Return the seconds for which a stage computes in one step."""
    seconds = pipeline.update_time(stage, *ends)
    for samples in pipeline._micro_batch_sizes:
        seconds += pipeline.forward_time(stage, *ends, samples)
        seconds += pipeline.backward_time(stage, *ends, samples)
    return seconds


@given(random_pipelines())
def test_planned_partitions_are_optimal_among_those_that_fit(
    pipeline: SynchronousPipeline,
) -> None:
    fitting: list[Cuts] = []
    for cuts in all_cuts(len(pipeline.units), len(pipeline.devices)):
        if fits(cuts, pipeline.devices, pipeline.memory):
            fitting.append(cuts)
    if not fitting:
        planners = (
            pipeline.least_bottleneck,
            pipeline.least_step_time,
            pipeline.least_latency,
        )
        for planner in planners:
            with pytest.raises(
                InputError, match="of memory, but its part of the model"
            ):
                planner()
        return
    least_bottleneck = pipeline.least_bottleneck()
    assert pipeline.bottleneck(least_bottleneck) == min(
        map(pipeline.bottleneck, fitting)
    )
    least_latency = pipeline.least_latency()
    assert pipeline.latency(least_latency) == min(map(pipeline.latency, fitting))
    quickest = pipeline.least_step_time()
    assert quickest in fitting
    assert pipeline.step_time(quickest) <= pipeline.step_time(least_bottleneck)
    # A step cannot be shorter than the computing time of any stage, apart from rounding.
    step_time = pipeline.step_time(quickest)
    for stage, ends in enumerate(pairwise(quickest)):
        assert step_time >= busy_time(pipeline, stage, ends) * (1 - 1e-9)


def test_optimal_partition_is_7_times_faster_than_even_on_speeds_1_1_tenth() -> None:
    # A finely divisible chain without communication: a third on the slow device takes 10/3 against 1/2.1.
    pipeline = make_pipeline(10.0, 10.0, 1.0, model=linear_model(*[8] * 211))
    optimal = pipeline.least_bottleneck()
    ratio = pipeline.bottleneck(pipeline.even()) / pipeline.bottleneck(optimal)
    assert optimal == (0, 100, 200, 210)
    assert ratio == pytest.approx(7.0)


def test_memory_counts_micro_batches_kept_by_schedule() -> None:
    unit = CNN.units[2]
    weights = training_bytes(CNN, range(2, 3), 0, state_values=0.0)
    samples_kept = {}
    for name, schedule in SCHEDULES.items():
        pipeline = make_pipeline(1.0, 1.0, 1.0, batch_size=10, schedule=schedule)
        samples_kept[name] = []
        for stage in range(3):
            activations = pipeline.memory(stage, 2, 3) - weights
            samples = activations / (unit.input_bytes + unit.activation_bytes)
            samples_kept[name].append(samples)
    # 10 samples in 4 micro-batches are 3, 3, 2, 2; of three stages the first keeps three of them under 1F1B.
    assert samples_kept == {
        "model-parallelism": [3, 3, 3],
        "gpipe": [10, 10, 10],
        "1f1b": [8, 6, 3],
    }


def test_step_time_on_one_device_is_its_computing_time() -> None:
    pipeline = make_pipeline(1e6, state_values=1.0, update_flops=4.0)
    # A backward costs two forwards.
    work = 16 * 3 * CNN.forward_flops + 4 * CNN.parameters
    assert pipeline.step_time((0, 6)) == pytest.approx(work / 1e6)


def test_step_time_of_equal_stages_follows_formula_of_schedule() -> None:
    model = linear_model(10, 10, 10, 10, bias=False)
    pipeline = make_pipeline(100.0, 100.0, 100.0, model=model, update_flops=0.0)
    # 4 samples through a matrix of 10 x 10, with 2 FLOPs per weight, at 100 FLOP/s.
    forward = 4 * 200 / 100.0
    # With 4 micro-batches and 3 stages, 2 slots fill and drain the pipeline.
    slots_of = {"gpipe": 4 + 2, "1f1b": 4 + 2, "model-parallelism": 4 * 3}
    for name, slots in slots_of.items():
        with_schedule = replace(pipeline, schedule=SCHEDULES[name])
        step_time = with_schedule.step_time((0, 1, 2, 3))
        # Each slot has a forward and a backward of twice its time.
        assert step_time == pytest.approx(3 * forward * slots)


def test_model_parallelism_adds_computing_transfers_and_delays() -> None:
    pipeline = make_pipeline(
        1e7,
        1e6,
        link=Link(rate=1e6, delay=0.02),
        micro_batches=1,
        schedule=SCHEDULES["model-parallelism"],
        update_flops=0.0,
    )
    cuts = (0, 3, 6)
    forward = 16 * (
        forward_flops(CNN.units[:3]) / 1e7 + forward_flops(CNN.units[3:]) / 1e6
    )
    one_way = wire_bytes(16 * CNN.units[3].input_bytes + ENVELOPE) * 8 / 1e6 + 0.02
    # Forward and backward cost three forwards; activations cross the link forth and gradients back.
    assert pipeline.step_time(cuts) == pytest.approx(3 * forward + 2 * one_way)
    assert pipeline.latency(cuts) == pytest.approx(forward + one_way)


def test_least_step_time_differs_from_least_bottleneck_with_few_micro_batches() -> None:
    # The fast first device is idle most of the time when a batch passes alone, so it should have more units.
    pipeline = make_pipeline(3e6, 1e6, link=Link(1e6, 0.05), micro_batches=1)
    least_step_time = pipeline.step_time(pipeline.least_step_time())
    assert least_step_time < pipeline.step_time(pipeline.least_bottleneck())


def test_error_of_insufficient_memory_suggests_batch_size_and_devices_that_fit() -> (
    None
):
    pipeline = make_pipeline(1e6, 1e6, memory=400e3)
    with pytest.raises(InputError) as refused:
        pipeline.least_bottleneck()
    text = str(refused.value)
    assert (
        "d0 has 400 kB of memory, but its part of the model (conv1 to conv3) needs 483 kB at batch"
        in text
    )
    # Both suggestions must be exact: the suggested value fits, and the next one does not.
    batch_size = int(text.split("a batch_size of at most ")[1].split()[0])
    assert replace(pipeline, batch_size=batch_size).least_bottleneck()
    with pytest.raises(InputError):
        replace(pipeline, batch_size=batch_size + 1).least_bottleneck()
    count = int(text.split(" fits, or ")[1].split()[0])
    assert make_pipeline(*[1e6] * count, memory=400e3).least_bottleneck()
    with pytest.raises(InputError):
        make_pipeline(*[1e6] * (count - 1), memory=400e3).least_bottleneck()


def test_error_of_even_cuts_that_do_not_fit_suggests_optimal_partition() -> None:
    devices = (DeviceSpec("small", 1e6, 200e3), DeviceSpec("large", 1e6, 1e9))
    row = Chain(CNN, devices, mesh(devices, Link()), 8)
    with pytest.raises(
        InputError,
        match=r"small has 200 kB .* \(conv1 to conv3\) needs .*: an optimal partition would fit",
    ):
        row.even()
    assert row.least_latency()[1] < 3


def test_model_that_fits_no_number_of_devices_is_rejected() -> None:
    with pytest.raises(
        InputError, match="no smaller batch and no number of such devices fits"
    ):
        make_pipeline(1e6, 1e6, memory=1e3).least_step_time()


def test_missing_link_and_impossible_counts_are_rejected() -> None:
    devices = make_devices(1.0, 1.0)
    with pytest.raises(InputError, match="no link leads from d1 to d0"):
        Chain(CNN, devices, {("d0", "d1"): Link()}, 1)
    with pytest.raises(InputError, match="7 stages, but the model has 6 units"):
        make_pipeline(*[1.0] * 7)
    with pytest.raises(
        InputError,
        match="a batch of 16 cannot be cut into 17 micro-batches: use 1 to 16",
    ):
        make_pipeline(1.0, micro_batches=17)


def test_envelope_constant_is_near_real_overhead_of_message() -> None:
    fields = {
        "configuration": 1,
        "work": "train",
        "batch": 205,
        "micro": 2,
        "samples": 64,
        "micros": 4,
    }
    message = Message("activation", fields, {"tensor": torch.zeros(16, 64)})
    encoded = encode(message, "worker1", incarnation=10**10, sequence=10**4)
    # Float32 has 4 bytes.
    overhead = len(encoded) - 4 * 16 * 64
    assert overhead == pytest.approx(ENVELOPE, abs=40)


def test_recomputation_repeats_forward_and_keeps_only_inputs() -> None:
    pipeline = make_pipeline(1e6, 1e6, 1e6, schedule=SCHEDULES["gpipe"])
    recomputing = replace(pipeline, recompute=True)
    for stage, ends in enumerate(((0, 2), (2, 4), (4, 6))):
        forward = 4 * forward_flops(CNN.units[slice(*ends)]) / 1e6
        backward = 2 * forward
        assert pipeline.backward_time(stage, *ends, 4) == pytest.approx(backward)
        # The last stage goes from forward to backward at once, so it keeps its activations.
        repeated = forward if stage < 2 else 0
        assert recomputing.backward_time(stage, *ends, 4) == pytest.approx(
            backward + repeated
        )
    # GPipe keeps the inputs of all 16 samples, and all activations of the one micro-batch of 4 in backward.
    inputs = 16 * CNN.units[2].input_bytes
    one_micro_batch = training_bytes(CNN, range(2, 4), 4, 0)
    assert recomputing.memory(1, 2, 4) == one_micro_batch + inputs
    all_samples = training_bytes(CNN, range(4, 6), 16, 0)
    assert recomputing.memory(2, 4, 6) == all_samples
    assert pipeline.memory(2, 4, 6) == all_samples


def test_duration_of_micro_batch_is_proportional_to_its_size() -> None:
    pipeline = make_pipeline(1e6, batch_size=10, micro_batches=4, update_flops=0.0)
    forwards = []
    for slot in pipeline.timeline((0, 6)):
        if slot.action.kind == "forward":
            forwards.append(slot.end - slot.start)
    # 10 samples in 4 micro-batches.
    sizes = (3, 3, 2, 2)
    expected = [size * CNN.forward_flops / 1e6 for size in sizes]
    assert forwards == pytest.approx(expected)


def test_next_step_starts_after_update_of_first_stage() -> None:
    pipeline = make_pipeline(1e6, 1e6, link=Link(1e6, 0.01))
    slots = pipeline.timeline((0, 3, 6), steps=2)
    updated = first_slot(slots, "U0").end
    # With 4 micro-batches a step, micro-batch 4 is the first one of the second step.
    assert first_slot(slots, "F4").start == updated
    assert pipeline.step_time((0, 3, 6)) == pytest.approx(updated)
