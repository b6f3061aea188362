"""The arithmetic of layer slices: partial sums of some output channels, and the finishing of complete sums.

A slice is a device's part of a layer (`testbed.ml.models.slices`): rows of the weights are output channels, columns are
input channels. If the weights are cut by output channels, each device computes complete sums of its output channels.
If the weights are cut by input channels, each device computes partial sums of all output channels. Finishing a channel
means adding the bias, normalising and activating, for which the sums must be complete (Stahl et al., Sections 4.1 and
4.4).

Values are flat, (samples, elements), channel after channel, as in messages. All operations are differentiable.

Gradients of a fully connected layer, with or without ReLU, are also available in closed form and equal autograd's to
round-off: for layers as small as those of one device, autograd takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.common.seeds import derive
from testbed.ml.lazy import functional, nn, torch
from testbed.ml.models.chain import Model
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.layers import Linear, ReLU, shapes_through
from testbed.ml.models.slices import NO_CHANNELS, Channels, Slice, pick

Tensors = Mapping[str, "torch.Tensor"]
"""Tensors by the names in the state dictionary of `Model.build`."""

_COUNTER = "num_batches_tracked"
"""Last part of the name of a counter in torch's normalisations, which is unused with a fixed momentum."""


def cut_tensors(
    layer: GraphLayer, part: Slice, state: Tensors
) -> dict[str, torch.Tensor]:
    """Return a slice of a layer's tensors by name; indivisible layers stay whole, and empty tensors are omitted.

    ``state`` is the complete state of the layer or of the whole model. The result has views if the slice has ranges, so
    it keeps the complete state in memory; `cut_copies` does not.
    """
    prefixes = tuple(f"{name}." for name in layer.names)
    is_divisible = layer.splits or layer.is_channelwise
    tensors = {}
    for name, tensor in state.items():
        is_of_layer = name.startswith(prefixes)
        if not is_of_layer or name.endswith(_COUNTER):
            continue
        values = part.of(tensor) if is_divisible else tensor
        if values.numel():
            tensors[name] = values
    return tensors


def cut_copies(
    slices: Iterable[tuple[GraphLayer, Slice]], state: Tensors
) -> dict[str, torch.Tensor]:
    """Return copies of the results of `cut_tensors` for each layer, so the complete state can be freed."""
    copies = {}
    for layer, part in slices:
        for name, tensor in cut_tensors(layer, part, state).items():
            copies[name] = tensor.clone()
    return copies


def draw_tensors(
    model: Model, slices: Iterable[tuple[GraphLayer, Slice]], seed: int
) -> dict[str, torch.Tensor]:
    """Draw slices of the model's initial weights, equal to `cut_tensors` of the whole model drawn with the same seed.

    Weights outside of the slices are in memory only one block at a time, since a model may not fit into one device.
    ``slices`` are in the order of the model. Units of a user's network are built whole and then cut.
    """
    if model.builder is not None:
        return _cut_built_units(model, list(slices), seed)
    slices_by_unit: dict[int, dict[str, Slice]] = {}
    for graph_layer, part in slices:
        slices_of_unit = slices_by_unit.setdefault(graph_layer.unit, {})
        for name in graph_layer.names:
            slices_of_unit[name] = part
    tensors: dict[str, torch.Tensor] = {}
    for index, slices_of_unit in slices_by_unit.items():
        tensors |= _draw_unit(model, index, slices_of_unit, seed)
    return tensors


def _cut_built_units(
    model: Model, slices: Sequence[tuple[GraphLayer, Slice]], seed: int
) -> dict[str, torch.Tensor]:
    """Build the units of a user's network that the slices belong to, and cut their tensors."""
    indices = {layer.unit for layer, _ in slices}
    state: dict[str, torch.Tensor] = {}
    for index in indices:
        state |= model.build(index, index + 1, seed).state_dict()
    # Copies: views would keep the whole units in memory.
    return cut_copies(slices, state)


def _draw_unit(
    model: Model,
    index: int,
    slices: Mapping[str, Slice],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Draw the slices of a unit's layers; ``slices`` are by layer name, such as "3.0" for the first layer of unit 3.

    Seed and generator are the same as in `Model.build`, so a slice equals the same part of the whole model.
    """
    unit = model.units[index]
    generator = torch.Generator().manual_seed(derive(seed, "weights", index))
    empty_slice = Slice(NO_CHANNELS, NO_CHANNELS, NO_CHANNELS)
    tensors = {}
    input_shapes = shapes_through(unit.layers, unit.input)
    for number, layer in enumerate(unit.layers):
        layer_name = f"{index}.{number}"
        # An empty slice advances the generator all the same, for the layers after this one.
        part = slices.get(layer_name, empty_slice)
        layer_tensors = layer.draw(input_shapes[number], generator, part)
        for name, tensor in layer_tensors.items():
            if not name.endswith(_COUNTER):
                tensors[f"{layer_name}.{name}"] = tensor
    return tensors


class SlicedLayer:
    """A slice of a layer with the tensors of the slice, on which the device computes.

    If the weights are cut by output channels, a device calls `run`, or `sums` and then `finish`. If they are cut by
    input channels, the `sums` of all devices are added, and each device calls `finish` for some channels.
    """

    def __init__(
        self,
        layer: GraphLayer,
        part: Slice,
        state: Tensors,
        *,
        training: bool = False,
    ) -> None:
        """``state`` has the tensors of the slice, as `cut_tensors` returns them; tensors of other layers are ignored.

        With ``training``, normalisation uses batch statistics and updates the running statistics in ``state`` in place.
        """
        self.layer = layer
        self.part = part
        self._training = training
        self._states = [_tensors_of(name, state) for name in layer.names]
        """The tensors of each layer of ``layer.sequence``."""
        # A pooling added by `GraphLayer.with_pool` has no name, and no tensors.
        unnamed_layers = len(layer.sequence) - len(self._states)
        self._states += [{}] * unnamed_layers
        self._finishing_modules: dict[Channels, nn.Sequential] = {}
        """The modules of the layers after the main layer, by the channels that they finish."""
        self._indivisible_module: nn.Sequential | None = None
        """The module of an indivisible layer; None before the first run."""

    def sums(
        self,
        inputs: torch.Tensor,
        columns: Channels | None = None,
        rows: Channels | None = None,
    ) -> torch.Tensor:
        """Return the contribution of input channels to output channels, without bias.

        Args:
            inputs: the values of the input channels ``columns``, (samples, elements).
            columns: some input channels of the slice; None for all input channels of the slice.
            rows: some output channels of the slice; None for all output channels of the slice.

        Returns: (samples, elements of the output channels).
        """
        if columns is None:
            columns = self.part.columns
        if rows is None:
            rows = self.part.rows
        slice_weight = self._states[0]["weight"]
        weight = pick(slice_weight, 0, rows, self.part.rows)
        weight = pick(weight, 1, columns, self.part.columns)
        map_size = self.layer.main_input[1:]
        maps = inputs.reshape(len(inputs), len(columns), *map_size)
        products = self.layer.sequence[0].product(maps, weight)
        return products.flatten(1)

    def finish(
        self, sums: torch.Tensor, channels: Channels | None = None
    ) -> torch.Tensor:
        """Add the bias to complete sums of output channels, normalise and activate.

        ``sums`` and result are (samples, elements). ``channels`` are the output channels of ``sums``; None for all
        channels that the slice finishes.
        """
        if channels is None:
            channels = self.part.channels
        # Features become maps of one pixel, since the module of a normalisation takes maps only.
        map_size = self.layer.main_output[1:] or (1, 1)
        maps = sums.reshape(len(sums), len(channels), *map_size)
        return self._finish_maps(maps, channels).flatten(1)

    def _finish_maps(self, values: torch.Tensor, channels: Channels) -> torch.Tensor:
        """Finish maps of some output channels, (samples, channels, height, width)."""
        slice_bias = self._states[0].get("bias")
        if slice_bias is not None:
            bias = pick(slice_bias, 0, channels, self.part.channels)
            # One value for all pixels of a channel.
            values = values + bias[:, None, None]
        outputs: torch.Tensor = self._finishing_module(channels)(values)
        return outputs

    def tile(
        self, inputs: torch.Tensor, around: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """Compute all channels of a tile, a rectangle of the output, from the required rectangle of the input.

        Both are (samples, channels, height, width). ``around`` is the padding of the input in pixels: left, right, top
        and bottom. Only edges of the whole image are padded; at other edges, the input contains the pixels of
        neighbouring tiles.
        """
        window = self.layer.window
        assert window is not None
        padded = functional.pad(inputs, around, value=window.fill)
        main_layer = self.layer.sequence[0]
        weight = self._states[0].get("weight")
        values = main_layer.product(padded, weight, padding=0)
        return self._finish_maps(values, self.part.channels)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the slice's output channels from all required input channels; both are (samples, elements).

        A layer with weights needs the complete input, and a channel-wise layer the slice's channels of the input. An
        indivisible layer is computed whole.
        """
        if self.layer.splits:
            return self.finish(self.sums(inputs))
        if self.layer.is_channelwise:
            channels = len(self.part.channels)
            map_size = self.layer.input[1:]
            maps = inputs.reshape(len(inputs), channels, *map_size)
            values = self.layer.sequence[0].product(maps, None)
            return self.finish(values.flatten(1))
        if self.layer.is_route:
            # The values arrive joined.
            return inputs
        if self._indivisible_module is None:
            self._indivisible_module = self._build_indivisible()
        maps = inputs.reshape(len(inputs), *self.layer.main_input)
        outputs: torch.Tensor = self._indivisible_module(maps)
        return outputs.flatten(1)

    def _finishing_module(self, channels: Channels) -> nn.Sequential:
        """Return the layers after the main layer for some channels: a narrower normalisation, an activation."""
        if channels not in self._finishing_modules:
            modules = self._build_finishing(channels)
            self._finishing_modules[channels] = modules.train(self._training)
        return self._finishing_modules[channels]

    def _build_finishing(self, channels: Channels) -> nn.Sequential:
        modules = nn.Sequential()
        # Element-wise layers accept maps of any size; only the number of channels counts.
        shape = (len(channels), 1, 1)
        finishing_layers = self.layer.sequence[1:]
        states = self._states[1:]
        for layer, slice_state in zip(finishing_layers, states, strict=True):
            module = layer.build(shape, torch.Generator())
            state = {}
            for name, tensor in slice_state.items():
                state[name] = pick(tensor, 0, channels, self.part.channels)
            # Assigned, not copied: training updates the running statistics of the slice in place.
            # Not strict, since the counter of a normalisation is missing.
            module.load_state_dict(state, strict=False, assign=True)
            modules.append(module)
        return modules

    def _build_indivisible(self) -> nn.Sequential:
        """Return the module of an indivisible layer and the following layers, with the tensors of the slice."""
        modules = nn.Sequential()
        sequence = self.layer.sequence
        input_shapes = shapes_through(sequence, self.layer.main_input)
        # Not strict: there is one shape more than there are layers, the output of the last layer.
        for layer, shape, state in zip(
            sequence, input_shapes, self._states, strict=False
        ):
            module = layer.build(shape, torch.Generator())
            module.load_state_dict(state, strict=False, assign=True)
            modules.append(module)
        return modules.train(self._training)


def _tensors_of(module: str, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name within the module, without the counter of a normalisation."""
    prefix = f"{module}."
    tensors = {}
    for name, tensor in state.items():
        if name.startswith(prefix) and not name.endswith(_COUNTER):
            tensors[name.removeprefix(prefix)] = tensor
    return tensors


class SlicedShape:
    """The counterpart of `SlicedLayer` computing no values, only the shapes of results, for timing-only inference.

    Results are tensors on torch's meta device. The methods have the arguments of those of `SlicedLayer`.
    """

    def __init__(self, layer: GraphLayer, part: Slice) -> None:
        self.layer = layer
        self.part = part

    def sums(
        self,
        inputs: torch.Tensor,
        columns: Channels | None = None,
        rows: Channels | None = None,
    ) -> torch.Tensor:
        """Return sums of shape (samples, elements of the rows)."""
        channels = self.part.rows if rows is None else rows
        return self._empty_output(inputs, channels)

    def finish(
        self, sums: torch.Tensor, channels: Channels | None = None
    ) -> torch.Tensor:
        """Return a tensor with the shape of the sums."""
        return torch.empty(sums.shape, device="meta")

    def tile(
        self, inputs: torch.Tensor, around: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """Return a tile, (samples, output channels, height, width)."""
        window = self.layer.window
        assert window is not None
        left, right, top, bottom = around
        samples, _, height, width = inputs.shape
        padded_height = height + top + bottom
        padded_width = width + left + right
        rows = (padded_height - window.kernel) // window.stride + 1
        columns = (padded_width - window.kernel) // window.stride + 1
        shape = (samples, self.layer.output_channels, rows, columns)
        return torch.empty(shape, device="meta")

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (samples, elements): of the slice's channels if the layer is channel-wise, else of all channels."""
        if self.layer.is_route:
            return inputs
        if self.layer.is_channelwise:
            return self._empty_output(inputs, self.part.channels)
        all_channels = range(self.layer.output_channels)
        return self._empty_output(inputs, all_channels)

    def _empty_output(self, inputs: torch.Tensor, channels: Channels) -> torch.Tensor:
        values = len(channels) * self.layer.pixels
        return torch.empty((len(inputs), values), device="meta")


@dataclass(frozen=True)
class DenseGradients:
    """The gradients of a fully connected layer in closed form, from the values of a forward.

    For y = relu(x W' + b) and the gradient g of y, the gradient of the sums x W' + b is s = g where y > 0 and 0
    elsewhere. The gradient of x is s W, that of W is s' x, and that of b is the sum of s over the samples. Without a
    ReLU, s = g.

    >>> weight = torch.tensor([[1.0, -1.0]])
    >>> gradients = DenseGradients(torch.tensor([[3.0, 1.0]]), weight, torch.tensor([[2.0]]), has_relu=True)
    >>> sums = gradients.sum_gradient(torch.tensor([[0.5]]))
    >>> gradients.input_gradient(sums), gradients.parameter_gradients(sums)
    (tensor([[ 0.5000, -0.5000]]), (tensor([[1.5000, 0.5000]]), tensor([0.5000])))
    """

    inputs: torch.Tensor
    """(samples, inputs)."""
    weight: torch.Tensor
    """(neurons, inputs)."""
    outputs: torch.Tensor
    """(samples, neurons)."""
    has_relu: bool
    """Whether a ReLU follows the sums."""

    def sum_gradient(self, output_gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sums from the gradient of the outputs, both (samples, neurons)."""
        if not self.has_relu:
            return output_gradient
        # The output of a ReLU is positive exactly where the sum is.
        return output_gradient * (self.outputs > 0)

    def input_gradient(self, sum_gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs, (samples, inputs), from the gradient of the sums."""
        return sum_gradient @ self.weight

    def parameter_gradients(
        self, sum_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight, (neurons, inputs), and bias, (neurons,), from the gradient of the sums."""
        return sum_gradient.T @ self.inputs, sum_gradient.sum(dim=0)


def is_dense(layer: GraphLayer) -> bool:
    """Return whether a layer is fully connected and followed by a ReLU or nothing, as `DenseGradients` requires.

    >>> from testbed.ml.models.catalog import create
    >>> from testbed.ml.models.graph import graph_of
    >>> [is_dense(layer) for layer in graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers]
    [True, True]
    """
    first, *others = layer.sequence or (None,)
    return isinstance(first, Linear) and others in ([], [ReLU()])


def dense_forward(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    has_relu: bool,
) -> torch.Tensor:
    """Return the outputs, (samples, neurons), of inputs, (samples, inputs), after a ReLU if ``has_relu``.

    ``weight`` is (neurons, inputs), ``bias`` (neurons,).

    >>> weight = torch.tensor([[1.0, -1.0]])
    >>> dense_forward(torch.tensor([[3.0, 1.0], [1.0, 3.0]]), weight, None, has_relu=True)
    tensor([[2.],
            [0.]])
    """
    # As torch's own linear layer: adding the bias to the finished product may round differently.
    sums = inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)
    # In place: the sums are a new tensor that nobody else reads.
    return sums.relu_() if has_relu else sums
