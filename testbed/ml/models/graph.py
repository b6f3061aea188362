"""A model as a graph of layers, which planners divide by channels, neurons or pixels.

A layer is counted as in papers: a convolution, fully connected layer or pooling (the main layer) together with the
following normalisation and activation. `testbed.ml.models.layers` has the formulas of single layers; this module
relates the layers to each other. In contrast to a chain of units, the graph knows the inside of a unit.

The symbols are those of Stahl et al., "Fully Distributed Deep Learning Inference on Resource-Constrained Edge Devices":
layer l has M input and K output elements, Q weights and R multiplications. All quantities are per sample. Torch is not
required.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from testbed.device import Cost
from testbed.ml.models.chain import Model, Unit, joined_shape
from testbed.ml.models.layers import Division, Layer, PixelWindow, shapes_through
from testbed.ml.models.making import CountedUnit
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT, Shape
from testbed.ml.models.slices import Channels, Slice


@dataclass(frozen=True)
class GraphLayer:
    """One main layer and the element-wise layers after it; or a route, which only joins the outputs of other layers."""

    name: str
    sequence: tuple[Layer, ...]
    """The layers; the first one is the main layer. Empty for a route, which joins the channels of its sources."""
    input: Shape
    """(channels, height, width) or (features,); for a route, the concatenation of all inputs. Flattening does not show:
    the input of a fully connected layer after a feature map is the map."""
    sources: tuple[int, ...]
    """Indices of the layers read; `INPUT` is the model's input."""
    unit: int = 0
    """Index of its unit in the model."""
    modules: tuple[str, ...] = ()
    """Names of the layers' modules in their unit, without an added pooling."""
    flattens: bool = False
    """Whether the input is flattened first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers in `Model.build`."""
        names = []
        for module in self.modules:
            # A unit computed as a whole has no modules of its own.
            name = f"{self.unit}.{module}" if module else str(self.unit)
            names.append(name)
        return tuple(names)

    # Cached, since planners compare very many divisions of the same layers.

    @cached_property
    def main_input(self) -> Shape:
        """Input shape of the main layer."""
        return (math.prod(self.input),) if self.flattens else self.input

    @cached_property
    def output(self) -> Shape:
        """Output shape of the last layer in the sequence."""
        return shapes_through(self.sequence, self.main_input)[-1]

    @cached_property
    def inputs(self) -> int:
        """M: number of input elements."""
        return math.prod(self.input)

    @cached_property
    def outputs(self) -> int:
        """K: number of output elements."""
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
        """Number of weight columns: channels of a convolution's input, elements of other inputs."""
        return self._weight_shape[1] if self._weight_shape else self.input[0]

    @cached_property
    def _weight_shape(self) -> Shape:
        """(output channels, input channels, ...); () for a layer without one weight tensor."""
        if not self.sequence:
            return ()
        return self.sequence[0].weight_shape(self.main_input)

    @cached_property
    def division(self) -> Division:
        """How several devices can share the layer."""
        # A route computes nothing.
        return self.sequence[0].division if self.sequence else "moves"

    @property
    def is_route(self) -> bool:
        """Whether the layer is a route."""
        return not self.sequence

    @property
    def splits(self) -> bool:
        """Whether the weights can be divided by output and by input channels."""
        return self.division == "weights"

    @property
    def is_channelwise(self) -> bool:
        """Whether each output channel depends on one input channel only."""
        return self.division == "channels"

    @cached_property
    def window(self) -> PixelWindow | None:
        """Window of input pixels read for one output pixel, for tiles; None for layers without a window."""
        return self.sequence[0].window if self.sequence else None

    @cached_property
    def weights(self) -> int:
        """Q: weights without biases. Parameters without an entry per channel all count as weights."""
        if not self.sequence:
            return 0
        main_layer = self.sequence[0]
        if main_layer.channel_values:
            return main_layer.weights(self.main_input)
        # Of a residual block or a unit computed as a whole, for example, no value belongs to an output channel.
        return main_layer.parameters(self.main_input)

    @cached_property
    def multiplications(self) -> int:
        """R: multiplications with the weights."""
        if not self.sequence:
            return 0
        flops = self.sequence[0].flops(self.main_input)
        # A multiply and an add are two FLOPs.
        return int(flops) // 2

    @cached_property
    def channel_values(self) -> int:
        """Values stored for each output channel beside the weights: a bias, a normalisation."""
        return sum(layer.channel_values for layer in self.sequence)

    @property
    def parameters(self) -> int:
        """All stored values: weights and values per channel."""
        return self.weights + self.channel_values * self.output_channels

    @cached_property
    def whole(self) -> Slice:
        """The slice covering the whole layer."""
        outputs = range(self.output_channels)
        return Slice(outputs, range(self.input_channels), outputs)

    @cached_property
    def main_output(self) -> Shape:
        """Output shape of the main layer, before the element-wise layers."""
        return self.sequence[0].output(self.main_input)

    def by_outputs(self, channels: Channels) -> Slice:
        """Return the slice computing some output channels from the complete input.

        >>> from testbed.ml.models.catalog import create
        >>> layer = graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers[0]
        >>> layer.by_outputs(range(0, 16))
        Slice(rows=range(0, 16), columns=range(0, 64), channels=range(0, 16))
        """
        return Slice(channels, self.whole.columns, channels)

    def by_inputs(self, columns: Channels, channels: Channels | None = None) -> Slice:
        """Return the slice of partial sums from some input channels; the device finishes ``channels``, None: all.

        >>> from testbed.ml.models.catalog import create
        >>> layer = graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers[0]
        >>> layer.by_inputs(range(0, 16), channels=range(0, 8))
        Slice(rows=range(0, 32), columns=range(0, 16), channels=range(0, 8))
        """
        finished = self.whole.channels if channels is None else channels
        return Slice(self.whole.rows, columns, finished)

    def with_pool(self, pool: GraphLayer) -> GraphLayer:
        """Return the layer followed by a parameterless pooling, computed by the device finishing a channel."""
        return replace(self, sequence=(*self.sequence, *pool.sequence))

    def product_cost(self, read: int, channels: int) -> Cost:
        """Return the cost of the main layer for one sample: from ``read`` input elements to a number of channels.

        FLOPs and weights are divided like the matrix; all values read and written are counted.
        """
        if not self.sequence:
            return Cost()
        whole = self.inputs * self.output_channels
        divided = read * channels
        # Multiplied before the division: the quotient of the two alone would be rounded.
        flops = 2 * self.multiplications * divided / whole
        weights = BYTES_PER_VALUE * self.weights * divided / whole
        written = channels * math.prod(self.main_output[1:])
        accessed = BYTES_PER_VALUE * (read + written)
        return Cost(flops, accessed, weights, self.sequence[0].kind)

    def finish_cost(self, channels: int) -> Cost:
        """Return the cost of the layers after the main layer for a number of channels of one sample."""
        total = Cost()
        if not self.sequence:
            return total
        shape = self.main_output
        share = channels / self.output_channels
        for layer in self.sequence[1:]:
            total += layer.cost(shape) * share
            shape = layer.output(shape)
        return total

    def cost(self, read: int, channels: int) -> Cost:
        """Return the cost of all layers for one sample: from ``read`` input elements to a number of channels."""
        return self.product_cost(read, channels) + self.finish_cost(channels)

    def share(self, values: int, part: Slice) -> int:
        """Return how many of ``values``, all weights or all multiplications, are in a slice."""
        whole = self.output_channels * self.input_channels
        divided = len(part.rows) * len(part.columns)
        return values * divided // whole


@dataclass(frozen=True)
class Graph:
    """Layers in topological order; the output of the last one is the result.

    >>> from testbed.ml.models.catalog import create
    >>> graph = graph_of(create("cnn", {}, (1, 8, 8), 10))
    >>> graph.readers[0], graph.follows(1)
    ((1,), True)
    >>> graph.weights < sum(layer.parameters for layer in graph.layers)
    True
    """

    name: str
    """Name of the model."""
    layers: tuple[GraphLayer, ...]

    def __post_init__(self) -> None:
        """Check the sources of all layers; raises ValueError for later sources and wrong numbers of elements."""
        for index, layer in enumerate(self.layers):
            sources = layer.sources
            are_earlier = all(INPUT <= source < index for source in sources)
            if not sources or not are_earlier:
                raise ValueError(
                    f"layer {index} ({layer.name}) takes the outputs of {sources}, not of earlier ones"
                )
            arriving = sum(self.outputs_of(source) for source in sources)
            # The size of the model's input is only known from the layers that read it.
            if sources != (INPUT,) and arriving != layer.inputs:
                raise ValueError(
                    f"layer {index} ({layer.name}) takes {layer.inputs} elements, but {arriving} arrive"
                )

    def outputs_of(self, index: int) -> int:
        """Return the output elements of a layer, or the input elements of the model for `INPUT`."""
        if index == INPUT:
            return self.layers[0].inputs
        return self.layers[index].outputs

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the layers reading its output."""
        readers: list[list[int]] = [[] for _ in self.layers]
        for index, layer in enumerate(self.layers):
            # A set: a route may read one layer twice.
            for source in set(layer.sources):
                if source != INPUT:
                    readers[source].append(index)
        return tuple(map(tuple, readers))

    def follows(self, index: int) -> bool:
        """Whether a layer reads only the previous layer of the list.

        Only then can devices reuse their parts of the previous output: pooling and routing in between happen at the
        source (Stahl et al., Section 5: such layers are counted but not partitioned).
        """
        return index > 0 and self.layers[index].sources == (index - 1,)

    def fuses(self, index: int) -> bool:
        """Whether the layer can be the first of a fused pair with the next layer.

        The weights of both must be divisible, and no other layer may read the value between the two: that value is
        never complete on one device.
        """
        following = index + 1
        if following == len(self.layers):
            return False
        both_split = self.layers[index].splits and self.layers[following].splits
        is_only_reader = self.readers[index] == (following,)
        return both_split and is_only_reader and self.follows(following)

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

    A unit with several inputs begins with a route, and a unit without layers is one route. A unit of a user's network
    that cannot be described by layers is one layer computed as a whole.

    >>> from testbed.ml.models.catalog import create
    >>> graph = graph_of(create("cnn", {}, (1, 8, 8), 10))
    >>> [(layer.name, layer.output) for layer in graph.layers][-1]
    ('output', (10,))
    """
    layers: list[GraphLayer] = []
    # The index in the graph of the last layer of each unit, by the index of the unit.
    last_layers = {INPUT: INPUT}
    for index, given in enumerate(model.units):
        unit, names = _described_unit(model, index, given)
        sources = tuple(last_layers[read] for read in model.reads(index))
        arriving = unit.input
        if len(sources) == 1 and sources[0] != INPUT:
            # A map that the unit before flattens arrives as it was.
            arriving = layers[sources[0]].output
        own_layers = _layers_of_unit(
            index, unit, names, sources, first=len(layers), shape=arriving
        )
        layers += own_layers
        # A unit that only flattens has no layer: its readers read its source.
        last_layers[index] = len(layers) - 1 if own_layers else sources[0]
    return Graph(model.name, tuple(layers))


def _described_unit(
    model: Model, index: int, unit: Unit
) -> tuple[Unit, tuple[str, ...]]:
    """Return a unit as known layers where possible, and the name of each layer's module within the unit."""
    counted = unit.layers[0] if unit.layers else None
    if not isinstance(counted, CountedUnit):
        # A unit of a catalogue model, whose modules have the numbers of its layers.
        numbers = range(len(unit.layers))
        return unit, tuple(map(str, numbers))
    if not counted.described:
        whole = replace(counted, make=partial(model.build_flat_unit, index))
        return replace(unit, layers=(whole,)), ("",)
    layers = []
    names = []
    for name, layer in counted.described:
        layers.append(layer)
        # A function has no module; "-" is the name of no tensor.
        names.append(name or "-")
    # Inputs of described layers are joined along the channels, in contrast to those of other traced units.
    input_shape = joined_shape(model.input_shapes(index))
    described = replace(unit, layers=tuple(layers), input=input_shape)
    return described, tuple(names)


def _layers_of_unit(
    index: int,
    unit: Unit,
    names: Sequence[str],
    sources: tuple[int, ...],
    *,
    first: int,
    shape: Shape,
) -> list[GraphLayer]:
    """Return a unit's layers as part of the graph.

    Args:
        index: index of the unit in the model.
        unit: the unit, with its layers described.
        names: name of each layer's module within the unit.
        sources: graph indices of the layers read by the unit.
        first: graph index of the first returned layer.
        shape: input shape of the first returned layer.
    """
    layers: list[GraphLayer] = []
    input_shapes = shapes_through(unit.layers, unit.input)
    groups = _group_layers(unit, joins=len(sources) > 1)
    for place, numbers in enumerate(groups):
        flattens = False
        if numbers:
            # A layer of features after a map: the input of the layer has fewer axes than the arriving value.
            main_input = input_shapes[numbers[0]]
            flattens = len(main_input) < len(shape)
        layer = GraphLayer(
            name=f"{unit.name}.{place}" if place else unit.name,
            sequence=tuple(unit.layers[number] for number in numbers),
            input=shape,
            # Within the unit, each layer reads the layer before.
            sources=(first + place - 1,) if place else sources,
            unit=index,
            modules=tuple(names[number] for number in numbers),
            flattens=flattens,
        )
        shape = layer.output
        layers.append(layer)
    return layers


def _group_layers(unit: Unit, *, joins: bool) -> list[list[int]]:
    """Return the positions in a unit of each main layer with its element-wise followers.

    An empty group is a route: if the unit ``joins`` several inputs, or has no layers.
    """
    groups: list[list[int]] = []
    if joins or not unit.layers:
        groups.append([])
    for number, layer in enumerate(unit.layers):
        has_main_layer = bool(groups and groups[-1])
        if layer.division == "values" and has_main_layer:
            groups[-1].append(number)
        elif layer.division != "flattens":
            # An element-wise layer without a main layer before it is a layer of its own.
            groups.append([number])
    return groups
