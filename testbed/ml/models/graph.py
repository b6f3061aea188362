"""A model as a graph of layers, which planners divide by channels, neurons or pixels.

A layer of the graph is counted as in papers: a convolution, fully connected layer or pooling (the main layer) together
with the following normalisation and activation. `testbed.ml.models.layers` has the formulas of these single layers;
this module relates them to each other. A unit of the chain (`testbed.ml.models.chain`) may contain several layers of
the graph. A route is a layer of the graph that only joins the outputs of other layers.

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
from testbed.ml.models.maker import MeasuredUnit
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT, Shape
from testbed.ml.models.slices import Channels, Slice


@dataclass(frozen=True)
class GraphLayer:
    """A main layer and the following element-wise layers, or a route."""

    name: str
    sequence: tuple[Layer, ...]
    """The main layer, then the element-wise layers; empty for a route."""
    input: Shape
    """(channels, height, width) or (features,), before any flattening; for a route, of all sources joined along their
    channels."""
    sources: tuple[int, ...]
    """Indices in the graph of the layers whose outputs are the input; `INPUT` is the model's input."""
    unit: int = 0
    """Index of the unit in the model that contains the layer."""
    modules: tuple[str, ...] = ()
    """For each layer of ``sequence``, the name of its module within the unit; a pooling added by `with_pool` has none.
    """
    flattens: bool = False
    """Whether the main layer takes features, and reads a feature map flattened."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers' modules in the module of `Model.build`: "3.0" for the first layer of unit 3."""
        names = []
        for module in self.modules:
            # A unit computed as a whole is one module, whose name within the unit is empty.
            name = f"{self.unit}.{module}" if module else str(self.unit)
            names.append(name)
        return tuple(names)

    # Cached, since planners compare very many divisions of the same layers.

    @cached_property
    def main_input(self) -> Shape:
        """Input shape of the main layer, after any flattening."""
        return (math.prod(self.input),) if self.flattens else self.input

    @cached_property
    def output(self) -> Shape:
        """Output shape of the last layer of ``sequence``."""
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
        """How several devices can share the main layer, and thus also the following element-wise layers."""
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
        """Window of input pixels read for one output pixel; None for layers not divisible into tiles."""
        return self.sequence[0].window if self.sequence else None

    @cached_property
    def weights(self) -> int:
        """Q: number of weights, without biases. In a layer without values per channel, all parameters are weights."""
        if not self.sequence:
            return 0
        main_layer = self.sequence[0]
        if main_layer.channel_values:
            return main_layer.weights(self.main_input)
        # A residual block, for example, has biases inside, which belong to no output channel of the whole block.
        return main_layer.parameters(self.main_input)

    @cached_property
    def multiplications(self) -> int:
        """R: number of multiplications with weights."""
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
        """Number of stored values: weights and values per channel, running statistics included."""
        return self.weights + self.channel_values * self.output_channels

    @cached_property
    def whole_slice(self) -> Slice:
        """The whole layer as a slice."""
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
        return Slice(channels, self.whole_slice.columns, channels)

    def by_inputs(self, columns: Channels, channels: Channels | None = None) -> Slice:
        """Return the slice computing partial sums of all output channels from some input channels.

        ``channels`` are the output channels that the device finishes; None for all.

        >>> from testbed.ml.models.catalog import create
        >>> layer = graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers[0]
        >>> layer.by_inputs(range(0, 16), channels=range(0, 8))
        Slice(rows=range(0, 32), columns=range(0, 16), channels=range(0, 8))
        """
        finished = self.whole_slice.channels if channels is None else channels
        return Slice(self.whole_slice.rows, columns, finished)

    def with_pool(self, pool: GraphLayer) -> GraphLayer:
        """Return the layer with a pooling without parameters at the end, computed by the device finishing a channel."""
        return replace(self, sequence=(*self.sequence, *pool.sequence))

    def product_cost(self, input_elements: int, channels: int) -> Cost:
        """Return the cost of a part of the main layer for one sample.

        The part computes ``channels`` output channels from ``input_elements`` elements. FLOPs and weights are in
        proportion to the product of both; all values read and written are counted.
        """
        if not self.sequence:
            return Cost()
        whole = self.inputs * self.output_channels
        part = input_elements * channels
        # Multiplied before the division: the quotient of the two alone would be rounded.
        flops = 2 * self.multiplications * part / whole
        weights = BYTES_PER_VALUE * self.weights * part / whole
        output_elements = channels * math.prod(self.main_output[1:])
        accessed = BYTES_PER_VALUE * (input_elements + output_elements)
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

    def cost(self, input_elements: int, channels: int) -> Cost:
        """Return the cost of `product_cost` and `finish_cost` together."""
        return self.product_cost(input_elements, channels) + self.finish_cost(channels)

    def share(self, total: int, part: Slice) -> int:
        """Return a slice's share of ``total``, the number of all weights or of all multiplications of the layer."""
        matrix_elements = self.output_channels * self.input_channels
        slice_elements = len(part.rows) * len(part.columns)
        return total * slice_elements // matrix_elements


@dataclass(frozen=True)
class Graph:
    """A model as layers in topological order; the output of the last layer is the model's output.

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
            source_outputs = sum(self.outputs_of(source) for source in sources)
            # The size of the model's input is only known from the layers that read the input.
            if sources != (INPUT,) and source_outputs != layer.inputs:
                raise ValueError(
                    f"layer {index} ({layer.name}) takes {layer.inputs} elements, but {source_outputs} arrive"
                )

    def outputs_of(self, index: int) -> int:
        """Return the number of a layer's output elements, or of the model's input elements for `INPUT`."""
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
        """Whether a layer reads only the previous layer of ``layers``.

        Only then can devices reuse their parts of the previous output: pooling and routes in between are computed by
        the coordinator (Stahl et al., Section 5: such layers are counted but not partitioned).
        """
        return index > 0 and self.layers[index].sources == (index - 1,)

    def fuses(self, index: int) -> bool:
        """Whether devices can compute a layer and the next one without exchanging the values between the two.

        The weights of both must be divisible, and no other layer may read the values between them, since no device ever
        has all of these.
        """
        following = index + 1
        if following == len(self.layers):
            return False
        both_split = self.layers[index].splits and self.layers[following].splits
        is_only_reader = self.readers[index] == (following,)
        return both_split and is_only_reader and self.follows(following)

    @cached_property
    def weights(self) -> int:
        """Q: number of weights of all layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def multiplications(self) -> int:
        """R: number of multiplications of all layers."""
        return sum(layer.multiplications for layer in self.layers)


def graph_of(model: Model) -> Graph:
    """Return a model as a graph of layers.

    A unit with several inputs begins with a route, and a unit without layers is one route. A unit of a user's network
    becomes several layers if it is a plain sequence of known layers, and otherwise one layer that is computed whole.

    >>> from testbed.ml.models.catalog import create
    >>> graph = graph_of(create("cnn", {}, (1, 8, 8), 10))
    >>> [(layer.name, layer.output) for layer in graph.layers][-1]
    ('output', (10,))
    """
    layers: list[GraphLayer] = []
    # Index of a unit -> index in the graph of the last layer of the unit.
    last_layers = {INPUT: INPUT}
    for index in range(len(model.units)):
        unit, names = _unit_by_layers(model, index)
        sources = tuple(last_layers[source] for source in model.reads(index))
        input_shape = unit.input
        if len(sources) == 1 and sources[0] != INPUT:
            # If the source flattens its output, the graph has the shape before.
            input_shape = layers[sources[0]].output
        unit_layers = _layers_of_unit(
            index, unit, names, sources, first=len(layers), shape=input_shape
        )
        layers += unit_layers
        # A unit that only flattens has no layer: its readers read its source.
        last_layers[index] = len(layers) - 1 if unit_layers else sources[0]
    return Graph(model.name, tuple(layers))


def _unit_by_layers(model: Model, index: int) -> tuple[Unit, tuple[str, ...]]:
    """Return a unit as known layers where possible, and the name of each layer's module within the unit."""
    unit = model.units[index]
    measured = unit.layers[0] if unit.layers else None
    if not isinstance(measured, MeasuredUnit):
        # A unit of a catalogue model, whose modules have the numbers of its layers.
        numbers = range(len(unit.layers))
        return unit, tuple(map(str, numbers))
    if not measured.known_layers:
        # Computed as a whole, by a single module.
        whole = replace(measured, build_flat=partial(model.build_flat_unit, index))
        return replace(unit, layers=(whole,)), ("",)
    layers = []
    names = []
    for name, layer in measured.known_layers:
        layers.append(layer)
        # A function has no module; no tensor's name begins with "-".
        names.append(name or "-")
    # Inputs of known layers are joined along the channels, whereas those of a traced unit count as flattened.
    input_shape = joined_shape(model.input_shapes(index))
    by_layers = replace(unit, layers=tuple(layers), input=input_shape)
    return by_layers, tuple(names)


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
        unit: the unit, described by known layers where possible.
        names: name of each layer's module within the unit.
        sources: graph indices of the layers read by the unit.
        first: graph index of the first returned layer.
        shape: input shape of the first returned layer.
    """
    layers: list[GraphLayer] = []
    input_shapes = shapes_through(unit.layers, unit.input)
    groups = _group_layers(unit, has_several_inputs=len(sources) > 1)
    for place, numbers in enumerate(groups):
        flattens = False
        if numbers:
            # A fully connected layer after a feature map has fewer axes in its input than the map.
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


def _group_layers(unit: Unit, *, has_several_inputs: bool) -> list[list[int]]:
    """Return for each main layer the positions in the unit of the layer and the following element-wise layers.

    A unit that has several inputs, or no layers, begins with a route, which is an empty group.
    """
    groups: list[list[int]] = []
    if has_several_inputs or not unit.layers:
        groups.append([])
    for number, layer in enumerate(unit.layers):
        has_main_layer = bool(groups and groups[-1])
        if layer.division == "values" and has_main_layer:
            groups[-1].append(number)
        elif layer.division != "flattens":
            # A main layer, or an element-wise layer without a main layer before it.
            groups.append([number])
    return groups
