"""A model as a graph of layers: what planners divide over devices by channels, neurons or pixels, and shards compute.

A layer here is what papers count as one: a convolution, fully connected layer or pooling with what follows it value by
value, its normalisation and activation. How it divides and what it counts are the formulas of
`testbed.ml.models.layers`; here they are put in relation to each other.
The symbols are those of Stahl et al., "Fully Distributed Deep Learning
Inference on Resource-Constrained Edge Devices": layer l has M input and K output elements, Q weights and R
multiplications. All figures are of one sample. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from testbed.device import Cost
from testbed.ml.models.chain import Model, Unit, joined
from testbed.ml.models.layers import Division, Layer, PixelWindow, shapes
from testbed.ml.models.making import CountedUnit
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT, Shape
from testbed.ml.models.slices import Channels, Slice


@dataclass(frozen=True)
class GraphLayer:
    """One layer that computes, and those after it that work value by value."""

    name: str
    sequence: tuple[Layer, ...]
    """The first is the one that computes. None at all: a route, which joins the channels of its sources."""
    input: Shape
    """(channels, height, width) or (features,); of a route, the concatenation of all that enters. Flattening does not
    show: a fully connected layer after a feature map takes the map."""
    sources: tuple[int, ...]
    """Indices of the layers whose outputs enter; `INPUT` is what enters the model."""
    unit: int = 0
    """Index of its unit in the model."""
    modules: tuple[str, ...] = ()
    """Names of the layers' modules in their unit, but for those of a pooling that was added."""
    flattens: bool = False
    """Whether what enters is flattened first."""

    @property
    def names(self) -> tuple[str, ...]:
        """What `Model.build` calls the layers."""
        return tuple(f"{self.unit}.{name}" if name else str(self.unit) for name in self.modules)

    @cached_property
    def entering(self) -> Shape:
        """Shape that the first layer takes."""
        return (math.prod(self.input),) if self.flattens else self.input

    @cached_property
    def output(self) -> Shape:
        """Shape that leaves."""
        return shapes(self.sequence, self.entering)[-1]

    @cached_property
    def inputs(self) -> int:
        """M: elements that enter."""
        return math.prod(self.input)

    @cached_property
    def outputs(self) -> int:
        """K: elements that leave."""
        return math.prod(self.output)

    @cached_property
    def pixels(self) -> int:
        """Elements of one output channel."""
        return math.prod(self.output[1:])

    @property
    def output_channels(self) -> int:
        """Output channels of a convolution, output features of a fully connected layer."""
        return self.output[0]

    @cached_property
    def input_channels(self) -> int:
        """What of the input one column of the weights is for: a channel of a convolution, an element of the others."""
        return self._weight_shape[1] if self._weight_shape else self.input[0]

    @cached_property
    def _weight_shape(self) -> Shape:
        return self.sequence[0].weight_shape(self.entering) if self.sequence else ()

    @cached_property
    def division(self) -> Division:
        """How several devices can share it."""
        return self.sequence[0].division if self.sequence else "moves"

    @property
    def joins(self) -> bool:
        """Whether it is a route."""
        return not self.sequence

    @property
    def splits(self) -> bool:
        """Whether its weights can be divided by output and by input channels."""
        return self.division == "weights"

    @property
    def by_channel(self) -> bool:
        """Whether it makes each output channel of one input channel."""
        return self.division == "channels"

    @cached_property
    def window(self) -> PixelWindow | None:
        """What a pixel that leaves sees of those that enter, for tiles; None where that is no window."""
        return self.sequence[0].window if self.sequence else None

    @cached_property
    def weights(self) -> int:
        """Q: without biases. Parameters that do not lie by channel all count as weights."""
        if not self.sequence:
            return 0
        first = self.sequence[0]
        return first.weights(self.entering) if first.channel_values else first.parameters(self.entering)

    @cached_property
    def multiplications(self) -> int:
        """R: with the weights."""
        return int(self.sequence[0].flops(self.entering)) // 2 if self.sequence else 0

    @cached_property
    def channel_values(self) -> int:
        """Values kept for each output channel beside the weights: a bias, a normalisation."""
        return sum(layer.channel_values for layer in self.sequence)

    @property
    def parameters(self) -> int:
        """Everything that is stored: weights and what is kept for each channel."""
        return self.weights + self.channel_values * self.output[0]

    @cached_property
    def whole(self) -> Slice:
        """The slice that is all of it."""
        return Slice(range(self.output_channels), range(self.input_channels), range(self.output_channels))

    @cached_property
    def summed(self) -> Shape:
        """Shape that leaves the first layer, before what follows it."""
        return self.sequence[0].output(self.entering)

    def by_outputs(self, channels: Channels) -> Slice:
        """Return the slice that makes some output channels from all of the input."""
        return Slice(channels, self.whole.columns, channels)

    def by_inputs(self, columns: Channels, channels: Channels | None = None) -> Slice:
        """Return the slice of all channels' sums from some input channels, that finishes ``channels``; None: all."""
        return Slice(self.whole.rows, columns, self.whole.channels if channels is None else channels)

    def with_pool(self, pool: GraphLayer) -> GraphLayer:
        """Return it with a pooling behind it, without parameters, which whoever finishes a channel does as well."""
        return replace(self, sequence=(*self.sequence, *pool.sequence))

    def product_cost(self, read: int, channels: int) -> Cost:
        """Return what its first layer is charged for one sample: from ``read`` elements of the input to some channels.

        FLOPs and weights are divided as the matrix is; all that is read and made is counted.
        """
        if not self.sequence:
            return Cost()
        whole, divided = self.inputs * self.output_channels, read * channels
        return Cost(
            2 * self.multiplications * divided / whole,
            BYTES_PER_VALUE * (read + channels * math.prod(self.summed[1:])),
            BYTES_PER_VALUE * self.weights * divided / whole,
            self.sequence[0].kind,
        )

    def finish_cost(self, channels: int) -> Cost:
        """Return what the layers after the first are charged for some channels of one sample."""
        found, shape = Cost(), self.summed if self.sequence else ()
        for layer in self.sequence[1:]:
            found += layer.cost(shape) * (channels / self.output_channels)
            shape = layer.output(shape)
        return found

    def cost(self, read: int, channels: int) -> Cost:
        """Return what all of its layers are charged for some channels of one sample."""
        return self.product_cost(read, channels) + self.finish_cost(channels)

    def share(self, values: int, part: Slice) -> int:
        """Return how many of its ``values``, all weights or all multiplications, are in a slice."""
        return values * len(part.rows) * len(part.columns) // (self.output_channels * self.input_channels)


@dataclass(frozen=True)
class Graph:
    """Layers in an order in which they can be computed; the last one's output is the result."""

    name: str
    layers: tuple[GraphLayer, ...]

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            sources = layer.sources
            if not sources or not all(INPUT <= source < index for source in sources):
                raise ValueError(f"layer {index} ({layer.name}) takes the outputs of {sources}, not of earlier ones")
            arriving = sum(self.outputs_of(source) for source in sources)
            if sources != (INPUT,) and arriving != layer.inputs:
                raise ValueError(f"layer {index} ({layer.name}) takes {layer.inputs} elements, but {arriving} arrive")

    def outputs_of(self, index: int) -> int:
        """Return the elements that leave a layer, or that enter the model for `INPUT`."""
        return self.layers[0].inputs if index == INPUT else self.layers[index].outputs

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, those that take its output."""
        return tuple(
            tuple(reader for reader, layer in enumerate(self.layers) if index in layer.sources)
            for index in range(len(self.layers))
        )

    def follows(self, index: int) -> bool:
        """Whether a layer takes the output of the one before it in the list and nothing else.

        Only then may what a device holds of that output be used again: pooling and routing in between happen at the
        source (Stahl et al., Section 5: such layers are counted but not partitioned).
        """
        return index > 0 and self.layers[index].sources == (index - 1,)

    def fuses(self, index: int) -> bool:
        """Whether it can be the first of a fused pair: both split, and nothing else needs what is between them."""
        return (
            index + 1 < len(self.layers)
            and self.layers[index].splits
            and self.layers[index + 1].splits
            and self.follows(index + 1)
            and self.readers[index] == (index + 1,)
        )

    @cached_property
    def weights(self) -> int:
        """Q of all layers together."""
        return sum(layer.weights for layer in self.layers)

    @property
    def multiplications(self) -> int:
        """R of all layers together."""
        return sum(layer.multiplications for layer in self.layers)


def graph_of(model: Model) -> Graph:
    """Describe a model by its layers.

    A unit that reads several others begins with a route, and one without layers is one. A unit of one's own network
    that is no row of layers is one layer, which is computed as a whole.
    """
    found: list[GraphLayer] = []
    made = {INPUT: INPUT}
    for index, given in enumerate(model.units):
        unit, names = _looked_into(model, index, given)
        sources = tuple(made[read] for read in model.reads(index))
        arriving = unit.input
        if len(sources) == 1 and sources[0] != INPUT:
            # A map that the unit before flattens arrives as it was.
            arriving = found[sources[0]].output
        described = [*_described(index, unit, names, sources, len(found), arriving)]
        found += described
        made[index] = len(found) - 1 if described else sources[0]
    return Graph(model.name, tuple(found))


def _looked_into(model: Model, index: int, unit: Unit) -> tuple[Unit, tuple[str, ...]]:
    """Return a unit with its layers described, and the names of their modules in it."""
    counted = unit.layers[0] if unit.layers else None
    if not isinstance(counted, CountedUnit):
        return unit, tuple(map(str, range(len(unit.layers))))
    if counted.described:
        layers = tuple(layer for _, layer in counted.described)
        entering = joined([model.made(read) for read in model.reads(index)])
        return replace(unit, layers=layers, input=entering), tuple(name or "-" for name, _ in counted.described)
    return replace(unit, layers=(replace(counted, make=partial(model.whole, index)),)), ("",)


def _described(
    index: int, unit: Unit, names: Sequence[str], sources: tuple[int, ...], first: int, shape: Shape
) -> Iterator[GraphLayer]:
    """Yield a unit's layers; ``first`` is the index of the first of them in the graph, ``shape`` what enters it."""
    entering = shapes(unit.layers, unit.input)
    for place, numbers in enumerate(_runs(unit, len(sources) > 1)):
        layer = GraphLayer(
            name=f"{unit.name}.{place}" if place else unit.name,
            sequence=tuple(unit.layers[number] for number in numbers),
            input=shape,
            sources=(first + place - 1,) if place else sources,
            unit=index,
            modules=tuple(names[number] for number in numbers),
            flattens=bool(numbers) and len(entering[numbers[0]]) < len(shape),
        )
        shape = layer.output
        yield layer


def _runs(unit: Unit, joins: bool) -> list[list[int]]:
    """Return the places of what each layer of a unit consists of; of a route nothing."""
    runs: list[list[int]] = [[]] if joins or not unit.layers else []
    for number, layer in enumerate(unit.layers):
        if layer.division == "values" and runs and runs[-1]:
            runs[-1].append(number)
        elif layer.division != "flattens":
            runs.append([number])
    return runs
