"""Layers divided among devices: sums of costs, memory, and outputs, against the whole layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.layers.layer_slices import (
    count_values,
    finish_cost,
    place_slices,
    product_cost,
)
from testbed.ml.method import Options, PlanningProblem
from testbed.ml.models import create
from testbed.ml.models.graph import GraphLayer, graph_of
from testbed.ml.models.sliced import SlicedLayer, cut_tensors, draw_tensors
from testbed.ml.models.slices import Slice, even_ranges
from testbed.work import WorkloadPart

MODEL = create("mlp", {"hidden": [12, 8]}, (1, 4, 4), 5)
LAYERS = graph_of(MODEL).layers
SAMPLES = 3
WORKLOAD = WorkloadPart.model_validate(
    {
        "task": "infer",
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "method": {"name": "single"},
        "batch_size": SAMPLES,
    }
)
LayerSlices = list[tuple[GraphLayer, Slice]]
"""The slices of one device, for each layer."""


def slices_by_outputs(devices: int) -> list[LayerSlices]:
    """Divide each layer evenly by outputs and return the slices of each device."""
    by_device: list[LayerSlices] = [[] for _ in range(devices)]
    for layer in LAYERS:
        outputs = even_ranges(layer.output_channels, devices)
        for slices, channels in zip(by_device, outputs, strict=True):
            slices.append((layer, layer.by_outputs(channels)))
    return by_device


def slices_by_inputs(devices: int) -> list[LayerSlices]:
    """Divide each layer evenly by inputs; each device finishes an even range of outputs."""
    by_device: list[LayerSlices] = [[] for _ in range(devices)]
    for layer in LAYERS:
        inputs = even_ranges(layer.input_channels, devices)
        outputs = even_ranges(layer.output_channels, devices)
        for device, slices in enumerate(by_device):
            part = layer.by_inputs(inputs[device], outputs[device])
            slices.append((layer, part))
    return by_device


@pytest.mark.parametrize(
    "divide", [slices_by_outputs, slices_by_inputs], ids=["outputs", "inputs"]
)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_costs_of_slices_sum_to_costs_of_model(
    divide: Callable[[int], list[LayerSlices]], devices: int
) -> None:
    values = 0
    flops = 0.0
    finishing = Cost()
    for slices in divide(devices):
        values += count_values(slices)
        for layer, part in slices:
            flops += product_cost(layer, part, SAMPLES).of().flops
            finishing += finish_cost(layer, part, SAMPLES)
    assert values == MODEL.parameters
    assert flops == pytest.approx(SAMPLES * MODEL.forward_flops)
    accessed = 0.0
    for layer in LAYERS:
        accessed += layer.finish_cost(layer.output_channels).of().accessed
    assert finishing.of().accessed == pytest.approx(SAMPLES * accessed)


def test_assignment_of_slices_has_memory_and_duration() -> None:
    speed = 1e6
    device = DeviceSpec("a", speed=speed, memory=1e9)
    problem = PlanningProblem((device,), {}, WORKLOAD, Options(), seed=0, model=MODEL)
    (slices,) = slices_by_outputs(1)
    assignment = place_slices(problem, "a", slices, "all outputs")
    assert assignment.start == 0
    assert assignment.stop == len(MODEL.units)
    assert assignment.part == "all outputs"
    assert assignment.parameters == MODEL.parameters
    assert assignment.flops == MODEL.forward_flops
    # Beside the weights, inputs and outputs of the largest layer are in memory at once.
    largest = max(layer.inputs + layer.outputs for layer in LAYERS)
    assert assignment.memory == 4 * (MODEL.parameters + SAMPLES * largest)
    duration = SAMPLES * MODEL.forward_flops / speed
    assert assignment.seconds == pytest.approx(duration)
    half, _ = slices_by_outputs(2)
    half_assignment = place_slices(problem, "a", half, "the first half")
    assert half_assignment.memory < assignment.memory


def test_products_of_input_slices_sum_to_whole_layer() -> None:
    layer = LAYERS[0]
    inputs = torch.randn(SAMPLES, layer.inputs)
    state = MODEL.build(0, len(MODEL.units), seed=7).state_dict()

    def make_sliced(part: Slice) -> SlicedLayer:
        return SlicedLayer(layer, part, cut_tensors(layer, part, state))

    parts = [slices[0][1] for slices in slices_by_inputs(3)]
    sums = torch.zeros(())
    for part in parts:
        own_inputs = inputs[:, part.columns.start : part.columns.stop]
        sums = sums + make_sliced(part).sums(own_inputs)
    outputs = []
    for part in parts:
        own_sums = sums[:, part.channels.start : part.channels.stop]
        # Bias and activation follow the sum over all devices.
        outputs.append(make_sliced(part).finish(own_sums))
    expected = make_sliced(layer.whole_slice).run(inputs)
    assert torch.allclose(torch.cat(outputs, dim=1), expected, atol=1e-6)


def test_drawn_slices_equal_slices_of_whole_model() -> None:
    seed = 7
    state = MODEL.build(0, len(MODEL.units), seed).state_dict()
    for slices in slices_by_outputs(2):
        drawn = draw_tensors(MODEL, slices, seed)
        expected: dict[str, torch.Tensor] = {}
        for layer, part in slices:
            expected |= cut_tensors(layer, part, state)
        assert drawn.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(drawn[name], tensor), name
