"""Layers as plain descriptions: shapes, parameters, FLOPs and divisions among devices, computed without torch.

`Layer.build` makes the torch module of a description. Only then, and in `Layer.draw` and `Layer.product`, torch is
imported.

FLOPs are those of convolutions and matrix products, a multiply and an add being two, biases excluded: the convention of
torch's FLOP counter and of the papers. Activations, pooling and normalisation have no FLOPs: they cost the time of
their memory traffic, `Layer.accesses`, on devices whose profile has a memory rate.

Initial weights are uniform, with a bound that depends on the number of connections of a neuron (`initial_bound`).
LeCun's bound is the default. Torch's bound shrinks the signal by 2.4 with every layer, and a chain of layers then needs
epochs to begin to learn; He's wider bound made some seeds of the small networks unstable at a learning rate of 0.05
with momentum 0.9.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from testbed.device import Cost, Kind
from testbed.ml.lazy import functional, nn, torch
from testbed.ml.models.shapes import BYTES_PER_VALUE, Shape
from testbed.ml.models.slices import Slice, pick
from testbed.ml.workload import Initialisation

Division = Literal["weights", "channels", "values", "flattens", "moves", "no"]
"""How several devices can share a layer.

``weights``: by output channels, each of which needs the whole input, or by input channels, with the sums over the
devices as outputs. ``channels``: each output channel depends on the same input channel only. ``values``: each value
depends on one input value and on the parameters of its channel only, so the device that has the input also computes
this layer. ``flattens``: the values stay in their order, so nothing is done. ``moves``: values change places, and
nothing is computed. ``no``: one device computes the whole layer.
"""
_VALUES_PER_BLOCK = 1 << 18
"""Number of weights drawn at a time, 1 MiB: a device draws all weights of a layer, but stores its slice alone."""


def initial_bound(how: Initialisation, weight_shape: Shape) -> float:
    """Return the largest absolute value of the initial weights of a tensor (outputs, inputs, ...).

    With f inputs and g outputs of a neuron, each times the size of the kernel: LeCun et al. (1998) sqrt(3 / f), He et
    al. (2015) sqrt(6 / f), Glorot and Bengio (2010) sqrt(6 / (f + g)), torch's default for linear and convolutional
    layers sqrt(1 / f).

    >>> initial_bound("lecun", (10, 300))
    0.1
    """
    outputs, inputs, *kernel = weight_shape
    kernel_size = math.prod(kernel)
    fan_in = inputs * kernel_size
    match how:
        case "he":
            return math.sqrt(6 / fan_in)
        case "glorot":
            fan_out = outputs * kernel_size
            return math.sqrt(6 / (fan_in + fan_out))
        case "torch":
            return math.sqrt(1 / fan_in)
        case "lecun":
            return math.sqrt(3 / fan_in)


@dataclass(frozen=True)
class PixelWindow:
    """The square window of input pixels read for one output pixel."""

    kernel: int
    """Height and width of the window, in pixels."""
    stride: int
    """Distance between the windows of neighbouring output pixels, in pixels."""
    padding: int
    """Pixels added at each edge of the input."""
    fill: float = 0.0
    """The value of padded pixels."""


@dataclass(frozen=True)
class Layer:
    """A description of one layer; the defaults describe an element-wise layer without parameters.

    A description has no input size: the argument ``shape`` of a method is the shape of the layer's input for one
    sample, (channels, height, width) or (features,).
    """

    # Not compared: layers with different initial weights are equal to planners.
    initialisation: Initialisation = field(
        default="lecun", kw_only=True, repr=False, compare=False
    )
    """Distribution of the initial weights."""

    @property
    def kind(self) -> Kind:
        """The kind of work; a device may have a speed for each kind."""
        return "activation"

    @property
    def division(self) -> Division:
        """How several devices can share the layer."""
        return "values"

    @property
    def window(self) -> PixelWindow | None:
        """Window of a layer that reads neighbouring pixels, such as a convolution; None for any other layer."""
        return None

    @property
    def channel_values(self) -> int:
        """Values stored for each output channel beside the weights: a bias, a normalisation."""
        return 0

    def output(self, shape: Shape) -> Shape:
        """Output shape of the layer; raises ValueError for an unsuitable input."""
        return shape

    def weight_shape(self, shape: Shape) -> Shape:
        """(output channels, input channels, rows and columns of the kernel); () for a layer without weights, or with
        several weight tensors.
        """
        return ()

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""
        channels = self.output(shape)[0]
        return self.weights(shape) + self.channel_values * channels

    def weights(self, shape: Shape) -> int:
        """Number of elements of matrices and kernels: the parameters without biases and normalisation parameters."""
        weight_shape = self.weight_shape(shape)
        # The product of no sizes would be 1.
        return math.prod(weight_shape) if weight_shape else 0

    def frozen_parameters(self, shape: Shape) -> int:
        """Number of frozen values: parameters whose `requires_grad` is off."""
        return 0

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample: each weight is used once for each output pixel."""
        pixels = math.prod(self.output(shape)[1:])
        # A multiply and an add.
        return 2.0 * self.weights(shape) * pixels

    def activations(self, shape: Shape) -> int:
        """Number of values kept for backward for one sample: the output, and all intermediate results of a block."""
        return math.prod(self.output(shape))

    def accesses(self, shape: Shape) -> int:
        """Number of values read and written by forward for one sample: inputs and outputs, without weights."""
        return math.prod(shape) + math.prod(self.output(shape))

    def cost(self, shape: Shape) -> Cost:
        """Return the cost of forward for one sample."""
        accessed = BYTES_PER_VALUE * self.accesses(shape)
        weights = BYTES_PER_VALUE * self.weights(shape)
        return Cost(
            flops=self.flops(shape), accessed=accessed, weights=weights, kind=self.kind
        )

    def min_samples(self, shape: Shape) -> int:
        """Minimum batch size in training: more than one for a normalisation whose variance would be undefined."""
        return 1

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module with weights drawn from ``generator``.

        Raises TypeError for a layer that only the whole model can build (`MeasuredUnit`).
        """
        raise TypeError(f"{type(self).__name__} is built by its model, not alone")

    def with_initialisation(self, how: Initialisation) -> Self:
        """Return the same layer with another initialisation."""
        return replace(self, initialisation=how)

    def draw(
        self,
        shape: Shape,
        generator: torch.Generator,
        part: Slice,
    ) -> dict[str, torch.Tensor]:
        """Draw initial weights as `build` does; return the weights of the slice ``part`` by their names in the module.

        The generator advances as in `build`, whatever the slice, so the layers after this one get the same weights as
        in the whole model. Empty tensors are omitted. A slice of an indivisible layer is the whole layer.
        """
        weight_shape = self.weight_shape(shape)
        if not weight_shape:
            return {}
        bound = initial_bound(self.initialisation, weight_shape)
        weight = _draw_slice(weight_shape, generator, part, bound)
        tensors = {}
        if weight.numel():
            tensors["weight"] = weight
        if not self.channel_values:
            return tensors
        bias = torch.zeros(len(part.channels))
        # torch draws biases as well; the published schemes begin with zeros.
        if self.initialisation == "torch":
            output_channels = weight_shape[0]
            all_biases = torch.empty(output_channels)
            all_biases.uniform_(-bound, bound, generator=generator)
            bias = pick(all_biases, 0, part.channels)
        if bias.numel():
            tensors["bias"] = bias
        return tensors

    def product(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        padding: int | None = None,
    ) -> torch.Tensor:
        """Compute some output channels from some input channels, without bias.

        Args:
            inputs: (samples, input channels, ...).
            weight: (output channels, input channels, ...) of the same input channels; None for a layer without weights.
            padding: replaces the layer's padding, for a tile that is already padded; None for the layer's padding.

        Raises TypeError unless the layer's `division` is ``weights`` or ``channels``.
        """
        raise TypeError(f"{type(self).__name__} is not computed channel by channel")


def shapes_through(layers: Sequence[Layer], shape: Shape) -> list[Shape]:
    """Return the input shape of the first layer, then the output shape of each layer.

    Raises ValueError for a layer that does not accept the output of the layer before.

    >>> shapes_through([Conv2d(16, padding=1), MaxPool2d(), Flatten()], (1, 8, 8))
    [(1, 8, 8), (16, 8, 8), (16, 4, 4), (256,)]
    """
    shapes = [shape]
    for layer in layers:
        shapes.append(layer.output(shapes[-1]))
    return shapes


def build_sequence(
    layers: Sequence[Layer], shape: Shape, generator: torch.Generator
) -> nn.Sequential:
    """Build a sequence of layers, drawing their weights in the same order.

    >>> build_sequence([Linear(8), ReLU()], (4,), torch.Generator().manual_seed(1))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
    )
    """
    modules = []
    shapes = shapes_through(layers, shape)
    # Not strict: there is one shape more than there are layers, the output of the last layer.
    for layer, input_shape in zip(layers, shapes, strict=False):
        modules.append(layer.build(input_shape, generator))
    return nn.Sequential(*modules)


def _check_image(shape: Shape, layer_name: str) -> tuple[int, int, int]:
    """Return the shape of an image; raises ValueError naming the layer for other inputs."""
    if len(shape) != 3:
        raise ValueError(f"{layer_name} needs (channels, height, width), not {shape}")
    return shape


def _window_count(size: int, window: PixelWindow, layer_name: str) -> int:
    """Return the number of window positions along an axis of ``size`` pixels; raises ValueError if none fits."""
    padded_size = size + 2 * window.padding
    positions = (padded_size - window.kernel) // window.stride + 1
    if padded_size < window.kernel or positions < 1:
        raise ValueError(
            f"{layer_name} of kernel {window.kernel} does not fit into {size} pixels with padding {window.padding}"
        )
    return positions


def _draw_slice(
    weight_shape: Shape,
    generator: torch.Generator,
    part: Slice,
    bound: float,
) -> torch.Tensor:
    """Draw a weight tensor between ``-bound`` and ``bound`` in blocks of rows; return a slice of the tensor.

    ``weight_shape`` is that of the whole tensor, (output channels, input channels, rows and columns of the kernel).
    """
    rows, columns, *kernel = weight_shape
    values_per_row = columns * math.prod(kernel)
    rows_per_block = max(1, _VALUES_PER_BLOCK // values_per_row)
    drawn = torch.empty(len(part.rows), len(part.columns), *kernel)
    for block_start in range(0, rows, rows_per_block):
        block_stop = min(block_start + rows_per_block, rows)
        # Blocks outside of the slice are drawn as well, since the random numbers after them depend on it.
        block = torch.empty(block_stop - block_start, columns, *kernel)
        block.uniform_(-bound, bound, generator=generator)
        # The rows of the slice are ascending, so the rows from one block are consecutive in the slice.
        begin = bisect_left(part.rows, block_start)
        end = bisect_left(part.rows, block_stop)
        if begin < end:
            block_rows = range(block_start, block_stop)
            block = pick(block, 0, part.rows[begin:end], block_rows)
            drawn[begin:end] = pick(block, 1, part.columns)
    return drawn


def _assign_weights(module: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Replace the weights of a module on the meta device by the tensors of ``state``, by name.

    Modules are constructed on the meta device because torch then draws no weights from its global generator. Torch's
    method for moving a module from there, ``to_empty``, imports sympy: a second and 48 MB on every device.
    """
    for name, values in state.items():
        setattr(module, name, torch.nn.Parameter(values))
    return module


@dataclass(frozen=True)
class ReLU(Layer):
    """max(0, x); with a ``ceiling`` of 6 the ReLU6 of MobileNet, min(max(0, x), 6)."""

    ceiling: float | None = None

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        if self.ceiling is None:
            return nn.ReLU()
        return nn.Hardtanh(0.0, self.ceiling)


@dataclass(frozen=True)
class LeakyReLU(Layer):
    """x for positive values, ``slope`` times x for others."""

    slope: float = 0.1

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.LeakyReLU(self.slope)


@dataclass(frozen=True)
class Activation(Layer):
    """Any other element-wise activation of `torch.nn`, with default arguments."""

    name: str
    """Name of the module, such as "GELU"."""

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        module: nn.Module = getattr(nn, self.name)()
        return module


@dataclass(frozen=True)
class Reorganise(Layer):
    """Darknet's reorganisation layer: fewer pixels, more channels, in the order of `DarknetReorganise`."""

    stride: int = 2

    division = "moves"

    def output(self, shape: Shape) -> Shape:
        """(channels stride^2, height / stride, width / stride).

        Raises ValueError if the stride does not divide height and width, or the stride's square the channels.
        """
        channels, height, width = _check_image(shape, "Reorganise")
        stride = self.stride
        pixels = stride**2
        # Darknet reads the channels as fewer and larger images, so their number has to be divisible as well.
        if channels % pixels or height % stride or width % stride:
            raise ValueError(
                f"Reorganise by {stride} needs channels that {pixels} divides and pixels that "
                f"{stride} divides, not {shape}"
            )
        return (channels * pixels, height // stride, width // stride)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        from testbed.ml.models.modules import DarknetReorganise

        return DarknetReorganise(self.stride)


@dataclass(frozen=True)
class Dropout(Layer):
    """Sets random values to zero in training.

    The random numbers come from torch's global generator, which `testbed.ml.layers.shard` seeds for each unit and
    batch, so they are independent of the cuts and of other devices in the process.
    """

    probability: float = 0.5

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.Dropout(self.probability)


@dataclass(frozen=True)
class Flatten(Layer):
    """(channels, height, width) to (features,)."""

    division = "flattens"

    def output(self, shape: Shape) -> Shape:
        """One axis with all values."""
        return (math.prod(shape),)

    def accesses(self, shape: Shape) -> int:
        """Zero: torch returns a view of the same values."""
        return 0

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.Flatten()


@dataclass(frozen=True)
class MaxPool2d(Layer):
    """The largest value of each window."""

    kernel: int = 2
    """Height and width of the window, in pixels."""
    stride: int | None = None
    """Distance between windows in pixels; None for the size of the window."""
    padding: int = 0
    """Pixels added at each edge of the input."""

    kind = "pooling"
    division = "channels"

    @property
    def window(self) -> PixelWindow:
        """The pooling window, padded with minus infinity, which is never the largest value."""
        stride = self.stride or self.kernel
        return PixelWindow(self.kernel, stride, self.padding, fill=-math.inf)

    def output(self, shape: Shape) -> Shape:
        """Same channels, fewer pixels; raises ValueError where the window does not fit."""
        channels, height, width = _check_image(shape, "MaxPool2d")
        rows = _window_count(height, self.window, "MaxPool2d")
        columns = _window_count(width, self.window, "MaxPool2d")
        return (channels, rows, columns)

    def product(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        padding: int | None = None,
    ) -> torch.Tensor:
        """Pool (samples, channels, height, width)."""
        if padding is None:
            padding = self.padding
        return functional.max_pool2d(inputs, self.kernel, self.stride, padding)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.MaxPool2d(self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class GlobalAveragePool2d(Layer):
    """The mean of each channel: (channels, height, width) to (channels,)."""

    kind = "pooling"
    division = "channels"

    def product(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        padding: int | None = None,
    ) -> torch.Tensor:
        """Map (samples, channels, height, width) to (samples, channels)."""
        return inputs.mean((2, 3))

    def output(self, shape: Shape) -> Shape:
        """One value for each channel."""
        return _check_image(shape, "GlobalAveragePool2d")[:1]

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        from testbed.ml.models.modules import ChannelMean

        return ChannelMean()


@dataclass(frozen=True)
class BatchNorm2d(Layer):
    """Normalisation by batch statistics in training and by running statistics in evaluation.

    Each micro-batch is normalised by its own statistics, so the gradients of several micro-batches differ from those of
    the undivided batch. Running statistics are transmitted and replicated together with the weights. Weights have
    versions in an asynchronous pipeline, running statistics have none: training never reads them, and each forward
    updates them, in the order of the batches.
    """

    kind = "normalisation"
    # Scale, shift, running mean and running variance.
    channel_values = 4

    def output(self, shape: Shape) -> Shape:
        """Return the input shape."""
        return _check_image(shape, "BatchNorm2d")

    def min_samples(self, shape: Shape) -> int:
        """Two for images of a single pixel, otherwise one."""
        return 2 if math.prod(shape[1:]) == 1 else 1

    def parameters(self, shape: Shape) -> int:
        """Scale and shift of each channel; the running statistics are not trained."""
        return 2 * shape[0]

    def draw(
        self,
        shape: Shape,
        generator: torch.Generator,
        part: Slice,
    ) -> dict[str, torch.Tensor]:
        """Return the initial values of torch for the channels of the slice; nothing is random."""
        channels = len(part.channels)
        if not channels:
            return {}
        values = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}
        tensors = {}
        for name, value in values.items():
            tensors[name] = torch.full((channels,), value)
        return tensors

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.BatchNorm2d(shape[0])


@dataclass(frozen=True)
class Conv2d(Layer):
    """Square convolution, depthwise if ``groups`` equals the number of input channels.

    >>> layer = Conv2d(16, padding=1)
    >>> layer.output((3, 32, 32)), layer.parameters((3, 32, 32))
    ((16, 32, 32), 448)
    >>> layer.flops((3, 32, 32)) == 2 * 16 * 3 * 3 * 3 * 32 * 32
    True
    """

    channels: int
    """Number of output channels."""
    kernel: int = 3
    """Height and width of the kernel, in pixels."""
    stride: int = 1
    padding: int = 0
    """Pixels added at each edge of the input."""
    groups: int = 1
    bias: bool = True

    @property
    def kind(self) -> Kind:
        """The kind of convolution; a device may have a speed for each kind."""
        # Processors reach different shares of their peak speed in convolutions of these kinds.
        if self.groups > 1:
            return "depthwise"
        return "pointwise" if self.kernel == 1 else "convolution"

    @property
    def division(self) -> Division:
        """``weights``; ``no`` with groups, since the formulas of slices assume that outputs need all input channels."""
        return "weights" if self.groups == 1 else "no"

    @property
    def window(self) -> PixelWindow:
        """The kernel's window."""
        return PixelWindow(self.kernel, self.stride, self.padding)

    @property
    def channel_values(self) -> int:
        """One for the bias, if any."""
        return int(self.bias)

    def output(self, shape: Shape) -> Shape:
        """(channels, height, width); raises ValueError where groups or the kernel do not fit."""
        input_channels, height, width = _check_image(shape, "Conv2d")
        if input_channels % self.groups or self.channels % self.groups:
            raise ValueError(
                f"Conv2d from {input_channels} to {self.channels} channels cannot have {self.groups} groups"
            )
        rows = _window_count(height, self.window, "Conv2d")
        columns = _window_count(width, self.window, "Conv2d")
        return (self.channels, rows, columns)

    def weight_shape(self, shape: Shape) -> Shape:
        """(output channels, input channels of a group, kernel, kernel)."""
        input_channels = shape[0] // self.groups
        return (self.channels, input_channels, self.kernel, self.kernel)

    def product(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        padding: int | None = None,
    ) -> torch.Tensor:
        """Convolve (samples, some input channels, height, width) to (samples, some output channels, height, width)."""
        assert weight is not None
        if padding is None:
            padding = self.padding
        return functional.conv2d(
            inputs, weight, stride=self.stride, padding=padding, groups=self.groups
        )

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        module = nn.Conv2d(
            shape[0],
            self.channels,
            self.kernel,
            self.stride,
            self.padding,
            groups=self.groups,
            bias=self.bias,
            device="meta",
        )
        whole = _whole_slice(self.weight_shape(shape))
        return _assign_weights(module, self.draw(shape, generator, whole))


@dataclass(frozen=True)
class Linear(Layer):
    """A fully connected layer.

    >>> layer = Linear(10)
    >>> layer.output((64,)), layer.parameters((64,)), layer.flops((64,))
    ((10,), 650, 1280.0)
    """

    features: int
    """Number of output features."""
    bias: bool = True

    kind = "linear"
    division = "weights"

    @property
    def channel_values(self) -> int:
        """One for the bias, if any."""
        return int(self.bias)

    def output(self, shape: Shape) -> Shape:
        """(features,); raises ValueError for a feature map as input."""
        if len(shape) != 1:
            raise ValueError(
                f"Linear needs (features,), not {shape}: put a Flatten before it"
            )
        return (self.features,)

    def weight_shape(self, shape: Shape) -> Shape:
        """(output features, input features)."""
        return (self.features, shape[0])

    def product(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        padding: int | None = None,
    ) -> torch.Tensor:
        """Map (samples, some input features) to (samples, some output features)."""
        assert weight is not None
        return functional.linear(inputs, weight)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        module = nn.Linear(shape[0], self.features, bias=self.bias, device="meta")
        whole = _whole_slice(self.weight_shape(shape))
        return _assign_weights(module, self.draw(shape, generator, whole))


def _whole_slice(weight_shape: Shape) -> Slice:
    """Return a whole layer as a slice, from the shape of the layer's weights."""
    outputs = range(weight_shape[0])
    inputs = range(weight_shape[1])
    return Slice(rows=outputs, columns=inputs, channels=outputs)


@dataclass(frozen=True)
class Residual(Layer):
    """The sum of a block's output and input, as in ResNet: block(x) + shortcut(x)."""

    block: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()
    """Layers that give the input the shape of the block's output; empty if the shapes are equal."""

    # To share a block, devices would have to exchange values within the block.
    division = "no"

    def with_initialisation(self, how: Initialisation) -> Self:
        """Return the same block with another initialisation of all inner layers."""
        block = tuple(layer.with_initialisation(how) for layer in self.block)
        shortcut = tuple(layer.with_initialisation(how) for layer in self.shortcut)
        return replace(self, block=block, shortcut=shortcut)

    def output(self, shape: Shape) -> Shape:
        """Shape of the sum; raises ValueError for different shapes of block and shortcut."""
        block = shapes_through(self.block, shape)[-1]
        shortcut = shapes_through(self.shortcut, shape)[-1]
        if block != shortcut:
            first, second = sorted([block, shortcut])
            raise ValueError(
                f"Residual adds {first} and {second}: give it a shortcut that fits"
            )
        return block

    def _inner_layers(self, shape: Shape) -> list[tuple[Layer, Shape]]:
        """The layers of block and shortcut, each with an input shape; both paths begin with the same input."""
        inner: list[tuple[Layer, Shape]] = []
        for path in (self.block, self.shortcut):
            # Not strict: there is one shape more than there are layers, the output of the last layer.
            inner += zip(path, shapes_through(path, shape), strict=False)
        return inner

    def parameters(self, shape: Shape) -> int:
        """Trained values of block and shortcut."""
        values = 0
        for layer, input_shape in self._inner_layers(shape):
            values += layer.parameters(input_shape)
        return values

    def weights(self, shape: Shape) -> int:
        """Number of elements of the kernels of block and shortcut."""
        elements = 0
        for layer, input_shape in self._inner_layers(shape):
            elements += layer.weights(input_shape)
        return elements

    def flops(self, shape: Shape) -> float:
        """FLOPs of block and shortcut; adding the two is no matrix product, and does not count."""
        flops = 0.0
        for layer, input_shape in self._inner_layers(shape):
            flops += layer.flops(input_shape)
        return flops

    def activations(self, shape: Shape) -> int:
        """Outputs within block and shortcut, and the sum."""
        values = math.prod(self.output(shape))
        for layer, input_shape in self._inner_layers(shape):
            values += layer.activations(input_shape)
        return values

    def accesses(self, shape: Shape) -> int:
        """Return the accesses of block, shortcut and sum."""
        values = self._sum_accesses(shape)
        for layer, input_shape in self._inner_layers(shape):
            values += layer.accesses(input_shape)
        return values

    def _sum_accesses(self, shape: Shape) -> int:
        """Number of values read and written by the sum."""
        # Each value of the sum is read from block and shortcut, and written once.
        return 3 * math.prod(self.output(shape))

    def cost(self, shape: Shape) -> Cost:
        """Return the cost of block, shortcut and sum; the sum counts as an activation."""
        accessed = BYTES_PER_VALUE * self._sum_accesses(shape)
        cost = Cost(accessed=accessed, kind="activation")
        for layer, input_shape in self._inner_layers(shape):
            cost += layer.cost(input_shape)
        return cost

    def min_samples(self, shape: Shape) -> int:
        """The largest minimum of the layers of block and shortcut."""
        samples = 1
        for layer, input_shape in self._inner_layers(shape):
            samples = max(samples, layer.min_samples(input_shape))
        return samples

    def draw(
        self,
        shape: Shape,
        generator: torch.Generator,
        part: Slice,
    ) -> dict[str, torch.Tensor]:
        """Return the initial weights of the whole block, or none if the slice is empty."""
        # Also for an empty slice, since the generator has to advance.
        state = self.build(shape, generator).state_dict()
        return dict(state) if part.rows or part.channels else {}

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module, with children ``block`` and ``shortcut``."""
        from testbed.ml.models.modules import Sum

        # Raises ValueError for shapes that cannot be added.
        self.output(shape)
        block = build_sequence(self.block, shape, generator)
        shortcut = build_sequence(self.shortcut, shape, generator)
        return Sum(OrderedDict(block=block, shortcut=shortcut))
