"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021).

With an adapter, a linear layer with weight W, (outputs, inputs), and a bias b computes
``x W' + b + (alpha / rank) x A' B'``. W and b are not trained. A, (rank, inputs), and B, (outputs, rank), are the
adapter, and are trained. B begins with zeros, so the network begins with the outputs that it has without adapters.
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

LORA_KEY = ("training", "lora")
"""Key in a scenario's workload to which errors about adapters refer."""
DOWN, UP = "lora_down", "lora_up"
"""Names of A and B as parameters of a layer, beside ``weight`` and ``bias``."""


@dataclass(frozen=True)
class Lora:
    """Rank and scale of adapters, and the adapted layers."""

    rank: int
    alpha: float
    """Numerator of the scale ``alpha / rank`` of an adapter's output."""
    modules: tuple[str, ...] = ()
    """Names of linear layers, or the last parts of names such as ``q_proj``; empty for all linear layers."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; weight and bias keep their names and values.

    >>> layer = AdaptedLinear(nn.Linear(64, 32), Lora(rank=4, alpha=8.0))
    >>> layer.lora_down.shape, layer.lora_up.shape
    (torch.Size([4, 64]), torch.Size([32, 4]))
    """

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        """Use the weight and bias of ``layer``, and draw A as torch draws the weight of a linear layer."""
        # Not `nn.Linear.__init__`, which would allocate and draw another weight.
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
        # A first, then B: the product of both matrices would be as large as W.
        rank_values = functional.linear(values, self.lora_down)
        adapter_outputs = functional.linear(rank_values, self.lora_up)
        outputs = functional.linear(values, self.weight, self.bias)
        return outputs + self.scale * adapter_outputs


def adapt(network: nn.Module, lora: Lora) -> None:
    """Turn off `requires_grad` of all parameters of a network, and replace linear layers by layers with adapters.

    Raises `InputError` if no linear layer has one of the names of ``lora``, and for a rank that saves nothing.

    >>> network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> adapt(network, Lora(rank=4, alpha=8.0, modules=("0",)))
    >>> [name for name, each in network.named_parameters() if each.requires_grad]
    ['0.lora_down', '0.lora_up']
    """
    network.requires_grad_(requires_grad=False)
    layers = {}
    for name, module in network.named_modules():
        # Without subclasses: MultiheadAttention reads the weight of its output projection, a subclass, without calling
        # the layer.
        if type(module) is nn.Linear:
            layers[name] = module
    chosen_names = [name for name in layers if _is_named(name, lora.modules)]
    if not chosen_names:
        layer_names = ", ".join(layers) or "none"
        raise InputError(
            f"no linear layer has one of these names; the network has {layer_names}",
            (*LORA_KEY, "modules"),
        )
    for name in chosen_names:
        layer = layers[name]
        smaller_side = min(layer.in_features, layer.out_features)
        if lora.rank >= smaller_side:
            raise InputError(
                f"a rank of {lora.rank} does not reduce {name}, which has {layer.in_features} inputs and "
                f"{layer.out_features} outputs: use a rank below {smaller_side}, or name other modules",
                (*LORA_KEY, "rank"),
            )
        parent, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(parent), attribute, AdaptedLinear(layer, lora))


def _is_named(layer_name: str, names: Sequence[str]) -> bool:
    """Return whether a layer's name, or the end of the name, is among ``names``, or ``names`` is empty."""
    if not names or layer_name in names:
        return True
    return any(layer_name.endswith(f".{name}") for name in names)


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a ``state_dict`` belongs to an adapter.

    >>> is_adapter("layers.0.q_proj.lora_up")
    True
    """
    return name.endswith((DOWN, UP))


def initial_values(name: str, model_tensor: Tensor) -> Tensor:
    """Return the initial values of an adapter's tensor missing from a weights file.

    ``model_tensor`` has the shape and type of the tensor.
    """
    values = torch.zeros(model_tensor.shape, dtype=model_tensor.dtype)
    if name.endswith(DOWN):
        # The distribution of `kaiming_uniform_` with a = sqrt(5), but with a seed from the name: all devices draw the
        # same values.
        bound = 1 / math.sqrt(model_tensor.shape[1])
        generator = torch.Generator().manual_seed(derive(0, "lora", name))
        values.uniform_(-bound, bound, generator=generator)
    return values
