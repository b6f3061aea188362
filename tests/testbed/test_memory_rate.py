"""What layers read and write takes time where a device has a rate for it, the same in plans and in runs."""

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
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed_controller.profiling.layers import (
    LayerTime,
    fit_rates,
    measure_layers,
    measure_whole,
)

WORK = {
    "model": {"name": "vgg5"},
    "data": {"name": "digits", "train": 64, "test": 16},
    "batch_size": 16,
    "steps": 8,
}


PLAIN = {"speed": "100mflops"}
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


def scenario(method: dict, device: dict, **keys) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "test",
            "devices": {"device": {"count": 3, **device}},
            "network": {
                "topology": "mesh",
                "link": {"rate": "100mbit", "delay": "1ms"},
            },
            "workload": {**WORK, **keys, "method": method},
            "time_limit": "1h",
        }
    )


def test_accesses_by_hand() -> None:
    conv1, *_, fc2 = create("vgg5", {}, (3, 32, 32), 10).units
    map_of = 32 * 32 * 32
    # Convolution, normalisation, activation, pooling; each reads what enters and writes what leaves.
    values = (3 * 32 * 32 + map_of) + 2 * map_of + 2 * map_of + (map_of + map_of // 4)
    assert conv1.cost.of().accessed == 4 * values
    assert conv1.cost.of(["convolution"]) == (
        2.0 * 27 * map_of,
        4 * (3 * 32 * 32 + map_of),
        4 * 27 * 32,
    )
    assert conv1.cost.of(["normalisation"]) == (0.0, 4 * 2 * map_of, 0.0)
    assert fc2.cost == Cost(2.0 * 128 * 10, 4 * (128 + 10), 4 * 128 * 10, "linear")
    block = Residual((Conv2d(4, padding=1), BatchNorm2d()))
    assert block.accesses((4, 5, 5)) == 100 * (2 + 2 + 3)
    assert block.cost((4, 5, 5)).of(["activation"]).accessed == 4 * 100 * 3


def test_a_batch_reads_the_weights_once() -> None:
    one = Cost(2.0, 8.0, 16.0, "linear") + Cost(accessed=4.0, kind="activation")
    assert forward_of(one, 10).of() == (20.0, 120.0, 16.0)
    assert backward_of(one, 10).of() == (40.0, 120.0, 32.0)


def test_a_device_adds_both_rates_and_by_default_charges_flops_alone() -> None:
    cost = Cost(flops=3e9, accessed=8e9)
    assert DeviceSpec("one", 1e9, 1.0).seconds(cost) == 3.0
    assert DeviceSpec("one", 1e9, 1.0, memory_rate=2e9).seconds(cost) == 7.0


def test_kinds_of_layers_have_rates_of_their_own() -> None:
    kinds: dict[Kind, Rates] = {
        "linear": Rates(2e9, 4e9, 1e9),
        "pooling": Rates(None, 5e8),
    }
    device = DeviceSpec("one", 1e9, 1.0, memory_rate=2e9, kinds=kinds)
    linear, pooling = Cost(4e9, 8e9, 3e9, "linear"), Cost(1e9, 1e9, 1e9, "pooling")
    assert device.seconds(linear) == 4 / 2 + 8 / 4 + 3 / 1
    assert device.seconds(pooling) == 2.0  # what has no rate takes no time
    assert (
        device.seconds(
            linear + pooling + Cost(3e9, 8e9) + Cost(1e9, 0.0, 9e9, "convolution")
        )
        == 7 + 2 + 7 + 1
    )


@pytest.mark.parametrize(
    "device",
    [{**PLAIN, "memory_rate": "10MB/s"}, BY_KIND],
    ids=["memory rate", "kinds"],
)
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
def test_runs_take_what_is_planned(method: dict, device: dict) -> None:
    data = (
        {**WORK["data"], "split": "iid"}
        if method["name"] == "federated"
        else WORK["data"]
    )

    def taken(device: dict) -> tuple[float, float]:
        (trial,) = trials(scenario(method, device, data=data))
        ready = prepare(trial)
        outcome = simulate(ready, load(trial.scenario.workload.data))
        found = metrics(outcome, trial.experiment, ready.plan, DECLARED)
        return found.get("round_time") or found["step_time"], ready.plan.step_time

    slow, plain = taken(device), taken(PLAIN)
    assert slow[0] > 1.2 * plain[0]
    # A round of federated learning takes what its devices need to load the model beside, whatever the memory rate.
    assert slow[0] - plain[0] == pytest.approx(slow[1] - plain[1], rel=1e-3)


def test_parts_of_a_layer_cost_their_share() -> None:
    layer = graph_of(create("cnn", {}, (1, 28, 28), 10)).layers[1]
    whole, part = (
        layer.cost(layer.inputs, layer.output_channels),
        layer.cost(layer.inputs, 4),
    )
    assert whole.of(["convolution"]).flops == 2 * layer.multiplications
    share, read = 4 / layer.output_channels, 4 * layer.inputs
    assert part.of().weights == share * 4 * layer.weights
    # Some channels are made from all that enters; of some that enter, parts of sums of all channels.
    assert part.of().accessed == read + share * (whole.of().accessed - read)
    sums = layer.product_cost(layer.inputs // 2, layer.output_channels).of()
    assert sums.flops == layer.multiplications
    assert sums.accessed == whole.of(["convolution"]).accessed - read / 2


def test_edgepipe_plans_slots_by_kind() -> None:
    method = {"name": "edgepipe", "allocation": "horizontal"}
    keys = {"model": {"name": "mlp"}, "batch_size": 32}

    def planned(device: dict) -> Plan:
        (trial,) = trials(scenario(method, device, **keys))
        return prepare(trial).plan

    by_kind, plain = planned(BY_KIND), planned(PLAIN)
    assert max(by_kind.details.backward_seconds) > 2 * max(
        plain.details.backward_seconds
    )
    # All layers lie on all devices: one that has the most of each takes as long as all of them together.
    assert max(
        assignment.seconds for assignment in by_kind.assignments
    ) == pytest.approx(sum(by_kind.details.forward_seconds), rel=0.01)


@pytest.mark.parametrize(
    "device",
    [{**PLAIN, "memory_rate": "10MB/s"}, BY_KIND],
    ids=["memory rate", "kinds"],
)
@pytest.mark.parametrize(
    "options",
    [{"scheme": "lop"}, {"scheme": "lip"}, {"scheme": "lop", "tiled_layers": 2}],
    ids=str,
)
def test_an_inference_takes_what_is_planned(options: dict, device: dict) -> None:
    def taken(device: dict) -> tuple[float, float]:
        method = {"name": "distributed", **options}
        (trial,) = trials(
            scenario(method, device, task="infer", requests=2, steps=None)
        )
        ready = prepare(trial)
        outcome = simulate(ready, load(trial.scenario.workload.data))
        assert (
            max(assignment.seconds for assignment in ready.plan.assignments)
            < ready.plan.step_time
        )
        return metrics(outcome, trial.experiment, ready.plan)[
            "latency"
        ], ready.plan.step_time

    slow, plain = taken(device), taken(PLAIN)
    assert slow[0] > 1.2 * plain[0]
    # The formula is some percent high, since computing hides more of the sending than it knows: by any rates the same.
    assert slow[1] / slow[0] == pytest.approx(plain[1] / plain[0], rel=0.03)


def test_rates_of_a_machine_come_out_of_its_layers() -> None:
    device = DeviceSpec("one", 5e9, 1.0, memory_rate=3e8)
    work = [Cost(1e9, 1e6), Cost(2e8, 5e7), Cost(0.0, 1e8)]
    assert fit_rates(
        [LayerTime("unit", "layer", cost, device.seconds(cost)) for cost in work]
    ) == pytest.approx((5e9, 3e8))
    with pytest.raises(ValueError, match="no speed fits"):
        fit_rates([LayerTime("unit", "layer", Cost(accessed=1e9), 1.0)])
    model = create("mlp", {"hidden": [8]}, (1, 8, 8), 10)
    assert measure_whole(model, batch_size=4) > 0
    found = measure_layers(model, batch_size=4)
    assert [each.layer for each in found] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert all(each.seconds > 0 for each in found)
