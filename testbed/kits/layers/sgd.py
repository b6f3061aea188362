"""Stochastic gradient descent with momentum and weight decay, to the bit as ``torch.optim.SGD`` computes it.

Torch's own optimizers import its compiler when the first of them is made. Every device would pay that at its
start, and again when it comes back from the dead: 2 s of processor time and 800 modules for three lines of arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from testbed.workload import OptimizerPart

if TYPE_CHECKING:
    import torch


class Sgd:
    """Updates named parameters in place."""

    def __init__(self, settings: OptimizerPart) -> None:
        self._settings = settings
        self.momentum: dict[str, torch.Tensor] = {}
        """The running sum of gradients, by parameter; empty before the first step."""

    def step(self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Take one step along the gradients; a parameter without one stays as it is.

        With gradient g, decay d, momentum m and learning rate r: g += d w; b = m b + g (b = g at first); w -= r b.
        The decay is that of the parameters which are changed, whichever version the gradients were computed with.
        """
        import torch

        settings = self._settings
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = parameters[name]
                if settings.weight_decay:
                    gradient = gradient.add(parameter, alpha=settings.weight_decay)
                if settings.momentum:
                    running = self.momentum.get(name)
                    running = gradient.clone() if running is None else running.mul_(settings.momentum).add_(gradient)
                    self.momentum[name] = gradient = running
                parameter.add_(gradient, alpha=-settings.learning_rate)
