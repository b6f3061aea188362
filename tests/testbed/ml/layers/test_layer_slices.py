"""What a device holds of divided layers: what it needs and is charged adds up to the whole, and so does its output."""

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
from testbed.ml.models.graph import graph_of
from testbed.ml.models.sliced import SlicedLayer, cut_tensors, draw_tensors
from testbed.ml.models.slices import even_ranges
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


def divided(members, by_outputs=True):
    """The slices of each of some members, of every layer."""
    if by_outputs:
        parts = [
            [
                layer.by_outputs(part)
                for part in even_ranges(layer.output_channels, members)
            ]
            for layer in LAYERS
        ]
    else:
        parts = [
            [
                layer.by_inputs(part, own)
                for part, own in zip(
                    *(even_ranges(n, members) for n in sizes), strict=True
                )
            ]
            for layer in LAYERS
            for sizes in [(layer.input_channels, layer.output_channels)]
        ]
    return [list(zip(LAYERS, own, strict=True)) for own in zip(*parts, strict=True)]


@pytest.mark.parametrize("by_outputs", [True, False])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_members_together_hold_and_multiply_as_much_as_the_whole(members, by_outputs):
    held = divided(members, by_outputs)
    assert sum(map(count_values, held)) == MODEL.parameters
    works = [product_cost(*each, SAMPLES).of() for own in held for each in own]
    assert sum(work.flops for work in works) == pytest.approx(
        SAMPLES * MODEL.forward_flops
    )
    finished = [finish_cost(*each, SAMPLES) for own in held for each in own]
    assert sum(finished, Cost()).of().accessed == pytest.approx(
        SAMPLES
        * sum(
            layer.finish_cost(layer.output_channels).of().accessed for layer in LAYERS
        )
    )


def test_a_piece_says_what_a_device_needs_and_how_long_it_takes():
    device = DeviceSpec("a", speed=1e6, memory=1e9)
    problem = PlanningProblem((device,), {}, WORKLOAD, Options(), seed=0, model=MODEL)
    (own,) = divided(1)
    found = place_slices(problem, "a", own, "all outputs")
    assert (found.start, found.stop, found.part) == (0, len(MODEL.units), "all outputs")
    assert found.parameters == MODEL.parameters
    assert found.flops == MODEL.forward_flops
    most = max(layer.inputs + layer.outputs for layer in LAYERS)
    assert found.memory == 4 * (MODEL.parameters + SAMPLES * most)
    assert found.seconds == pytest.approx(SAMPLES * MODEL.forward_flops / 1e6)
    half, _ = divided(2)
    assert place_slices(problem, "a", half, "the first half").memory < found.memory


def test_slices_of_the_inputs_add_up_to_the_whole_layer():
    layer = LAYERS[0]
    inputs = torch.randn(SAMPLES, layer.inputs)
    state = MODEL.build(0, len(MODEL.units), 7).state_dict()
    members = [own[0][1] for own in divided(3, by_outputs=False)]
    sums = sum(
        SlicedLayer(layer, part, cut_tensors(layer, part, state)).sums(
            inputs[:, part.columns.start : part.columns.stop]
        )
        for part in members
    )
    finished = [
        SlicedLayer(layer, part, cut_tensors(layer, part, state)).finish(
            sums[:, part.channels.start : part.channels.stop]
        )
        for part in members
    ]
    whole = SlicedLayer(layer, layer.whole, cut_tensors(layer, layer.whole, state)).run(
        inputs
    )
    assert torch.allclose(torch.cat(finished, dim=1), whole, atol=1e-6)


def test_drawn_slices_are_those_of_the_seeds_whole_model():
    state = MODEL.build(0, len(MODEL.units), 7).state_dict()
    for own in divided(2):
        drawn = draw_tensors(MODEL, own, 7)
        wanted = {
            name: tensor
            for each in own
            for name, tensor in cut_tensors(*each, state).items()
        }
        assert drawn.keys() == wanted.keys()
        assert all(torch.equal(drawn[name], wanted[name]) for name in drawn)
