"""Fully connected layers in closed form against torch's own layers and autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from testbed.ml.models import create
from testbed.ml.models.graph import graph_of
from testbed.ml.models.sliced import DenseStep, dense_forward, is_dense

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))


@given(SIZES, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_outputs_and_gradients_are_those_of_autograd(
    sizes, biased: bool, rectified: bool, seed: int
) -> None:
    samples, entering, leaving = sizes
    draw = torch.Generator().manual_seed(seed)
    inputs, weight, bias, gradient = (
        torch.randn(size, generator=draw, dtype=torch.float64)
        for size in (
            (samples, entering),
            (leaving, entering),
            (leaving,),
            (samples, leaving),
        )
    )
    given_bias = bias if biased else None
    outputs = dense_forward(inputs, weight, given_bias, rectified=rectified)
    step = DenseStep(inputs, weight, outputs, rectified)
    leaves = [each.clone().requires_grad_() for each in (inputs, weight, bias)]
    expected = functional.linear(leaves[0], leaves[1], leaves[2] if biased else None)
    expected = functional.relu(expected) if rectified else expected
    torch.testing.assert_close(outputs, expected.detach())
    of_inputs, of_weight, of_bias = torch.autograd.grad(
        expected, leaves, gradient, allow_unused=True
    )
    sums = step.of_sums(gradient)
    torch.testing.assert_close(step.of_inputs(sums), of_inputs)
    mine = step.of_parameters(sums)
    torch.testing.assert_close(mine[0], of_weight)
    if biased:
        torch.testing.assert_close(mine[1], of_bias)


@pytest.mark.parametrize(
    ("name", "options", "dense"),
    [
        ("mlp", {"hidden": [4]}, [True, True]),
        (
            "cnn",
            {"channels": [2, 2, 2], "hidden": [4]},
            [False, False, False, True, True],
        ),
    ],
)
def test_dense_layers_are_fully_connected_with_at_most_a_relu(
    name: str, options: dict, dense: list[bool]
) -> None:
    found = [
        is_dense(layer)
        for layer in graph_of(create(name, options, (1, 8, 8), 3)).layers
        if layer.weights
    ]
    assert found == dense
