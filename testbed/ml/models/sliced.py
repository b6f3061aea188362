"""The arithmetic of layer slices: partial products of some rows and columns, and finishing of channels.

With weights cut by output channels, each device finishes its outputs. With weights cut by input channels, each device
has partial sums, and bias, normalisation and activation must wait for the complete sums (Stahl et al., Sections 4.1 and
4.4). Values are flat, (samples, elements), channel after channel, as in messages. All operations are differentiable.
Gradients of a fully connected layer, with or without ReLU, are also available in closed form and equal autograd's to
round-off: for layers as small as those of one device, autograd takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from testbed.common.seeds import derive
from testbed.ml.lazy import functional, nn, torch
from testbed.ml.models.chain import Model
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.layers import Linear, ReLU, shapes
from testbed.ml.models.slices import NONE, Channels, Slice, pick

Tensors = Mapping[str, "torch.Tensor"]
"""Weights and per-channel values as `Model.build` names them."""

_COUNTER = "num_batches_tracked"
"""An unused counter of a normalisation."""


def cut(layer: GraphLayer, part: Slice, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the slice of a layer's tensors in a complete state, without empty tensors; indivisible layers
    stay whole.
    """
    prefixes = tuple(f"{name}." for name in layer.names)
    divisible = layer.splits or layer.by_channel
    slices = {
        name: part.of(tensor) if divisible else tensor
        for name, tensor in state.items()
        if name.startswith(prefixes) and not name.endswith(_COUNTER)
    }
    return {name: tensor for name, tensor in slices.items() if tensor.numel()}


def cut_copies(
    held: Iterable[tuple[GraphLayer, Slice]], state: Tensors
) -> dict[str, torch.Tensor]:
    """Return copies of the results of `cut` for each layer, so the complete state can be freed."""
    return {
        name: tensor.clone()
        for each in held
        for name, tensor in cut(*each, state).items()
    }


def draw(
    model: Model, wanted: Iterable[tuple[GraphLayer, Slice]], seed: int
) -> dict[str, torch.Tensor]:
    """Return the slices `cut` would return for the model's initial weights, holding only one block of others at a time.

    ``wanted`` is in the order of the model. Units of a user's network are built whole and then cut.
    """
    if model.builder is not None:
        held = [*wanted]
        states = {
            index: model.build(index, index + 1, seed).state_dict()
            for index in {each.unit for each, _ in held}
        }
        return cut_copies(
            held,
            {name: each for state in states.values() for name, each in state.items()},
        )
    tensors: dict[str, torch.Tensor] = {}
    for index, group in groupby(wanted, key=lambda each: each[0].unit):
        unit, generator = (
            model.units[index],
            torch.Generator().manual_seed(derive(seed, "weights", index)),
        )
        slices = {name: part for whole, part in group for name in whole.names}
        entering = shapes(unit.layers, unit.input)[:-1]
        for number, (layer, shape) in enumerate(
            zip(unit.layers, entering, strict=True)
        ):
            name = f"{index}.{number}"
            state = layer.draw(
                shape, generator, slices.get(name, Slice(NONE, NONE, NONE))
            )
            tensors |= {
                f"{name}.{key}": tensor
                for key, tensor in state.items()
                if not key.endswith(_COUNTER)
            }
    return tensors


class SlicedLayer:
    """A layer slice with its tensors; computes the slice's operations and parts of them."""

    def __init__(
        self, layer: GraphLayer, part: Slice, state: Tensors, training: bool = False
    ) -> None:
        """Take the tensors of the slice, as returned by `cut`; tensors of other layers are ignored.

        With ``training``, normalisation uses batch statistics and updates the running statistics in place.
        """
        self.layer = layer
        self.part = part
        self._training = training
        self._states = [
            {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in state.items()
                if key.startswith(f"{name}.") and not key.endswith(_COUNTER)
            }
            for name in layer.names
        ]
        self._states += [{}] * (len(layer.sequence) - len(self._states))
        self._following: dict[Channels, nn.Sequential] = {}
        self._whole: nn.Sequential | None = None

    def sums(
        self,
        inputs: torch.Tensor,
        columns: Channels | None = None,
        rows: Channels | None = None,
    ) -> torch.Tensor:
        """Return the contribution of input channels, (samples, elements), to output channels, (samples, elements);
        None: all.
        """
        columns = self.part.columns if columns is None else columns
        rows = self.part.rows if rows is None else rows
        weight = pick(
            pick(self._states[0]["weight"], 0, rows, self.part.rows),
            1,
            columns,
            self.part.columns,
        )
        maps = inputs.reshape(len(inputs), len(columns), *self.layer.entering[1:])
        return self.layer.sequence[0].product(maps, weight).flatten(1)

    def finish(
        self, sums: torch.Tensor, channels: Channels | None = None
    ) -> torch.Tensor:
        """Add the bias to complete sums of some output channels, normalise and activate; (samples, elements) both."""
        channels = self.part.channels if channels is None else channels
        pixels = self.layer.summed[1:] or (1, 1)
        return self._finish_maps(
            sums.reshape(len(sums), len(channels), *pixels), channels
        ).flatten(1)

    def _finish_maps(self, values: torch.Tensor, channels: Channels) -> torch.Tensor:
        bias = self._states[0].get("bias")
        if bias is not None:
            values = values + pick(bias, 0, channels, self.part.channels)[:, None, None]
        finished: torch.Tensor = self._finishing_layers(channels)(values)
        return finished

    def tile(
        self, inputs: torch.Tensor, around: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """Compute all channels of a tile, (samples, channels, height, width), with padding left, right, top
        and bottom.
        """
        assert self.layer.window is not None
        padded = functional.pad(inputs, around, value=self.layer.window.fill)
        values = self.layer.sequence[0].product(
            padded, self._states[0].get("weight"), padding=0
        )
        return self._finish_maps(values, self.part.channels)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the whole layer from its complete input; (samples, elements) both."""
        if self.layer.splits:
            return self.finish(self.sums(inputs))
        if self.layer.by_channel:
            maps = inputs.reshape(
                len(inputs), len(self.part.channels), *self.layer.input[1:]
            )
            return self.finish(self.layer.sequence[0].product(maps, None).flatten(1))
        if self.layer.joins:
            return inputs
        if self._whole is None:
            self._whole = self._build_layer()
        outputs: torch.Tensor = self._whole(
            inputs.reshape(len(inputs), *self.layer.entering)
        )
        return outputs.flatten(1)

    def _finishing_layers(self, channels: Channels) -> nn.Sequential:
        """Return the operations after the sums for some channels: a narrower normalisation, an activation."""
        if channels not in self._following:
            modules = nn.Sequential()
            for layer, state in zip(
                self.layer.sequence[1:], self._states[1:], strict=True
            ):
                module = layer.build((len(channels), 1, 1), torch.Generator())
                own = {
                    name: pick(tensor, 0, channels, self.part.channels)
                    for name, tensor in state.items()
                }
                module.load_state_dict(own, strict=False, assign=True)
                modules.append(module)
            self._following[channels] = modules.train(self._training)
        return self._following[channels]

    def _build_layer(self) -> nn.Sequential:
        modules, entering = (
            nn.Sequential(),
            shapes(self.layer.sequence, self.layer.entering),
        )
        for layer, shape, state in zip(
            self.layer.sequence, entering, self._states, strict=False
        ):
            module = layer.build(shape, torch.Generator())
            module.load_state_dict(state, strict=False, assign=True)
            modules.append(module)
        return modules.train(self._training)


class SlicedShape:
    """The result shapes of `SlicedLayer` in inference, without computation: meta tensors of torch."""

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
        return self._empty_output(inputs, self.part.rows if rows is None else rows)

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
        entering = (inputs.shape[2] + top + bottom, inputs.shape[3] + left + right)
        pixels = [(size - window.kernel) // window.stride + 1 for size in entering]
        return torch.empty(
            (len(inputs), self.layer.output_channels, *pixels), device="meta"
        )

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output shape of the whole layer, or of some channels: (samples, elements)."""
        if self.layer.joins:
            return inputs
        whole = range(self.layer.output_channels)
        return self._empty_output(
            inputs, self.part.channels if self.layer.by_channel else whole
        )

    def _empty_output(self, inputs: torch.Tensor, channels: Channels) -> torch.Tensor:
        return torch.empty(
            (len(inputs), len(channels) * self.layer.pixels), device="meta"
        )


@dataclass(frozen=True)
class DenseStep:
    """One forward waiting for its gradient."""

    inputs: torch.Tensor
    """(samples, inputs)."""
    weight: torch.Tensor
    """(neurons, inputs)."""
    outputs: torch.Tensor
    """(samples, neurons)."""
    rectified: bool

    def of_sums(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the ReLU's input from the gradient of its output, both (samples, neurons)."""
        return gradient * (self.outputs > 0) if self.rectified else gradient

    def of_inputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs, (samples, inputs), from `of_sums`."""
        return sums @ self.weight

    def of_parameters(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of weight, (neurons, inputs), and bias, (neurons,), from `of_sums`."""
        return sums.T @ self.inputs, sums.sum(dim=0)


def is_dense(layer: GraphLayer) -> bool:
    """Return whether a layer is fully connected and followed by a ReLU at most."""
    first, *others = layer.sequence or (None,)
    return isinstance(first, Linear) and others in ([], [ReLU()])


def dense_forward(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rectified: bool,
) -> torch.Tensor:
    """Return the outputs, (samples, neurons), of inputs, (samples, inputs)."""
    sums = inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)
    return sums.relu_() if rectified else sums
