"""Fully connected layers in closed form, against torch's layers and autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from testbed.ml.models import create
from testbed.ml.models.graph import graph_of
from testbed.ml.models.sliced import DenseGradients, dense_forward, is_dense


@given(
    samples=st.integers(1, 5),
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 6),
    has_bias=st.booleans(),
    has_relu=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_dense_layer_has_outputs_and_gradients_of_autograd(
    samples: int, inputs: int, outputs: int, has_bias: bool, has_relu: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        # Doubles, so that the order of a sum matters less than the tolerance.
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values = draw(samples, inputs)
    weight = draw(outputs, inputs)
    bias = draw(outputs) if has_bias else None
    gradient = draw(samples, outputs)

    result = dense_forward(values, weight, bias, has_relu=has_relu)
    gradients = DenseGradients(values, weight, result, has_relu)
    sums = gradients.sum_gradient(gradient)
    parameter_gradients = gradients.parameter_gradients(sums)

    leaves = [values.clone().requires_grad_(), weight.clone().requires_grad_()]
    if bias is not None:
        leaves.append(bias.clone().requires_grad_())
    expected = functional.linear(*leaves)
    if has_relu:
        expected = functional.relu(expected)
    autograd = torch.autograd.grad(expected, leaves, gradient)

    torch.testing.assert_close(result, expected.detach())
    torch.testing.assert_close(gradients.input_gradient(sums), autograd[0])
    torch.testing.assert_close(parameter_gradients[0], autograd[1])
    if has_bias:
        torch.testing.assert_close(parameter_gradients[1], autograd[2])


@pytest.mark.parametrize(
    ("name", "options", "dense"),
    [
        ("mlp", {"hidden": [4]}, [True, True]),
        # Three convolutions before the fully connected layers.
        (
            "cnn",
            {"channels": [2, 2, 2], "hidden": [4]},
            [False, False, False, True, True],
        ),
    ],
)
def test_dense_layers_are_fully_connected_with_at_most_relu(
    name: str, options: dict, dense: list[bool]
) -> None:
    graph = graph_of(create(name, options, (1, 8, 8), 3))
    weighted = [layer for layer in graph.layers if layer.weights]
    assert [is_dense(layer) for layer in weighted] == dense
