"""The time of reading and writing values and weights, by memory rates and by kinds of layers."""

import pytest

from testbed.device import Cost, Kind
from testbed.hardware import DeviceSpec, Rates
from testbed.ml.data import load
from testbed.ml.models import create
from testbed.ml.models.chain import backward_of, forward_of
from testbed.ml.models.graph import graph_of
from testbed.ml.models.layers import BatchNorm2d, Conv2d, Residual
from testbed.ml.rounds.metrics import DECLARED
from testbed.plan import Plan
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario, Trial
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed_controller.profiling.layers import (
    LayerTime,
    fit_rates,
    measure_layers,
    measure_whole,
)

WORKLOAD = {
    "model": {"name": "vgg5"},
    "data": {"name": "digits", "train": 64, "test": 16},
    "batch_size": 16,
    "steps": 8,
}

COMPUTE_ONLY = {"speed": "100mflops"}
"""A device with memory accesses that take no time."""
KINDS = {
    "convolution": {
        "speed": "120mflops",
        "memory_rate": "30MB/s",
        "weight_rate": "2MB/s",
    },
    "normalisation": {"memory_rate": "20MB/s"},
    "linear": {"speed": "40mflops", "weight_rate": "10MB/s"},
}
BY_KIND = {"profile": {"speed": "100mflops", "memory": "1GiB", "kinds": KINDS}}
SLOW_MEMORY = {**COMPUTE_ONLY, "memory_rate": "10MB/s"}


def make_trial(method: dict, device: dict, **keys) -> Trial:
    """Return the trial of a scenario with three equal devices."""
    scenario = Scenario.model_validate(
        {
            "name": "test",
            "devices": {"device": {"count": 3, **device}},
            "network": {
                "topology": "mesh",
                "link": {"rate": "100mbit", "delay": "1ms"},
            },
            "workload": {**WORKLOAD, **keys, "method": method},
            "time_limit": "1h",
        }
    )
    (trial,) = trials(scenario)
    return trial


def test_cost_of_vgg_unit_follows_from_layer_sizes() -> None:
    conv1, *_, fc2 = create("vgg5", {}, (3, 32, 32), 10).units
    image = 3 * 32 * 32
    feature_map = 32 * 32 * 32
    # Each layer reads its input and writes its output; pooling leaves a quarter of the values.
    convolution = image + feature_map
    normalisation = activation = 2 * feature_map
    pooling = feature_map + feature_map // 4
    values = convolution + normalisation + activation + pooling
    assert conv1.cost.of().accessed == 4 * values
    # A kernel has 3 * 3 * 3 weights, and there are 32 of them.
    assert conv1.cost.of(["convolution"]) == (
        2.0 * 27 * feature_map,
        4 * convolution,
        4 * 27 * 32,
    )
    assert conv1.cost.of(["normalisation"]) == (0.0, 4 * normalisation, 0.0)
    assert fc2.cost == Cost(2.0 * 128 * 10, 4 * (128 + 10), 4 * 128 * 10, "linear")


def test_residual_block_reads_both_summands() -> None:
    block = Residual((Conv2d(4, padding=1), BatchNorm2d()))
    # 4 * 5 * 5 values: the convolution and the normalisation access two maps each, and the sum three.
    assert block.accesses((4, 5, 5)) == 100 * (2 + 2 + 3)
    assert block.cost((4, 5, 5)).of(["activation"]).accessed == 4 * 100 * 3


def test_weights_are_read_once_per_batch() -> None:
    sample = Cost(2.0, 8.0, 16.0, "linear") + Cost(accessed=4.0, kind="activation")
    # FLOPs and accessed values of ten samples, and the weights of one.
    assert forward_of(sample, 10).of() == (20.0, 120.0, 16.0)
    # The backward pass has two products, by the weights and by the input.
    assert backward_of(sample, 10).of() == (40.0, 120.0, 32.0)


def test_memory_accesses_take_time_with_memory_rate_only() -> None:
    cost = Cost(flops=3e9, accessed=8e9)
    assert DeviceSpec("one", 1e9, 1.0).seconds(cost) == 3.0
    # 3 s of computation and 8 / 2 s of accesses.
    assert DeviceSpec("one", 1e9, 1.0, memory_rate=2e9).seconds(cost) == 7.0


def test_kind_of_layer_has_own_rates() -> None:
    kinds: dict[Kind, Rates] = {
        "linear": Rates(2e9, 4e9, 1e9),
        "pooling": Rates(None, 5e8),
    }
    device = DeviceSpec("one", 1e9, 1.0, memory_rate=2e9, kinds=kinds)
    linear = Cost(4e9, 8e9, 3e9, "linear")
    assert device.seconds(linear) == 4 / 2 + 8 / 4 + 3 / 1
    # FLOPs and weights of pooling have no rate and take no time.
    pooling = Cost(1e9, 1e9, 1e9, "pooling")
    assert device.seconds(pooling) == 1 / 0.5
    # Other kinds have the rates of the device, which has none for weights.
    without_kind = Cost(3e9, 8e9)
    convolution = Cost(1e9, 0.0, 9e9, "convolution")
    total = linear + pooling + without_kind + convolution
    assert device.seconds(total) == 7 + 2 + (3 + 8 / 2) + 1


def simulate_trial(trial: Trial) -> tuple[dict[str, float], Plan]:
    """Return the metrics and the plan of a trial."""
    prepared = prepare(trial)
    outcome = simulate(prepared, load(trial.scenario.workload.data))
    values = metrics(outcome, trial.experiment, prepared.plan, DECLARED)
    return values, prepared.plan


@pytest.mark.parametrize("device", [SLOW_MEMORY, BY_KIND], ids=["memory rate", "kinds"])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "single"},
        {"name": "gpipe", "micro_batches": 2},
        {"name": "pipedream"},
        {"name": "federated"},
    ],
    ids=lambda method: method["name"],
)
def test_step_is_slowed_by_planned_time_of_accesses(method: dict, device: dict) -> None:
    data = dict(WORKLOAD["data"])
    if method["name"] == "federated":
        data["split"] = "iid"

    def step_times(device: dict) -> tuple[float, float]:
        """Return the simulated and the planned time of a step or round."""
        values, plan = simulate_trial(make_trial(method, device, data=data))
        return values.get("round_time") or values["step_time"], plan.step_time

    slow, slow_planned = step_times(device)
    fast, fast_planned = step_times(COMPUTE_ONLY)
    assert slow > 1.2 * fast
    # A round of federated learning includes the time to load the model, which does not depend on memory rates.
    assert slow - fast == pytest.approx(slow_planned - fast_planned, rel=1e-3)


def test_part_of_layer_has_proportional_cost() -> None:
    layer = graph_of(create("cnn", {}, (1, 28, 28), 10)).layers[1]
    layer_cost = layer.cost(layer.inputs, layer.output_channels)
    assert layer_cost.of(["convolution"]).flops == 2 * layer.multiplications
    input_bytes = 4 * layer.inputs
    # Four output channels require all inputs, and their own share of the weights and the outputs.
    outputs_cost = layer.cost(layer.inputs, 4)
    share = 4 / layer.output_channels
    output_bytes = layer_cost.of().accessed - input_bytes
    assert outputs_cost.of().weights == share * 4 * layer.weights
    assert outputs_cost.of().accessed == input_bytes + share * output_bytes
    # Half of the inputs contribute to all outputs.
    inputs_cost = layer.product_cost(layer.inputs // 2, layer.output_channels).of()
    convolution_bytes = layer_cost.of(["convolution"]).accessed
    assert inputs_cost.flops == layer.multiplications
    assert inputs_cost.accessed == convolution_bytes - input_bytes / 2


def test_edgepipe_plans_timeslots_by_kind_of_layer() -> None:
    method = {"name": "edgepipe", "allocation": "horizontal"}
    keys = {"model": {"name": "mlp"}, "batch_size": 32}
    by_kind = prepare(make_trial(method, BY_KIND, **keys)).plan
    compute_only = prepare(make_trial(method, COMPUTE_ONLY, **keys)).plan
    longest_slot = max(compute_only.details.backward_seconds)
    assert max(by_kind.details.backward_seconds) > 2 * longest_slot
    # All layers are divided among all devices, so the device with the largest part of each computes in all timeslots.
    longest_assignment = max(part.seconds for part in by_kind.assignments)
    slots = sum(by_kind.details.forward_seconds)
    assert longest_assignment == pytest.approx(slots, rel=0.01)


@pytest.mark.parametrize("device", [SLOW_MEMORY, BY_KIND], ids=["memory rate", "kinds"])
@pytest.mark.parametrize(
    "options",
    [{"scheme": "lop"}, {"scheme": "lip"}, {"scheme": "lop", "tiled_layers": 2}],
    ids=str,
)
def test_latency_of_distributed_inference_follows_plan(
    options: dict, device: dict
) -> None:
    method = {"name": "distributed", **options}

    def latencies(device: dict) -> tuple[float, float]:
        """Return the simulated and the planned latency."""
        trial = make_trial(method, device, task="infer", requests=2, steps=None)
        values, plan = simulate_trial(trial)
        assert max(part.seconds for part in plan.assignments) < plan.step_time
        return values["latency"], plan.step_time

    slow, slow_planned = latencies(device)
    fast, fast_planned = latencies(COMPUTE_ONLY)
    assert slow > 1.2 * fast
    # Planned latencies are a few percent too long at all rates: more of the sending overlaps computation.
    assert slow_planned / slow == pytest.approx(fast_planned / fast, rel=0.03)


def test_rates_of_device_are_fitted_to_times_of_layers() -> None:
    device = DeviceSpec("one", 5e9, 1.0, memory_rate=3e8)
    times = []
    for cost in (Cost(1e9, 1e6), Cost(2e8, 5e7), Cost(0.0, 1e8)):
        times.append(LayerTime("unit", "layer", cost, device.seconds(cost)))
    assert fit_rates(times) == pytest.approx((5e9, 3e8))


def test_rates_without_computation_are_not_fitted() -> None:
    with pytest.raises(ValueError, match="no speed fits"):
        fit_rates([LayerTime("unit", "layer", Cost(accessed=1e9), 1.0)])


def test_layers_of_model_are_measured() -> None:
    model = create("mlp", {"hidden": [8]}, (1, 8, 8), 10)
    assert measure_whole(model, batch_size=4) > 0
    times = measure_layers(model, batch_size=4)
    names = [time.layer for time in times]
    assert names == ["Flatten", "Linear", "ReLU", "Linear"]
    assert all(time.seconds > 0 for time in times)
