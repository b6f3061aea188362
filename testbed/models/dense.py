"""A fully connected layer, with a ReLU or without, and its gradients in closed form.

They are what autograd comes to, to round-off; for layers as small as those of one device, autograd takes longer than
the arithmetic. Imports torch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

    def gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of inputs, weight and bias from that of the outputs, (samples, neurons)."""
        sums = gradient * (self.outputs > 0) if self.rectified else gradient
        return sums @ self.weight, sums.T @ self.inputs, sums.sum(dim=0)


def is_dense(layer: GraphLayer) -> bool:
    """Say whether a layer is fully connected, and followed by a ReLU at most."""
    first, *others = layer.sequence or (None,)
    return isinstance(first, Linear) and others in ([], [ReLU()])


def forward(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rectified: bool) -> torch.Tensor:
    """Return the outputs, (samples, neurons), of inputs, (samples, inputs)."""
    sums = inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)
    return sums.relu_() if rectified else sums
