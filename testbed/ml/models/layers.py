"""Layers as frozen descriptions: shapes, parameters, FLOPs and divisions; torch modules only on request.

FLOPs are those of convolutions and matrix products, a multiply and an add being two, biases excluded: the convention of
torch's FLOP counter and of the papers. Activations, pooling and normalisation have none: their cost is their memory
traffic, `Layer.accesses`, on devices with a rate for it.

Initial weights are uniform, bounded by the number of connections of a neuron. LeCun's bound is the default: torch's own
shrinks the signal by 2.4 with every layer, and a chain of layers then needs epochs to begin to learn; He's wider one
made some seeds of the small networks unstable at a learning rate of 0.05 with momentum 0.9.
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


def initial_bound(how: Initialisation, weight: Shape) -> float:
    """Return the bound on the absolute initial weights of a tensor (outputs, inputs, ...).

    With f inputs and g outputs of a neuron, each times the size of the kernel: LeCun et al. (1998) sqrt(3 / f), He et
    al. (2015) sqrt(6 / f), Glorot and Bengio (2010) sqrt(6 / (f + g)), torch's default for linear and convolutional
    layers sqrt(1 / f).

    >>> initial_bound("lecun", (10, 300))
    0.1
    """
    outputs, inputs, *kernel = weight
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
        case _:
            return math.sqrt(3 / fan_in)


Division = Literal["weights", "channels", "values", "flattens", "moves", "no"]
"""How several devices can share a layer.

``weights``: by output channels, each from all of the input, and by input channels, whose sums over the devices are the
outputs. ``channels``: each output channel is made of one input channel. ``values``: each value by itself, with no more
than the parameters of its channel, so the device that finishes the channel also computes this layer. ``flattens``: the
values stay in their order, so nothing is done. ``moves``: values change places, and nothing is computed. ``no``: as a
whole only.
"""

_BLOCK = 1 << 18
"""Number of weights drawn at a time (1 MiB), to discard those not kept before the next block."""


@dataclass(frozen=True)
class PixelWindow:
    """The square window of input pixels, ``kernel`` x ``kernel``, read for one output pixel."""

    kernel: int
    stride: int
    """Pixels between the windows of neighbouring output pixels."""
    padding: int
    """Pixels added at each edge of the input."""
    fill: float = 0.0
    """The value of padded pixels."""


@dataclass(frozen=True)
class Layer:
    """A frozen description of one layer; the defaults describe an element-wise layer.

    A description has no input size: the argument ``shape`` of a method is the shape of the layer's input for one
    sample, (channels, height, width) or (features,).
    """

    # Not compared: a network is the same whatever its initial weights.
    initialisation: Initialisation = field(
        default="lecun", kw_only=True, repr=False, compare=False
    )
    """Distribution of the initial weights."""

    @property
    def kind(self) -> Kind:
        """The kind selecting a device's rates."""
        return "activation"

    @property
    def division(self) -> Division:
        """How several devices can share the layer."""
        return "values"

    @property
    def window(self) -> PixelWindow | None:
        """Window of layers reading neighbouring pixels; None for the others."""
        return None

    @property
    def channel_values(self) -> int:
        """Values stored for each output channel beside the weights: a bias, a normalisation."""
        return 0

    def output(self, shape: Shape) -> Shape:
        """Output shape of the layer; raises ValueError for an unsuitable input."""
        return shape

    def weight_shape(self, shape: Shape) -> Shape:
        """(output channels, input channels, rows and columns of the kernel); () without one weight tensor."""
        return ()

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""
        channels = self.output(shape)[0]
        return self.weights(shape) + self.channel_values * channels

    def weights(self, shape: Shape) -> int:
        """Elements of weight matrices and kernels: the parameters without biases and normalisation parameters."""
        weight = self.weight_shape(shape)
        return math.prod(weight) if weight else 0

    def frozen_parameters(self, shape: Shape) -> int:
        """Number of frozen values, with `requires_grad` off."""
        return 0

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample: each weight is used once for each output pixel."""
        pixels = math.prod(self.output(shape)[1:])
        # A multiply and an add.
        return 2.0 * self.weights(shape) * pixels

    def activations(self, shape: Shape) -> int:
        """Values of all outputs within the layer for one sample, including its own output."""
        return math.prod(self.output(shape))

    def accesses(self, shape: Shape) -> int:
        """Values forward reads and writes for one sample: inputs and outputs, without weights."""
        return math.prod(shape) + math.prod(self.output(shape))

    def cost(self, shape: Shape) -> Cost:
        """Return the cost of forward for one sample."""
        accessed = BYTES_PER_VALUE * self.accesses(shape)
        weights = BYTES_PER_VALUE * self.weights(shape)
        return Cost(self.flops(shape), accessed, weights, self.kind)

    def min_samples(self, shape: Shape) -> int:
        """Minimum batch size in training: the statistics of a single value are undefined."""
        return 1

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module with weights drawn from ``generator``; raises TypeError for layers without
        a module.
        """
        raise TypeError(f"{type(self).__name__} has no torch module of its own")

    def with_initialisation(self, how: Initialisation) -> Self:
        """Return the same layer with another initialisation."""
        return replace(self, initialisation=how)

    def draw(
        self,
        shape: Shape,
        generator: torch.Generator,
        part: Slice,
    ) -> dict[str, torch.Tensor]:
        """Return the slice ``part`` of the weights drawn by `build`, by name in the module; empty tensors are omitted.

        The generator advances as in `build`, whatever the slice: so each device's later layers equal those of the whole
        model. An indivisible layer is returned whole.
        """
        weight = self.weight_shape(shape)
        if not weight:
            return {}
        limit = initial_bound(self.initialisation, weight)
        kernels = _draw_slice(weight, generator, part, limit)
        tensors = {}
        if kernels.numel():
            tensors["weight"] = kernels
        if not self.channel_values:
            return tensors
        bias = torch.zeros(len(part.channels))
        # torch draws biases as well; the published schemes begin with zeros.
        if self.initialisation == "torch":
            all_biases = torch.empty(weight[0])
            all_biases.uniform_(-limit, limit, generator=generator)
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
        """Return the layer's output for some channels, without bias; for the divisions ``weights`` and ``channels``.

        ``inputs`` is (samples, input channels, ...), ``weight`` (output channels, input channels, ...) of the same
        channels; None for a layer without weights. ``padding`` replaces the layer's own, for a tile that has been
        padded. Raises TypeError for other divisions.
        """
        raise TypeError(f"{type(self).__name__} is not computed channel by channel")


def shapes_through(layers: Sequence[Layer], shape: Shape) -> list[Shape]:
    """Return the input shape of the first layer, then the output shape of each; raises ValueError for unsuitable
    layers.

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
    """Build layers in a row, drawing their weights in this order.

    >>> build_sequence([Linear(8), ReLU()], (4,), torch.Generator().manual_seed(1))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
    )
    """
    modules = []
    # A shape more than there are layers: the last one is the output of the row.
    shapes = shapes_through(layers, shape)
    for layer, input_shape in zip(layers, shapes, strict=False):
        modules.append(layer.build(input_shape, generator))
    return nn.Sequential(*modules)


def _check_image(shape: Shape, layer: str) -> tuple[int, int, int]:
    """Return the shape of an image; raises ValueError naming the layer for other inputs."""
    if len(shape) != 3:
        raise ValueError(f"{layer} needs (channels, height, width), not {shape}")
    return shape


def _window_count(size: int, window: PixelWindow, layer: str) -> int:
    """Return the number of window positions along an axis of ``size`` pixels; raises ValueError if there are none."""
    padded = size + 2 * window.padding
    positions = (padded - window.kernel) // window.stride + 1
    if padded < window.kernel or positions < 1:
        raise ValueError(
            f"{layer} of kernel {window.kernel} does not fit into {size} pixels with padding {window.padding}"
        )
    return positions


def _draw_slice(
    weight: Shape,
    generator: torch.Generator,
    part: Slice,
    limit: float,
) -> torch.Tensor:
    """Draw a weight tensor between ``-limit`` and ``limit`` in blocks of rows; return a slice of the tensor.

    ``weight`` is the shape of the whole tensor, (output channels, input channels, rows and columns of the kernel).
    """
    rows, columns, *kernel = weight
    values_per_row = columns * math.prod(kernel)
    step = max(1, _BLOCK // values_per_row)
    kept = torch.empty(len(part.rows), len(part.columns), *kernel)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        # Blocks that are not kept are drawn as well: the numbers after them depend on it.
        block = torch.empty(last - first, columns, *kernel)
        block.uniform_(-limit, limit, generator=generator)
        # The rows of the slice rise, so those of a block are neighbours in the slice.
        begin = bisect_left(part.rows, first)
        end = bisect_left(part.rows, last)
        if begin < end:
            rows_of_block = part.rows[begin:end]
            block = pick(block, 0, rows_of_block, range(first, last))
            kept[begin:end] = pick(block, 1, part.columns)
    return kept


def _assign_weights(module: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Give a module of the meta device its weights, by name.

    On the meta device torch draws nothing, so its global generator is left alone. The module's own ``to_empty`` would
    import sympy on the way: a second and 48 MB on every device.
    """
    for name, values in state.items():
        setattr(module, name, torch.nn.Parameter(values))
    return module


@dataclass(frozen=True)
class ReLU(Layer):
    """max(0, x); with ``ceiling`` 6 the ReLU6 of MobileNet."""

    ceiling: float | None = None

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        if self.ceiling is None:
            return nn.ReLU()
        return nn.Hardtanh(0.0, self.ceiling)


@dataclass(frozen=True)
class LeakyReLU(Layer):
    """x for positive values, ``slope`` x for others."""

    slope: float = 0.1

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        return nn.LeakyReLU(self.slope)


@dataclass(frozen=True)
class Activation(Layer):
    """Another activation of `torch.nn` by module name, with its default arguments."""

    name: str

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module."""
        module: nn.Module = getattr(nn, self.name)()
        return module


@dataclass(frozen=True)
class Reorganise(Layer):
    """Darknet's reorganisation layer: fewer pixels, more channels, in its own order of the values."""

    stride: int = 2

    division = "moves"

    def output(self, shape: Shape) -> Shape:
        """(channels stride^2, height / stride, width / stride); raises ValueError if the stride does not divide the
        sides.
        """
        channels, height, width = _check_image(shape, "Reorganise")
        stride = self.stride
        pixels = stride**2
        # The channels, too, since Darknet reads them as fewer and larger images: see `DarknetReorganise`.
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

    Masks come from torch's global generator, seeded by the trainer for each unit and batch (`testbed.ml.layers.shard`),
    so they are independent of the cuts and of other devices in the process.
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
    stride: int | None = None
    """None is the kernel's size."""
    padding: int = 0

    kind = "pooling"
    division = "channels"

    @property
    def window(self) -> PixelWindow:
        """The pooling window; padding is never the largest value."""
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
        around = self.padding if padding is None else padding
        return functional.max_pool2d(inputs, self.kernel, self.stride, around)

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

    Each micro-batch is normalised by its own statistics, so a split batch does not give the gradients of the whole one.
    Running statistics belong to the unit's state, with its weights: they are transmitted and replicated together. They
    have no versions, since training never reads them; each forward adds to them, in the order of the batches.
    """

    kind = "normalisation"
    channel_values = 4  # scale, shift, running mean and variance

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
        """Return the identity normalisation with fresh statistics; nothing is random."""
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
    """Square convolution; ``groups`` equal to the input channels makes it depthwise.

    >>> layer = Conv2d(16, padding=1)
    >>> layer.output((3, 32, 32)), layer.parameters((3, 32, 32))
    ((16, 32, 32), 448)
    >>> layer.flops((3, 32, 32)) == 2 * 16 * 3 * 3 * 3 * 32 * 32
    True
    """

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 0
    groups: int = 1
    bias: bool = True

    @property
    def kind(self) -> Kind:
        """The kind selecting a device's rates."""
        # A device may have a rate for each: convolutions of these kinds use a processor differently well.
        if self.groups > 1:
            return "depthwise"
        return "pointwise" if self.kernel == 1 else "convolution"

    @property
    def division(self) -> Division:
        """By output and input channels; indivisible with groups, since no device would need the complete input."""
        return "weights" if self.groups == 1 else "no"

    @property
    def window(self) -> PixelWindow:
        """The kernel's window."""
        return PixelWindow(self.kernel, self.stride, self.padding)

    @property
    def channel_values(self) -> int:
        """The bias."""
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
        around = self.padding if padding is None else padding
        return functional.conv2d(
            inputs, weight, stride=self.stride, padding=around, groups=self.groups
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
    """Fully connected.

    >>> layer = Linear(10)
    >>> layer.output((64,)), layer.parameters((64,)), layer.flops((64,))
    ((10,), 650, 1280.0)
    """

    features: int
    bias: bool = True

    kind = "linear"
    division = "weights"

    @property
    def channel_values(self) -> int:
        """The bias."""
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


def _whole_slice(weight: Shape) -> Slice:
    """Return the slice that is a whole layer, from the shape of its weights."""
    outputs = range(weight[0])
    inputs = range(weight[1])
    return Slice(rows=outputs, columns=inputs, channels=outputs)


@dataclass(frozen=True)
class Residual(Layer):
    """A block added to its input, with a ``shortcut`` layer if the shapes differ."""

    block: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    # Devices would have to exchange the values within the block.
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
        """Each layer of block and shortcut with its input shape; both paths begin with the same input."""
        inner: list[tuple[Layer, Shape]] = []
        for path in (self.block, self.shortcut):
            inner += zip(path, shapes_through(path, shape), strict=False)
        return inner

    def parameters(self, shape: Shape) -> int:
        """Trained values of block and shortcut."""
        values = 0
        for layer, input_shape in self._inner_layers(shape):
            values += layer.parameters(input_shape)
        return values

    def weights(self, shape: Shape) -> int:
        """Elements of the kernels of block and shortcut."""
        elements = 0
        for layer, input_shape in self._inner_layers(shape):
            elements += layer.weights(input_shape)
        return elements

    def flops(self, shape: Shape) -> float:
        """FLOPs of block and shortcut; only matrix products count, and not the sum of the two."""
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
        """Return all initial weights, for any slice but an empty one."""
        # Built in any case: the generator has to advance.
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
