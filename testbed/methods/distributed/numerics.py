"""The arithmetic of parts of layers: pure functions of tensors, flat as (samples, elements) where they travel.

With W cut by output channels each device finishes its outputs; with W cut by input channels a device has sums that are
complete only together with the others', and bias, normalisation and activation must wait for that (Stahl et al.,
Sections 4.1 and 4.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from testbed.methods.distributed.ledger import Ledger
from testbed.methods.distributed.partition.network import Layer
from testbed.methods.distributed.partition.plan import Range, Tile
from testbed.methods.distributed.partition.slices import Slice
from testbed.methods.distributed.partition.tiles import padding
from testbed.methods.distributed.weights import NORMALISATION
from testbed.models.chain import Model
from testbed.models.layers import AveragePool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, shapes

Weights = Mapping[str, torch.Tensor]


class Part:
    """A part of one layer that is computed channel by channel: what its weights make, and the channels it finishes.

    Also of pooling, which has no weights and takes each channel by itself.
    """

    def __init__(self, model: Model, layer: Layer, weights: Weights, held: Slice) -> None:
        assert layer.place is not None
        self.layer = layer
        self._held = held
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._window: MaxPool2d | AveragePool2d | None = None
        self._follows: list[nn.Module | tuple[torch.Tensor, ...]] = []
        """Modules, and for each normalisation its running mean, running variance, scale and shift."""
        for number in range(layer.place.first, layer.place.last):
            description = model.units[layer.place.unit].layers[number]
            prefix = f"{layer.place.unit}.{number}."
            if isinstance(description, Conv2d | Linear):
                self._weight, self._bias = weights.get(prefix + "weight"), weights.get(prefix + "bias")
            elif isinstance(description, MaxPool2d | AveragePool2d):
                self._window = description
            elif isinstance(description, BatchNorm2d):
                if held.channels.size:
                    self._follows.append(tuple(weights[prefix + name] for name in NORMALISATION))
            elif not isinstance(description, Flatten):
                self._follows.append(description.build((1,), torch.Generator()).eval())

    def sums(self, inputs: torch.Tensor, taken: Range, made: Range) -> torch.Tensor:
        """Return what some input channels (``taken``) add to the output channels ``made``; both as the layer counts.

        ``inputs`` is (samples, elements) of the channels taken; so is the result of those made.
        """
        assert self._weight is not None
        weight = self._weight[
            made.first - self._held.rows.first : made.last - self._held.rows.first,
            taken.first - self._held.columns.first : taken.last - self._held.columns.first,
        ]
        if self.layer.kind == "fc":
            return functional.linear(inputs, weight)
        images = inputs.reshape(len(inputs), taken.size, *self.layer.input[1:])
        return functional.conv2d(images, weight, stride=self.layer.stride, padding=self.layer.padding).flatten(1)

    def finish(self, sums: torch.Tensor, made: Range) -> torch.Tensor:
        """Add the bias to complete sums of the output channels ``made``, normalise, activate. (samples, elements)."""
        part = slice(made.first - self._held.channels.first, made.last - self._held.channels.first)
        values = sums.reshape(len(sums), made.size, -1)
        if self._bias is not None:
            values = values + self._bias[part, None]
        for step in self._follows:
            if isinstance(step, nn.Module):
                values = step(values)
            else:
                mean, variance, scale, shift = (each[part] for each in step)
                values = functional.batch_norm(values, mean, variance, scale, shift)
        return values.flatten(1)

    def pool(self, inputs: torch.Tensor, made: Range) -> torch.Tensor:
        """Pool the channels ``made``, (samples, elements)."""
        assert self._window is not None
        images = inputs.reshape(len(inputs), made.size, *self.layer.input[1:])
        module = self._window.build(self.layer.input, torch.Generator())
        return self.finish(module(images).flatten(1), made)

    def tile(self, inputs: torch.Tensor, around: tuple[int, int, int, int]) -> torch.Tensor:
        """Compute all channels of a tile, (samples, channels, height, width), with so much padding around it.

        Padding is zeros, but nothing (-inf) for a maximum.
        """
        layer, every = self.layer, Range(0, self.layer.output_channels)
        maximum = isinstance(self._window, MaxPool2d)
        padded = functional.pad(inputs, around, value=-math.inf if maximum else 0.0)
        if self._window is not None:
            run = functional.max_pool2d if maximum else functional.avg_pool2d
            values = run(padded, layer.kernel, layer.stride)
        else:
            assert self._weight is not None
            values = functional.conv2d(padded, self._weight, stride=layer.stride, groups=layer.groups)
        return self.finish(values.flatten(1), every).reshape(values.shape)


class Whole:
    """Layers as they are, for a device that has all that enters them."""

    def __init__(self, model: Model, layer: Layer, weights: Weights) -> None:
        assert layer.place is not None
        place, unit = layer.place, model.units[layer.place.unit]
        entering = shapes(unit.layers, unit.input)
        self._shape = entering[place.first]
        self._modules = nn.Sequential()
        for number in range(place.first, place.last):
            module = unit.layers[number].build(entering[number], torch.Generator())
            prefix = f"{place.unit}.{number}."
            own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            module.load_state_dict(own, strict=False, assign=True)
            self._modules.append(module.eval())

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, both (samples, elements)."""
        outputs = self._modules(inputs.reshape(len(inputs), *self._shape))
        assert isinstance(outputs, torch.Tensor)
        return outputs.flatten(1)


def tile(parts: Sequence[Part], place: Tile, inputs: torch.Tensor, ledger: Ledger) -> torch.Tensor:
    """Compute the fused early layers of one tile, from (samples, channels, height, width) of its first region.

    The halo is within the regions; only at the border of a layer's map is there padding. What is held meanwhile is
    counted, beside ``inputs``.
    """
    values = inputs
    for part, region in zip(parts, place.regions[1:], strict=True):
        after = ledger.hold(part.tile(values, padding(part.layer, region)))
        if values is not inputs:
            ledger.drop(values)
        values = after
    ledger.drop(values)
    return values
