"""A neural network as a chain of units, the granularity of model cuts.

A unit reads the output of the previous unit or of the units it names (a route), so several tensors may cross a cut:
`Model.crossing`. Shapes, parameters and FLOPs are formulas over plain descriptions of layers, so planning never imports
torch; only ``build`` does. All quantities are per sample and float32 unless stated otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from testbed.common.seeds import derive
from testbed.device import Cost
from testbed.ml.fields import Fields
from testbed.ml.lazy import nn, torch
from testbed.ml.models.detection import Detector
from testbed.ml.models.layers import Layer, build_sequence, shapes_through
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT, Made, Shape

if TYPE_CHECKING:
    from testbed.ml.models.modules import Segment
    from testbed.ml.workload import Initialisation

BACKWARD_OVER_FORWARD = 2.0
"""Backward computes the gradient of the input and of the weights: two products for each one of forward."""


@dataclass(frozen=True)
class Unit:
    """An indivisible run of layers with its input shape."""

    name: str
    layers: tuple[Layer, ...]
    input: Shape
    """Shape of the inputs, joined along the first axis."""
    reads: tuple[int, ...] = ()
    """The units whose outputs are the inputs, in this order; empty for the previous unit."""
    joins: bool = True
    """Whether several inputs are joined along the first axis; otherwise ``input`` is all their values on one axis."""

    # A frozen dataclass may cache: nothing that these values depend on changes. Planners ask for them very often.

    @cached_property
    def _layer_inputs(self) -> list[tuple[Layer, Shape]]:
        """Each layer with its input shape."""
        return list(
            zip(self.layers, shapes_through(self.layers, self.input)[:-1], strict=True)
        )

    @cached_property
    def output(self) -> Shape:
        """Output shape of the unit."""
        return shapes_through(self.layers, self.input)[-1]

    @cached_property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(layer.parameters(shape) for layer, shape in self._layer_inputs)

    @cached_property
    def frozen(self) -> int:
        """Number of frozen values."""
        return sum(layer.frozen(shape) for layer, shape in self._layer_inputs)

    @cached_property
    def weights(self) -> int:
        """Elements of weight matrices and kernels: the parameters without biases and normalisation parameters."""
        return sum(layer.weights(shape) for layer, shape in self._layer_inputs)

    @property
    def multiplications(self) -> int:
        """Multiplications of forward for one sample."""
        return int(self.forward_flops) // 2

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return float(sum(layer.flops(shape) for layer, shape in self._layer_inputs))

    @cached_property
    def cost(self) -> Cost:
        """Cost of the forward of one sample; `forward_of` and `backward_of` derive the costs of a batch."""
        return sum((layer.cost(shape) for layer, shape in self._layer_inputs), Cost())

    @property
    def least_samples(self) -> int:
        """Minimum batch size in training; two if a layer normalises over samples alone."""
        return max(
            (layer.least_samples(shape) for layer, shape in self._layer_inputs),
            default=1,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trained values."""
        return BYTES_PER_VALUE * self.parameters

    @property
    def input_bytes(self) -> int:
        """Bytes of one sample entering the unit."""
        return BYTES_PER_VALUE * math.prod(self.input)

    @property
    def output_bytes(self) -> int:
        """Bytes of one sample leaving the unit."""
        return BYTES_PER_VALUE * math.prod(self.output)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of all layer outputs for one sample, kept for backward. Joining several inputs makes a copy."""
        values = sum(layer.activations(shape) for layer, shape in self._layer_inputs)
        if self.joins and len(self.reads) > 1:
            values += math.prod(self.input)
        return BYTES_PER_VALUE * values


@dataclass(frozen=True)
class Tied:
    """A trained weight used by several units, with a name and a copy in each of them.

    >>> tied = Tied(("0.embedding.weight", "3.head.weight"), values=640)
    >>> tied.units
    (0, 3)
    >>> tied.title
    'embedding.weight and head.weight'
    >>> tied.holders([0, 2])
    [0, 1]
    """

    names: tuple[str, ...]
    """The weight's names in the module of `Model.build`, in the order of the units."""
    values: int

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The units using the weight."""
        indices = [int(name.partition(".")[0]) for name in self.names]
        return tuple(dict.fromkeys(indices))

    @property
    def title(self) -> str:
        """The names of the weight in the network."""
        own_names = [name.partition(".")[2] for name in self.names]
        return " and ".join(dict.fromkeys(own_names))

    def holders(self, cuts: Sequence[int]) -> list[int]:
        """Return the stages using the weight; ``cuts`` are the first units of all stages."""
        return sorted({bisect_right(cuts, unit) - 1 for unit in self.units})


class Builder(Protocol):
    """Builds the modules of a network without layer descriptions."""

    def __call__(self, first: int, last: int, seed: int) -> list[nn.Module]:
        """Build units ``first`` to ``last`` (exclusive), each as a module of the unit's inputs."""

    def network(self, seed: int) -> nn.Module:
        """Build the whole network; its tensor names are those of the units without the unit index."""


@dataclass(frozen=True)
class Model:
    """A whole network; the output of its last unit is the model's output."""

    name: str
    input: Shape
    classes: int
    units: tuple[Unit, ...]
    detector: Detector | None = None
    """Decoder of the output as boxes; None for one value per class."""
    integers: bool = False
    """Whether samples are integers (int64), such as tokens, instead of float32."""
    fields: Fields = ()
    """The inputs in a row of numbers, for a network with several inputs; empty for a single input."""
    builder: Builder | None = None
    """Builds modules of a network without layer descriptions; None if all units have layers."""
    given: Mapping[str, torch.Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Values of frozen weights by their names in `build`; absent ones are drawn from the seed."""
    tied: tuple[Tied, ...] = ()
    """Trained weights used by several units."""

    def __post_init__(self) -> None:
        for index, unit in enumerate(self.units):
            inputs = [self.made(read) for read in self.reads(index)]
            arriving = joined(inputs, whole=unit.joins)
            if unit.input != arriving:
                raise ValueError(
                    f"unit '{unit.name}' takes {unit.input}, but {arriving} arrives"
                )
        if self.detector is None:
            # The last axis is that of the classes; those before it, if any, are of tokens.
            if self.output[-1:] != (self.classes,):
                raise ValueError(
                    f"{self.name} ends with {self.output}, not with one value for each of {self.classes} classes"
                )
            return
        channels = self.detector.channels(self.classes)
        if self.output[:1] != channels:
            raise ValueError(
                f"{self.name} ends with {self.output}, not with {channels[0]} channels for {self.classes} classes"
            )

    @property
    def undivided_reasons(self) -> tuple[str, ...]:
        """Reasons why units of a user's network cannot be cut further, with source lines."""
        reasons = []
        for unit in self.units:
            for layer in unit.layers:
                # Layers of the catalogue have no such attribute.
                reason = getattr(layer, "undivided_reason", "")
                if reason and reason not in reasons:
                    reasons.append(reason)
        return tuple(reasons)

    @property
    def output(self) -> Shape:
        """Output shape of the model."""
        return self.made(len(self.units) - 1)

    def made(self, index: int) -> Shape:
        """Return the shape of a unit's output, or of the model's input for `INPUT`."""
        return self.input if index == INPUT else self.units[index].output

    def reads(self, index: int) -> tuple[int, ...]:
        """Return the units whose outputs a unit reads; the previous unit by default."""
        return self.units[index].reads or (index - 1,)

    def tied_across(self, cut: int) -> Tied | None:
        """Return a trained weight used on both sides of a cut; None if no weight is shared across the cut."""
        for tied in self.tied:
            if tied.units[0] < cut <= tied.units[-1]:
                return tied
        return None

    @property
    def untied_parts(self) -> int:
        """Maximum number of contiguous parts without a shared trained weight."""
        return 1 + sum(
            self.tied_across(cut) is None for cut in range(1, len(self.units))
        )

    def crossing(self, cut: int) -> tuple[Made, ...]:
        """Return the tensors crossing the cut before unit ``cut``, in the order of the producing units.

        Before the first unit that is the model's input, after the last its output.

        >>> from testbed.ml.models.catalog import create
        >>> create("mlp", {"hidden": [32]}, (1, 8, 8), 10).crossing(1)
        ((0, (32,)),)
        """
        return self._crossings[cut]

    @cached_property
    def _crossings(self) -> tuple[tuple[Made, ...], ...]:
        """For each cut, the units before the cut whose outputs are read after the cut."""
        crossing: list[tuple[Made, ...]] = [((len(self.units) - 1, self.output),)]
        read_later: set[int] = set()
        # Backwards: the units read after a cut are those read after the next one, and by the unit between.
        for index in reversed(range(len(self.units))):
            read_later.discard(index)
            read_later.update(self.reads(index))
            crossing.append(
                tuple((read, self.made(read)) for read in sorted(read_later))
            )
        return tuple(reversed(crossing))

    def cut_bytes(self, cut: int) -> int:
        """Return the bytes of one sample that cross the cut before unit ``cut``.

        >>> from testbed.ml.models.catalog import create
        >>> create("mlp", {"hidden": [32]}, (1, 8, 8), 10).cut_bytes(1)
        128
        """
        values = sum(math.prod(shape) for _, shape in self.crossing(cut))
        return BYTES_PER_VALUE * values

    def weight_bytes(self, units: range) -> int:
        """Return the bytes of the trained values of consecutive units."""
        weights, _ = self._sums
        repeated = BYTES_PER_VALUE * self._repeated_values(units)
        return weights[units.stop] - weights[units.start] - repeated

    def _repeated_values(self, units: range) -> int:
        """Return the values counted several times in consecutive units because the units share them."""
        repeated = 0
        for tied in self.tied:
            copies = sum(unit in units for unit in tied.units)
            repeated += tied.values * max(0, copies - 1)
        return repeated

    def frozen_bytes(self, units: range) -> int:
        """Return the bytes of the frozen values of consecutive units."""
        part = self.units[units.start : units.stop]
        return BYTES_PER_VALUE * sum(unit.frozen for unit in part)

    def activation_bytes(self, units: range) -> int:
        """Return the bytes of the activations of consecutive units for one sample."""
        _, activations = self._sums
        return activations[units.stop] - activations[units.start]

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """For each cut, the bytes of weights and of activations before the cut.

        Planners query very many ranges of units; a difference of two sums answers each.
        """
        weights = accumulate((unit.weight_bytes for unit in self.units), initial=0)
        activations = accumulate(
            (unit.activation_bytes for unit in self.units), initial=0
        )
        return list(weights), list(activations)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        values = sum(unit.parameters for unit in self.units)
        return values - self._repeated_values(range(len(self.units)))

    @property
    def frozen(self) -> int:
        """Number of frozen values."""
        return sum(unit.frozen for unit in self.units)

    @property
    def weights(self) -> int:
        """Elements of all weight matrices and kernels."""
        return sum(unit.weights for unit in self.units)

    @property
    def multiplications(self) -> int:
        """Multiplications of forward for one sample."""
        return sum(unit.multiplications for unit in self.units)

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return sum(unit.forward_flops for unit in self.units)

    def initialised(self, how: Initialisation) -> Model:
        """Return the same network with another initialisation of all layers."""
        units = []
        for unit in self.units:
            layers = tuple(layer.initialised(how) for layer in unit.layers)
            units.append(replace(unit, layers=layers))
        return replace(self, units=tuple(units))

    def build(self, first: int, last: int, seed: int) -> Segment:
        """Build units ``first`` to ``last`` (exclusive) as one module containing one ``nn.Sequential`` per unit.

        The module maps the tensors crossing the cut before ``first`` to those crossing the cut before ``last``. Several
        tensors cross as one: flattened, and joined in the order of `crossing`. Child i of the result is unit ``first +
        i`` and is named by the unit's index in the whole model, so state dictionaries of shards of one model can be
        merged. Each unit's weights depend on ``seed`` and its index only: shards of one seed equal the same units of
        the whole model. No global state is changed, so devices sharing a process may build at the same time; a
        ``builder`` may use torch's global generator and restores its state. Raises ValueError for unit indices outside
        the model.
        """
        from testbed.ml.models.modules import Segment

        if not 0 <= first <= last <= len(self.units):
            raise ValueError(
                f"{self.name} has units 0 to {len(self.units)}, not {first} to {last}"
            )
        if self.builder is not None:
            built = self.builder(first, last, seed)
        else:
            built = [self._build_unit(index, seed) for index in range(first, last)]
        reads = [self.reads(index) for index in range(first, last)]
        crossings = [self.crossing(cut) for cut in range(first, last + 1)]
        segment = Segment(first, built, reads, crossings)
        if self.given:
            with torch.no_grad():
                for name, parameter in segment.named_parameters():
                    if name in self.given:
                        parameter.copy_(self.given[name])
        return segment

    def _build_unit(self, index: int, seed: int) -> nn.Module:
        from testbed.ml.models.modules import Joined

        unit = self.units[index]
        generator = torch.Generator().manual_seed(derive(seed, "weights", index))
        layers = build_sequence(unit.layers, unit.input, generator)
        return Joined(*layers) if len(unit.reads) > 1 else layers

    def whole(self, index: int) -> nn.Module:
        """Build a unit without layer descriptions, as a module of its flattened and joined inputs."""
        from testbed.ml.models.modules import SplitInputs

        assert self.builder is not None
        [unit] = self.builder(index, index + 1, 0)
        return SplitInputs(unit, [self.made(read) for read in self.reads(index)])


def cost_of(units: Sequence[Unit]) -> Cost:
    """Return the forward cost of one sample through units.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> cost_of(model.units).of().flops
    4736.0
    """
    return sum((unit.cost for unit in units), Cost())


def forward_of(cost: Cost, samples: int) -> Cost:
    """Return the forward cost of a batch from ``cost``, the cost of one sample: a batch reads the weights once.

    >>> batch = forward_of(Cost(flops=100.0, accessed=40, weights=20), samples=8).of()
    >>> batch.flops, batch.accessed, batch.weights
    (800.0, 320.0, 20.0)
    """
    return cost.scaled(flops=samples, accessed=samples, weights=1)


def backward_of(cost: Cost, samples: int) -> Cost:
    """Return the backward cost of a batch from ``cost``, the forward cost of one sample.

    A backward reads and writes a gradient for each value of the forward, reads the weights and writes their gradients.

    >>> backward_of(Cost(flops=100.0, accessed=40, weights=20), samples=8).of().flops
    1600.0
    """
    return cost.scaled(
        flops=BACKWARD_OVER_FORWARD * samples, accessed=samples, weights=2
    )


def joined(parts: Sequence[Shape], *, whole: bool = True) -> Shape:
    """Return the shape of tensors joined along the first axis; raises ValueError if their other axes differ.

    If not ``whole``, several tensors are flattened and joined along one axis.

    >>> joined([(16, 8, 8), (32, 8, 8)])
    (48, 8, 8)
    >>> joined([(16, 8, 8), (10,)], whole=False)
    (1034,)
    """
    if not whole and len(parts) > 1:
        return (sum(math.prod(part) for part in parts),)
    if len({part[1:] for part in parts}) > 1:
        names = " and ".join(map(str, parts))
        raise ValueError(f"{names} cannot be joined: they differ beyond the first axis")
    return (sum(part[0] for part in parts), *parts[0][1:])


def chain(
    name: str,
    shape: Shape,
    classes: int,
    layers: Sequence[tuple[str, Sequence[Layer]]],
    routes: Mapping[int, tuple[int, ...]] | None = None,
    detector: Detector | None = None,
) -> Model:
    """Create a model from named runs of layers, deriving all shapes from the input shape.

    ``routes`` maps units, by index, to the units they read instead of the previous one; their outputs are joined along
    the channels. Raises ValueError for routes to later units.

    >>> from testbed.ml.models.layers import Flatten, Linear, ReLU
    >>> hidden = [Flatten(), Linear(32), ReLU()]
    >>> model = chain("mlp", (1, 8, 8), 10, [("hidden", hidden), ("output", [Linear(10)])])
    >>> model.units[1].input
    (32,)
    >>> model.parameters
    2410
    """
    routes = routes or {}
    for index, wanted in routes.items():
        is_distinct = len(set(wanted)) == len(wanted) > 0
        if not is_distinct or not all(INPUT <= read < index for read in wanted):
            raise ValueError(
                f"unit {index} reads {wanted}: name different units before it"
            )
    made = {INPUT: tuple(shape)}
    units: list[Unit] = []
    for index, (unit_name, run) in enumerate(layers):
        reads = routes.get(index, ())
        entering = joined([made[read] for read in reads or (index - 1,)])
        unit = Unit(unit_name, tuple(run), entering, reads)
        units.append(unit)
        made[index] = unit.output
    return Model(name, made[INPUT], classes, tuple(units), detector)
