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
    """A linear layer with an adapter; weight and bias keep their names and values.

    >>> layer = AdaptedLinear(nn.Linear(64, 32), Lora(rank=4, alpha=8.0))
    >>> layer.lora_down.shape, layer.lora_up.shape
    (torch.Size([4, 64]), torch.Size([32, 4]))
    """

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        """Take weight and bias of a layer, and draw A as torch draws the weight of a linear layer."""
        # Not `nn.Linear.__init__`: a weight would be allocated, and random numbers drawn, to be thrown away.
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.scale = lora.alpha / lora.rank
        down = layer.weight.new_empty(lora.rank, layer.in_features)
        up = layer.weight.new_zeros(layer.out_features, lora.rank)
        self.lora_down = nn.Parameter(down)
        self.lora_up = nn.Parameter(up)
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, values: Tensor) -> Tensor:
        """Return the sum of layer and adapter, of shape (..., outputs), for inputs (..., inputs)."""
        # Through the rank first: the product of B and A would be as large as W.
        lowered = functional.linear(values, self.lora_down)
        adapted = functional.linear(lowered, self.lora_up)
        outputs = functional.linear(values, self.weight, self.bias)
        return outputs + self.scale * adapted


def adapt(network: nn.Module, lora: Lora) -> None:
    """Stop the training of all parameters of a network, and give adapters to linear layers.

    Raises `InputError` if no linear layer has one of the names, and for a rank that saves nothing.

    >>> network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> adapt(network, Lora(rank=4, alpha=8.0, modules=("0",)))
    >>> [name for name, each in network.named_parameters() if each.requires_grad]
    ['0.lora_down', '0.lora_up']
    """
    network.requires_grad_(requires_grad=False)
    layers = {}
    for name, module in network.named_modules():
        # Not its subclasses: MultiheadAttention reads the weight of its output projection without calling the layer.
        if type(module) is nn.Linear:
            layers[name] = module
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
    """Return whether a layer's name, or its last part, is wanted; an empty ``wanted`` takes all layers."""
    if not wanted or name in wanted:
        return True
    return any(name.endswith(f".{each}") for each in wanted)


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a ``state_dict`` belongs to an adapter.

    >>> is_adapter("layers.0.q_proj.lora_up")
    True
    """
    return name.endswith((DOWN, UP))


def first_values(name: str, empty: Tensor) -> Tensor:
    """Return the initial values of an adapter missing in a weights file, with the shape of ``empty``."""
    values = torch.zeros(empty.shape, dtype=empty.dtype)
    if name.endswith(DOWN):
        # As `kaiming_uniform_` with a = sqrt(5), but a function of the name: all devices draw the same.
        bound = 1 / math.sqrt(empty.shape[1])
        generator = torch.Generator().manual_seed(derive(0, "lora", name))
        values.uniform_(-bound, bound, generator=generator)
    return values
