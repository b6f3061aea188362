"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021).

A linear layer with weight W of shape (outputs, inputs) computes ``x W' + (alpha / rank) x A' B'``. W stays as it is;
A of shape (rank, inputs) and B of shape (outputs, rank) are trained. B begins with zeros, so an adapted network begins
as the network without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.common.seeds import derive

KEY = ("training", "lora")
"""Key of a scenario's workload that errors about adapters name."""
DOWN, UP = "lora_down", "lora_up"
"""Names of A and B beside ``weight`` and ``bias``."""


@dataclass(frozen=True)
class Lora:
    """How a network is adapted."""

    rank: int
    alpha: float
    modules: tuple[str, ...] = ()
    """Names of linear layers, or their last parts such as ``q_proj``; empty: all linear layers."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; weight and bias keep their names and values."""

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        """Take weight and bias of a layer, and draw A as torch draws the weight of a linear layer."""
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.scale = lora.alpha / lora.rank
        self.lora_down = nn.Parameter(
            layer.weight.new_empty(lora.rank, layer.in_features)
        )
        self.lora_up = nn.Parameter(
            layer.weight.new_zeros(layer.out_features, lora.rank)
        )
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, values: Tensor) -> Tensor:
        """Return the sum of layer and adapter, of shape (..., outputs), for inputs (..., inputs)."""
        adapted = functional.linear(
            functional.linear(values, self.lora_down), self.lora_up
        )
        return functional.linear(values, self.weight, self.bias) + self.scale * adapted


def adapt(network: nn.Module, lora: Lora) -> None:
    """Stop the training of all parameters of a network, and give adapters to linear layers.

    Raises `InputError` where no linear layer has one of the names, and for a rank that saves nothing.
    """
    network.requires_grad_(requires_grad=False)
    layers = {
        name: layer
        for name, layer in network.named_modules()
        if type(layer) is nn.Linear
    }
    chosen = [name for name in layers if _is_named(name, lora.modules)]
    if not chosen:
        known = ", ".join(layers) or "none"
        raise InputError(
            f"no linear layer has one of these names; the network has {known}",
            (*KEY, "modules"),
        )
    for name in chosen:
        layer = layers[name]
        smaller = min(layer.in_features, layer.out_features)
        if lora.rank >= smaller:
            raise InputError(
                f"a rank of {lora.rank} does not reduce {name}, which has {layer.in_features} inputs and "
                f"{layer.out_features} outputs: use a rank below {smaller}, or name other modules",
                (*KEY, "rank"),
            )
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, AdaptedLinear(layer, lora))


def _is_named(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(
        name == each or name.endswith(f".{each}") for each in wanted
    )


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a ``state_dict`` belongs to an adapter."""
    return name.endswith((DOWN, UP))


def first_values(name: str, empty: Tensor) -> Tensor:
    """Return the initial values of an adapter missing in a weights file, with the shape of ``empty``."""
    values = torch.zeros(empty.shape, dtype=empty.dtype)
    if name.endswith(DOWN):
        bound = 1 / math.sqrt(empty.shape[1])
        values.uniform_(
            -bound,
            bound,
            generator=torch.Generator().manual_seed(derive(0, "lora", name)),
        )
    return values
