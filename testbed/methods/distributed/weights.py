"""The weights of a device and no others: its slices, drawn from the seed or cut from whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from testbed.methods.distributed.partition.flow import Flow
from testbed.methods.distributed.partition.network import Layer
from testbed.methods.distributed.partition.plan import Range
from testbed.methods.distributed.partition.slices import Slice, slices
from testbed.models.chain import Model
from testbed.models.layers import BatchNorm2d, Conv2d, Linear, bound, shapes
from testbed.seeds import derive

if TYPE_CHECKING:
    import torch

NORMALISATION = ("running_mean", "running_var", "weight", "bias")
"""Tensors of a normalisation, a value for each channel."""
BLOCK = 1 << 18
"""Values drawn at a time: what is not kept is gone before the next ones are drawn."""


def cut(flow: Flow, device: int, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a device's part of a whole state, under the same names; copies, so that the whole may go."""
    found: dict[str, torch.Tensor] = {}
    for held in slices(flow, device):
        layer = flow.network.layers[held.layer]
        for name, tensor in state.items():
            if _within(layer, name):
                part = _part(layer, held, name, tensor)
                if part is not None:
                    found[name] = part.clone()
    return found


def draw(flow: Flow, device: int, model: Model, seed: int) -> dict[str, torch.Tensor]:
    """Return the same as `cut` would of the model's first weights, never having more than a block of others."""
    found: dict[str, torch.Tensor] = {}
    layers = flow.network.layers
    for unit, group in groupby(slices(flow, device), key=lambda held: _unit(layers[held.layer])):
        found |= _drawn(model, unit, [(layers[held.layer], held) for held in group], seed)
    return found


def _drawn(model: Model, index: int, wanted: list[tuple[Layer, Slice]], seed: int) -> dict[str, torch.Tensor]:
    """Draw one unit's weights in the order in which `Model.build` does."""
    import torch

    unit = model.units[index]
    generator = torch.Generator().manual_seed(derive(seed, "weights", index))
    found: dict[str, torch.Tensor] = {}
    for number, (description, shape) in enumerate(zip(unit.layers, shapes(unit.layers, unit.input), strict=False)):
        prefix = f"{index}.{number}."
        pair = next(((layer, held) for layer, held in wanted if _within(layer, prefix)), None)
        if isinstance(description, Conv2d | Linear) and (pair is None or pair[0].splits):
            held = None if pair is None else pair[1]
            found |= _weights(prefix, description, shape, held, generator)
        elif isinstance(description, BatchNorm2d):
            if pair is not None:
                found |= _normalisation(prefix, pair[1].channels.size)
        else:
            state = description.build(shape, generator).state_dict()
            if pair is not None:
                found |= {prefix + name: tensor for name, tensor in state.items()}
    return found


def _weights(
    prefix: str, description: Conv2d | Linear, shape: tuple[int, ...], held: Slice | None, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draw all rows block by block, keep some columns of some of them."""
    import torch

    kernel = (description.kernel,) * 2 if isinstance(description, Conv2d) else ()
    rows = description.channels if isinstance(description, Conv2d) else description.features
    inputs = shape[0] // description.groups if isinstance(description, Conv2d) else shape[0]
    fan_in = description.weights(shape) // rows
    limit = bound(fan_in)
    kept = held.rows if held is not None else Range(0, 0)
    columns = held.columns if held is not None else Range(0, 0)
    weight = torch.empty(kept.size, columns.size, *kernel)
    each = max(1, BLOCK // fan_in)
    for first in range(0, rows, each):
        last = min(first + each, rows)
        block = torch.empty(last - first, inputs, *kernel).uniform_(-limit, limit, generator=generator)
        begin, end = max(first, kept.first), min(last, kept.last)
        if begin < end:
            weight[begin - kept.first : end - kept.first] = block[
                begin - first : end - first, columns.first : columns.last
            ]
    if held is None:
        return {}
    found = {prefix + "weight": weight} if weight.numel() else {}
    if description.bias and held.channels.size:
        found[prefix + "bias"] = torch.zeros(held.channels.size)
    return found


def _normalisation(prefix: str, channels: int) -> dict[str, torch.Tensor]:
    import torch

    if not channels:
        return {}
    zeros, ones = torch.zeros(channels), torch.ones(channels)
    return {prefix + name: value.clone() for name, value in zip(NORMALISATION, (zeros, ones, ones, zeros), strict=True)}


def _part(layer: Layer, held: Slice, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a slice of one tensor of a layer; None where nothing of it is needed."""
    if name.endswith(".num_batches_tracked"):
        return None
    if not by_channel(layer):
        return tensor
    if tensor.dim() > 1:
        part = tensor[held.rows.first : held.rows.last, held.columns.first : held.columns.last]
    else:
        part = tensor[held.channels.first : held.channels.last]
    return part if part.numel() else None


def by_channel(layer: Layer) -> bool:
    """Whether a device may have the layer channel by channel, as one weight tensor's rows and columns or by pooling."""
    return layer.splits or layer.kind == "pool"


def _unit(layer: Layer) -> int:
    assert layer.place is not None
    return layer.place.unit


def _within(layer: Layer, name: str) -> bool:
    """Say whether a tensor of the model's state belongs to a layer."""
    assert layer.place is not None
    unit, number, *_ = name.split(".")
    return int(unit) == layer.place.unit and layer.place.first <= int(number) < layer.place.last
