"""A fully connected layer, with a ReLU or without, and its gradients in closed form.

They are what autograd comes to, to round-off; for layers as small as those of one device, autograd takes longer than
the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.common.lazy import torch
from testbed.models.graph import GraphLayer
from testbed.models.layers import Linear, ReLU


@dataclass(frozen=True)
class DenseStep:
    """One forward that waits for its gradient."""

    inputs: torch.Tensor
    """(samples, inputs)."""
    weight: torch.Tensor
    """(neurons, inputs)."""
    outputs: torch.Tensor
    """(samples, neurons)."""
    rectified: bool

    def of_sums(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of what the ReLU gets from that of the outputs, both (samples, neurons)."""
        return gradient * (self.outputs > 0) if self.rectified else gradient

    def of_inputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs, (samples, inputs), from `of_sums`."""
        return sums @ self.weight

    def of_parameters(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight, (neurons, inputs), and bias, (neurons,), from `of_sums`."""
        return sums.T @ self.inputs, sums.sum(dim=0)


def is_dense(layer: GraphLayer) -> bool:
    """Say whether a layer is fully connected, and followed by a ReLU at most."""
    first, *others = layer.sequence or (None,)
    return isinstance(first, Linear) and others in ([], [ReLU()])


def forward(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rectified: bool) -> torch.Tensor:
    """Return the outputs, (samples, neurons), of inputs, (samples, inputs)."""
    sums = inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)
    return sums.relu_() if rectified else sums
