"""From a model of the catalogue to what the distributed planners look at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from testbed.methods.distributed.partition.network import Layer, Network, Place
from testbed.models import layers
from testbed.models.chain import Model, Unit
from testbed.models.layers import (
    AveragePool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    ReLU,
    Reorganise,
)
from testbed.models.shapes import INPUT, Shape

_ELEMENTWISE = (ReLU, LeakyReLU, Dropout, BatchNorm2d)
_NORMALISATION = 4
"""Values a channel: scale, shift, running mean and variance."""


def network_of(model: Model) -> Network:
    """Describe a model: each convolution, fully connected layer and pooling with what follows it element by element.

    Flattening belongs to no place: a fully connected layer takes whatever enters it flattened. A unit that reads
    several others begins with a route, and one without layers is one.
    """
    found: list[Layer] = []
    made: dict[int, int] = {INPUT: -1}
    for index, unit in enumerate(model.units):
        sources = tuple(made[read] for read in model.reads(index))
        found += _described(index, unit, sources, len(found), found[sources[0]].output if sources[0] >= 0 else None)
        made[index] = len(found) - 1
    return Network(model.name, tuple(found))


@dataclass
class _Row:
    """The layers of a unit, one after the other."""

    unit: int
    name: str
    sources: tuple[int, ...]
    shape: Shape
    """That arrives at the next layer, flattening not counted."""
    first: int
    """Index of the first of these layers in the network."""
    layers: list[Layer] = field(default_factory=list)

    def add(self, layer: Layer) -> None:
        sources = (self.first + len(self.layers) - 1,) if self.layers else self.sources
        name = self.name if not self.layers else f"{self.name}.{len(self.layers)}"
        self.layers.append(replace(layer, name=name, sources=sources))
        self.shape = layer.output

    def extend(self, channelwise: int, last: int) -> None:
        """Let the last layer reach up to ``last``, which it follows element by element."""
        layer = self.layers[-1]
        assert layer.place is not None
        place = replace(layer.place, last=last)
        self.layers[-1] = replace(layer, channelwise=layer.channelwise + channelwise, place=place)


def _described(index: int, unit: Unit, sources: tuple[int, ...], first: int, arriving: Shape | None) -> Iterator[Layer]:
    shape = unit.input if len(sources) > 1 or arriving is None else arriving
    row = _Row(index, unit.name, sources, shape, first)
    if len(sources) > 1 or not unit.layers:
        row.add(Layer("", "route", unit.input, unit.input, sources, place=Place(index, 0, 0)))
    for at, layer in enumerate(unit.layers):
        if isinstance(layer, Flatten):
            continue
        if isinstance(layer, _ELEMENTWISE) and row.layers and row.layers[-1].kind != "route":
            row.extend(_NORMALISATION * isinstance(layer, BatchNorm2d), at + 1)
        else:
            row.add(_plain(layer, row.shape, Place(index, at, at + 1)))
    yield from row.layers


def _plain(layer: layers.Layer, shape: Shape, place: Place) -> Layer:
    """Describe one layer that stands by itself; its name and sources are filled in by the row."""
    if isinstance(layer, Linear):
        weights = layer.weights((math.prod(shape),))
        return Layer("", "fc", shape, (layer.features,), (), weights, weights, int(layer.bias), place=place)
    output, weights = layer.output(shape), layer.weights(shape)
    work = int(layer.flops(shape)) // 2
    if isinstance(layer, Conv2d):
        window = (layer.kernel, layer.stride, layer.padding, layer.groups)
        return Layer("", "conv", shape, output, (), weights, work, int(layer.bias), *window, place)
    if isinstance(layer, MaxPool2d | AveragePool2d):
        window = (layer.kernel, layer.stride or layer.kernel, layer.padding, 1)
        return Layer("", "pool", shape, output, (), 0, 0, 0, *window, place)
    if isinstance(layer, Reorganise):
        return Layer("", "reorg", shape, output, (), place=place)
    if isinstance(layer, BatchNorm2d):
        return Layer("", "other", shape, output, (), channelwise=_NORMALISATION, place=place)
    # A block computed as one: its parameters that are no weights do not lie by channel, so all count as weights.
    return Layer("", "other", shape, output, (), layer.parameters(shape), work, place=place)
