"""The torch side of the layers; the one module here that imports torch at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from testbed.models.chain import Layer, Shape, shapes


class Sum(nn.Sequential):
    """Feeds each child the same input and adds what they return."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Sequential
        """Add the children's outputs, in their order."""
        first, *others = (child(input) for child in self)
        total = cast(torch.Tensor, first)
        for other in others:
            total = total + other
        return total


class ChannelMean(nn.Module):
    """The mean over height and width."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Module
        """Map (samples, channels, height, width) to (samples, channels)."""
        return input.mean((2, 3))


def sequence(layers: Sequence[Layer], shape: Shape, generator: torch.Generator) -> nn.Sequential:
    """Build layers one after the other, their weights drawn in that order."""
    entering = shapes(layers, shape)[:-1]
    return nn.Sequential(*(layer.build(size, generator) for layer, size in zip(layers, entering, strict=True)))
