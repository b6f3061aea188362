"""The arithmetic of layer slices: partial products of some rows and columns, and finishing of channels.

A slice is a device's part of a layer: rows of the weights are output channels, columns are input channels. With weights
cut by output channels, each device finishes its outputs. With weights cut by input channels, each device has partial
sums, and bias, normalisation and activation must wait for the complete sums (Stahl et al., Sections 4.1 and 4.4).

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
from testbed.ml.models.slices import NONE, Channels, Slice, pick

Tensors = Mapping[str, "torch.Tensor"]
"""Weights and per-channel values as `Model.build` names them."""

_COUNTER = "num_batches_tracked"
"""A counter of batches in torch's normalisations, unused with a fixed momentum."""


def cut_tensors(
    layer: GraphLayer, part: Slice, state: Tensors
) -> dict[str, torch.Tensor]:
    """Return a slice of a layer's tensors by name, without empty tensors; indivisible layers stay whole.

    ``state`` is the complete state of the layer or of the whole model. Slices of ranges are views: `cut_copies` lets
    the complete state be freed.
    """
    prefixes = tuple(f"{name}." for name in layer.names)
    is_divisible = layer.splits or layer.is_channelwise
    tensors = {}
    for name, tensor in state.items():
        is_of_layer = name.startswith(prefixes)
        if not is_of_layer or name.endswith(_COUNTER):
            continue
        own = part.of(tensor) if is_divisible else tensor
        if own.numel():
            tensors[name] = own
    return tensors


def cut_copies(
    held: Iterable[tuple[GraphLayer, Slice]], state: Tensors
) -> dict[str, torch.Tensor]:
    """Return copies of the results of `cut_tensors` for each layer, so the complete state can be freed."""
    copies = {}
    for layer, part in held:
        for name, tensor in cut_tensors(layer, part, state).items():
            copies[name] = tensor.clone()
    return copies


def draw_tensors(
    model: Model, wanted: Iterable[tuple[GraphLayer, Slice]], seed: int
) -> dict[str, torch.Tensor]:
    """Draw slices of the model's initial weights, equal to `cut_tensors` of the whole model drawn with this seed.

    Only one block of the weights of other devices is in memory at a time, since a model may not fit into one device.
    ``wanted`` is in the order of the model. Units of a user's network are built whole and then cut.
    """
    if model.builder is not None:
        return _cut_built_units(model, list(wanted), seed)
    slices_by_unit: dict[int, dict[str, Slice]] = {}
    for graph_layer, part in wanted:
        slices = slices_by_unit.setdefault(graph_layer.unit, {})
        for name in graph_layer.names:
            slices[name] = part
    tensors: dict[str, torch.Tensor] = {}
    for index, slices in slices_by_unit.items():
        tensors |= _draw_unit(model, index, slices, seed)
    return tensors


def _cut_built_units(
    model: Model, held: Sequence[tuple[GraphLayer, Slice]], seed: int
) -> dict[str, torch.Tensor]:
    """Build each unit of a user's network with a held layer, and cut the unit's tensors."""
    indices = {layer.unit for layer, _ in held}
    state: dict[str, torch.Tensor] = {}
    for index in indices:
        state |= model.build(index, index + 1, seed).state_dict()
    # Copies: views would keep the whole units in memory.
    return cut_copies(held, state)


def _draw_unit(
    model: Model,
    index: int,
    slices: Mapping[str, Slice],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Draw the slices of a unit's layers, by module name; layers without a slice are drawn and dropped.

    Seed and generator are the same as in `Model.build`, so a slice equals the same part of the whole model.
    """
    unit = model.units[index]
    generator = torch.Generator().manual_seed(derive(seed, "weights", index))
    nothing = Slice(NONE, NONE, NONE)
    tensors = {}
    input_shapes = shapes_through(unit.layers, unit.input)
    for number, layer in enumerate(unit.layers):
        name = f"{index}.{number}"
        # An empty slice advances the generator all the same, for the layers after this one.
        part = slices.get(name, nothing)
        drawn = layer.draw(input_shapes[number], generator, part)
        for key, tensor in drawn.items():
            if not key.endswith(_COUNTER):
                tensors[f"{name}.{key}"] = tensor
    return tensors


class SlicedLayer:
    """A slice of a layer with the slice's tensors, which computes all or some of the channels.

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
        """Take the tensors of the slice, as returned by `cut_tensors`; tensors of other layers are ignored.

        With ``training``, normalisation uses batch statistics and updates the running statistics in place.
        """
        self.layer = layer
        self.part = part
        self._training = training
        self._states = [_tensors_of(name, state) for name in layer.names]
        """The tensors of each layer of ``layer.sequence``."""
        # A pooling that was added to the layer has no name, and no tensors.
        unnamed = len(layer.sequence) - len(self._states)
        self._states += [{}] * unnamed
        self._following: dict[Channels, nn.Sequential] = {}
        """The operations after the sums, by the channels that they finish."""
        self._whole: nn.Sequential | None = None
        """The module of an indivisible layer; None before its first run."""

    def sums(
        self,
        inputs: torch.Tensor,
        columns: Channels | None = None,
        rows: Channels | None = None,
    ) -> torch.Tensor:
        """Return the contribution of input channels to output channels, without bias.

        Args:
            inputs: the values of the input channels ``columns``, (samples, elements).
            columns: input channels of the slice; None for all of the slice.
            rows: output channels of the slice; None for all of the slice.

        Returns: (samples, elements of the output channels).
        """
        columns = self.part.columns if columns is None else columns
        rows = self.part.rows if rows is None else rows
        own_weight = self._states[0]["weight"]
        weight = pick(own_weight, 0, rows, self.part.rows)
        weight = pick(weight, 1, columns, self.part.columns)
        pixels = self.layer.main_input[1:]
        maps = inputs.reshape(len(inputs), len(columns), *pixels)
        products = self.layer.sequence[0].product(maps, weight)
        return products.flatten(1)

    def finish(
        self, sums: torch.Tensor, channels: Channels | None = None
    ) -> torch.Tensor:
        """Add the bias to complete sums of some output channels, normalise and activate; (samples, elements) both.

        ``channels`` are output channels of the slice; None for all of the slice.
        """
        channels = self.part.channels if channels is None else channels
        # Features are finished as maps of one pixel, since the normalisation is that of maps.
        pixels = self.layer.main_output[1:] or (1, 1)
        maps = sums.reshape(len(sums), len(channels), *pixels)
        return self._finish_maps(maps, channels).flatten(1)

    def _finish_maps(self, values: torch.Tensor, channels: Channels) -> torch.Tensor:
        """Finish maps of some output channels, (samples, channels, height, width)."""
        bias = self._states[0].get("bias")
        if bias is not None:
            own_bias = pick(bias, 0, channels, self.part.channels)
            values = values + own_bias[:, None, None]
        finished: torch.Tensor = self._finishing_layers(channels)(values)
        return finished

    def tile(
        self, inputs: torch.Tensor, around: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """Compute all channels of a tile from the tile's input, (samples, channels, height, width) both.

        ``around`` is the padding of the input in pixels: left, right, top and bottom. Only edges of the whole image are
        padded; at other edges, the input contains the pixels of neighbouring tiles.
        """
        window = self.layer.window
        assert window is not None
        padded = functional.pad(inputs, around, value=window.fill)
        main_layer = self.layer.sequence[0]
        weight = self._states[0].get("weight")
        values = main_layer.product(padded, weight, padding=0)
        return self._finish_maps(values, self.part.channels)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the whole layer from its complete input; (samples, elements) both."""
        if self.layer.splits:
            return self.finish(self.sums(inputs))
        if self.layer.is_channelwise:
            channels = len(self.part.channels)
            pixels = self.layer.input[1:]
            maps = inputs.reshape(len(inputs), channels, *pixels)
            values = self.layer.sequence[0].product(maps, None)
            return self.finish(values.flatten(1))
        if self.layer.is_route:
            # The values arrive joined.
            return inputs
        if self._whole is None:
            self._whole = self._build_layer()
        maps = inputs.reshape(len(inputs), *self.layer.main_input)
        outputs: torch.Tensor = self._whole(maps)
        return outputs.flatten(1)

    def _finishing_layers(self, channels: Channels) -> nn.Sequential:
        """Return the operations after the sums for some channels: a narrower normalisation, an activation."""
        if channels not in self._following:
            modules = self._build_followers(channels)
            self._following[channels] = modules.train(self._training)
        return self._following[channels]

    def _build_followers(self, channels: Channels) -> nn.Sequential:
        modules = nn.Sequential()
        # Element-wise layers accept maps of any size; only the number of channels counts.
        shape = (len(channels), 1, 1)
        followers = self.layer.sequence[1:]
        states = self._states[1:]
        for layer, state in zip(followers, states, strict=True):
            module = layer.build(shape, torch.Generator())
            own = {}
            for name, tensor in state.items():
                own[name] = pick(tensor, 0, channels, self.part.channels)
            # Assigned, not copied: in training, the running statistics of the given state change in place.
            # Not strict, since the counter of a normalisation is missing.
            module.load_state_dict(own, strict=False, assign=True)
            modules.append(module)
        return modules

    def _build_layer(self) -> nn.Sequential:
        """Return the module of an indivisible layer with the slice's tensors."""
        modules = nn.Sequential()
        sequence = self.layer.sequence
        # A shape more than there are layers: the last one is the output.
        input_shapes = shapes_through(sequence, self.layer.main_input)
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
    """The result shapes of `SlicedLayer` in inference, without computation: meta tensors of torch.

    The methods have the same arguments as the methods of `SlicedLayer`. Timing-only runs send such tensors.
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
        """Return a tile of shape (samples, channels, height, width)."""
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
        """Return the output shape of the whole layer, or of some channels: (samples, elements)."""
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
class DenseStep:
    """One forward waiting for its gradient: the closed form of a fully connected layer, with or without a ReLU.

    For y = relu(x W' + b) with the gradient g of y: the gradient of the sums is s = g where y > 0, that of the inputs
    s W, of the weight s' x, and of the bias the sum of s over the samples.

    >>> weight = torch.tensor([[1.0, -1.0]])
    >>> step = DenseStep(torch.tensor([[3.0, 1.0]]), weight, torch.tensor([[2.0]]), rectified=True)
    >>> sums = step.of_sums(torch.tensor([[0.5]]))
    >>> step.of_inputs(sums), step.of_parameters(sums)
    (tensor([[ 0.5000, -0.5000]]), (tensor([[1.5000, 0.5000]]), tensor([0.5000])))
    """

    inputs: torch.Tensor
    """(samples, inputs)."""
    weight: torch.Tensor
    """(neurons, inputs)."""
    outputs: torch.Tensor
    """(samples, neurons)."""
    rectified: bool
    """Whether a ReLU follows."""

    def of_sums(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the ReLU's input from the gradient of its output, both (samples, neurons)."""
        if not self.rectified:
            return gradient
        # The output is positive exactly where the input is.
        return gradient * (self.outputs > 0)

    def of_inputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs, (samples, inputs), from `of_sums`."""
        return sums @ self.weight

    def of_parameters(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight, (neurons, inputs), and bias, (neurons,), from `of_sums`."""
        return sums.T @ self.inputs, sums.sum(dim=0)


def is_dense(layer: GraphLayer) -> bool:
    """Return whether a layer is fully connected and followed by a ReLU at most.

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
    rectified: bool,
) -> torch.Tensor:
    """Return the outputs, (samples, neurons), of inputs, (samples, inputs), after a ReLU if ``rectified``.

    ``weight`` is (neurons, inputs), ``bias`` (neurons,).

    >>> weight = torch.tensor([[1.0, -1.0]])
    >>> dense_forward(torch.tensor([[3.0, 1.0], [1.0, 3.0]]), weight, None, rectified=True)
    tensor([[2.],
            [0.]])
    """
    # As torch's own linear layer: adding the bias to the finished product may round differently.
    sums = inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)
    # In place: the sums are a new tensor that nobody else reads.
    return sums.relu_() if rectified else sums
