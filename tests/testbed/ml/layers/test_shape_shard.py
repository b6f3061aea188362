"""Shards of timing-only runs, whose tensors have shapes but no values, against shards with values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from testbed.hardware import DeviceSpec
from testbed.ml.layers import shape_shard
from testbed.ml.layers.shape_shard import ShapeShard, make_shard
from testbed.ml.layers.shard import Shard
from testbed.ml.method import Options, PlanningProblem
from testbed.ml.models import CATALOG, Model, create
from testbed.work import WorkloadPart
from tests.helpers.training import sgd_config

MODEL = create("vgg5", {}, (3, 32, 32), 10)
ROUTED = create("yolov2", {}, (3, 32, 32), 80)


def make_shards(
    model: Model, first: int, last: int, momentum: float = 0.9
) -> tuple[Shard, ShapeShard]:
    training = sgd_config(learning_rate=0.1, momentum=momentum)
    shard = Shard(model, first, last, 7, training)
    return shard, ShapeShard(model, first, last, training)


def shapes_and_types(
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    described = {}
    for name, tensor in tensors.items():
        described[name] = (tuple(tensor.shape), tensor.dtype)
    return described


def draw_inputs(model: Model, first: int) -> torch.Tensor:
    """Draw two samples for a unit; if several tensors cross the cut, each sample is flat."""
    shapes = [shape for _, shape in model.crossing_tensors(first)]
    if len(shapes) == 1:
        return torch.randn(2, *shapes[0])
    return torch.randn(2, sum(map(math.prod, shapes)))


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [(MODEL, 0, 2), (MODEL, 2, 5), (ROUTED, 20, 27)],
    ids=["first-stage", "last-stage", "stage-with-routes"],
)
def test_outputs_and_gradients_have_shapes_of_shard(
    model: Model, first: int, last: int
) -> None:
    shard, shape_only = make_shards(model, first, last)
    inputs = draw_inputs(model, first)
    shapes = inputs.to("meta")
    outputs = shard.forward(0, inputs)
    output_shapes = shape_only.forward(0, shapes)
    assert output_shapes.is_meta
    assert output_shapes.shape == outputs.shape
    gradient = shard.backward(0, torch.zeros_like(outputs))
    gradient_shapes = shape_only.backward(0, output_shapes)
    if gradient is None:
        # The first stage has no gradient of its inputs.
        assert gradient_shapes is None
    else:
        assert gradient_shapes.shape == gradient.shape
    assert shape_only.infer(shapes).shape == outputs.shape


def test_momentum_appears_in_state_after_first_update() -> None:
    shard, shape_only = make_shards(MODEL, 0, 2)
    initial = shape_only.state()
    assert shapes_and_types(shard.state()) == shapes_and_types(initial)
    outputs = shard.forward(0, draw_inputs(MODEL, 0))
    shard.backward(0, torch.zeros_like(outputs))
    shard.update(0)
    shape_only.update(0)
    assert shapes_and_types(shard.state()) == shapes_and_types(shape_only.state())
    assert len(shape_only.state()) > len(initial)


def test_loaded_state_has_or_lacks_momentum() -> None:
    _, shape_only = make_shards(MODEL, 0, 2)
    without_momentum = shape_only.state()
    shape_only.update(0)
    with_momentum = shape_only.state()
    for state in (without_momentum, with_momentum):
        shape_only.load(state)
        assert shapes_and_types(shape_only.state()) == shapes_and_types(state)


def test_update_without_momentum_adds_no_state() -> None:
    _, shape_only = make_shards(MODEL, 0, 2, momentum=0.0)
    before = shapes_and_types(shape_only.state())
    shape_only.update(0)
    assert shapes_and_types(shape_only.state()) == before


def test_versions_are_counted_as_in_shard() -> None:
    shard, shape_only = make_shards(MODEL, 0, 2)
    for version in (0, 1, 2):
        key = (version, 0)
        inputs = draw_inputs(MODEL, 0)
        outputs = shard.forward(key, inputs, version)
        shape_only.forward(key, inputs.to("meta"), version)
        shard.backward(key, torch.zeros_like(outputs))
        shape_only.backward(key, None)
        oldest_needed = max(0, version - 1)
        shard.advance(key, version, oldest_needed)
        shape_only.advance(key, version, oldest_needed)
        assert shape_only.versions.newest == shard.versions.newest


def test_loss_is_nan_and_gradient_has_shape_of_inputs() -> None:
    _, shape_only = make_shards(MODEL, 2, 5)
    inputs = draw_inputs(MODEL, 2).to("meta")
    assert math.isnan(shape_only.forward_loss(0, inputs, torch.zeros(2), 2))
    assert shape_only.backward(0).shape == inputs.shape


@pytest.mark.parametrize(
    ("numerics", "expected"), [("full", Shard), ("none", ShapeShard)]
)
def test_numerics_select_kind_of_shard(numerics: str, expected: type) -> None:
    keys = {
        "task": "train",
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "method": {"name": "single"},
        "steps": 1,
        "numerics": numerics,
    }
    workload = WorkloadPart.model_validate(keys)
    device = DeviceSpec("a", 1e9, 1e9)
    problem = PlanningProblem((device,), {}, workload, Options(), seed=7, model=MODEL)
    assert type(make_shard(problem, 0, 1, "a")) is expected


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_large_units_are_described_without_drawing_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the cache of the function.
    describe = shape_shard._describe_tensors.__wrapped__
    model = create(name, {}, (3, 64, 64), 10)
    units = range(len(model.units))
    expected = [describe(model, unit, with_frozen=True) for unit in units]

    def reject_values(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert tensor.is_meta
        return tensor

    # Every unit counts as large.
    monkeypatch.setattr(shape_shard, "LARGE_UNIT", -1)
    monkeypatch.setattr(torch.Tensor, "uniform_", reject_values)
    assert [describe(model, unit, with_frozen=True) for unit in units] == expected
