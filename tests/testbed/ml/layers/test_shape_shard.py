"""Units without numbers behave as those with numbers do, in everything but the numbers."""

import math

import pytest
import torch

from testbed.hardware import DeviceSpec
from testbed.ml.layers import shape_shard
from testbed.ml.layers.shape_shard import ShapeShard, make_shard
from testbed.ml.layers.shard import Shard
from testbed.ml.method import Options, PlanningProblem
from testbed.ml.models import CATALOG, create
from testbed.work import WorkloadPart
from tests.helpers.training import sgd_config

MODEL = create("vgg5", {}, (3, 32, 32), 10)
ROUTED = create("yolov2", {}, (3, 32, 32), 80)


def both(model, first, last, momentum=0.9):
    training = sgd_config(learning_rate=0.1, momentum=momentum)
    return Shard(model, first, last, 7, training), ShapeShard(
        model, first, last, training
    )


def form(tensors):
    return {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }


def entering(model, first, samples=2):
    """What crosses the cut before a unit: one tensor as it is, several as one that is flat."""
    shapes = [shape for _, shape in model.crossing(first)]
    return torch.randn(
        samples, *(shapes[0] if len(shapes) == 1 else [sum(map(math.prod, shapes))])
    )


@pytest.mark.parametrize(
    ("model", "first", "last"), [(MODEL, 0, 2), (MODEL, 2, 5), (ROUTED, 20, 27)]
)
def test_outputs_and_gradients_have_the_same_shapes(model, first, last):
    real, shapes = both(model, first, last)
    inputs = entering(model, first)
    made, empty = real.forward(0, inputs), shapes.forward(0, inputs.to("meta"))
    assert empty.is_meta
    assert empty.shape == made.shape
    back, none = real.backward(0, torch.zeros_like(made)), shapes.backward(0, empty)
    assert (back is None) == (none is None)
    assert back is None or none.shape == back.shape
    assert shapes.infer(inputs.to("meta")).shape == made.shape


def test_state_has_the_same_tensors_with_momentum_after_the_first_update_only():
    real, shapes = both(MODEL, 0, 2)
    shapes_before = shapes.state()
    assert form(real.state()) == form(shapes_before)
    inputs = entering(MODEL, 0)
    real.backward(0, torch.zeros_like(real.forward(0, inputs)))
    real.update(0)
    shapes.update(0)
    assert form(real.state()) == form(shapes.state())
    assert len(shapes.state()) > len(shapes_before)


def test_state_and_load_preserve_momentum():
    _, shapes = both(MODEL, 0, 2)
    before = shapes.state()
    shapes.update(0)
    after = shapes.state()
    shapes.load(before)
    assert form(shapes.state()) == form(before)
    shapes.load(after)
    assert form(shapes.state()) == form(after)


def test_without_momentum_an_update_adds_nothing():
    _, shapes = both(MODEL, 0, 2, momentum=0.0)
    before = form(shapes.state())
    shapes.update(0)
    assert form(shapes.state()) == before


def test_versions_are_counted_as_with_numbers():
    real, shapes = both(MODEL, 0, 2)
    for version in (0, 1, 2):
        key = (version, 0)
        made = real.forward(key, entering(MODEL, 0), version)
        shapes.forward(key, entering(MODEL, 0).to("meta"), version)
        real.backward(key, torch.zeros_like(made))
        shapes.backward(key, None)
        for each in (real, shapes):
            each.advance(key, version, max(0, version - 1))
        assert shapes.versions.newest == real.versions.newest


def test_loss_is_nan_and_backward_has_the_shape_of_the_inputs():
    _, shapes = both(MODEL, 2, 5)
    inputs = entering(MODEL, 2).to("meta")
    assert math.isnan(shapes.forward_loss(0, inputs, torch.zeros(2), 2))
    assert shapes.backward(0).shape == inputs.shape


@pytest.mark.parametrize(("numerics", "kind"), [("full", Shard), ("none", ShapeShard)])
def test_timing_only_workloads_get_shape_shards(numerics, kind):
    keys = {
        "task": "train",
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "method": {"name": "single"},
    }
    workload = WorkloadPart.model_validate({**keys, "steps": 1, "numerics": numerics})
    assert (
        type(
            make_shard(
                PlanningProblem(
                    (DeviceSpec("a", 1e9, 1e9),),
                    {},
                    workload,
                    Options(),
                    seed=7,
                    model=MODEL,
                ),
                0,
                1,
                "a",
            )
        )
        is kind
    )


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_large_units_are_described_without_drawing_their_weights(name, monkeypatch):
    describe = shape_shard._describe_tensors.__wrapped__
    model = create(name, {}, (3, 64, 64), 10)
    units = range(len(model.units))
    described = [describe(model, unit, True) for unit in units]
    monkeypatch.setattr(shape_shard, "LARGE_UNIT", -1)
    monkeypatch.setattr(torch.Tensor, "uniform_", refuse_real_tensors)
    assert [describe(model, unit, True) for unit in units] == described


def refuse_real_tensors(tensor, *_, **__):
    assert tensor.is_meta
    return tensor
