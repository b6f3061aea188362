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
from testbed.ml.models.layers import Layer, sequence, shapes
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
    """Whether it reads several one after the other along the first axis; else it takes each as it is, and ``input`` is
    all their values along one axis."""

    @cached_property
    def _layer_inputs(self) -> list[tuple[Layer, Shape]]:
        """Each layer with its input shape."""
        return list(zip(self.layers, shapes(self.layers, self.input)[:-1], strict=True))

    @cached_property
    def output(self) -> Shape:
        """Output shape of the unit."""
        return shapes(self.layers, self.input)[-1]

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
        copied = math.prod(self.input) if self.joins and len(self.reads) > 1 else 0
        return BYTES_PER_VALUE * (
            copied
            + sum(layer.activations(shape) for layer, shape in self._layer_inputs)
        )


@dataclass(frozen=True)
class Tied:
    """A trained weight used by several units, with a name and a copy in each of them."""

    names: tuple[str, ...]
    """As `Model.build` names it, in the order of the units."""
    values: int

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The units using the weight."""
        return tuple(dict.fromkeys(int(name.partition(".")[0]) for name in self.names))

    @property
    def title(self) -> str:
        """The names of the weight in the network."""
        return " and ".join(
            dict.fromkeys(name.partition(".")[2] for name in self.names)
        )

    def holders(self, cuts: Sequence[int]) -> list[int]:
        """Return the stages using the weight, for stages with these cuts."""
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
            arriving = joined(
                [self.made(read) for read in self.reads(index)], whole=unit.joins
            )
            if unit.input != arriving:
                raise ValueError(
                    f"unit '{unit.name}' takes {unit.input}, but {arriving} arrives"
                )
        expected = (
            (self.classes,)
            if self.detector is None
            else self.detector.channels(self.classes)
        )
        # Without a detector the last axis is that of the classes; those before it, if any, are of tokens.
        ending = self.output[-1:] if self.detector is None else self.output[:1]
        if ending != expected:
            raise ValueError(
                f"{self.name} ends with {self.output}, not with "
                + (
                    "one value for each of"
                    if self.detector is None
                    else f"{expected[0]} channels for"
                )
                + f" {self.classes} classes"
            )

    @property
    def held(self) -> tuple[str, ...]:
        """Reasons why units of a user's network cannot be cut further, with source lines."""
        reasons = (
            getattr(layer, "held", "") for unit in self.units for layer in unit.layers
        )
        return tuple(dict.fromkeys(filter(None, reasons)))

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
        return next(
            (tied for tied in self.tied if tied.units[0] < cut <= tied.units[-1]), None
        )

    @property
    def untied_parts(self) -> int:
        """Maximum number of contiguous parts without a shared trained weight."""
        return 1 + sum(
            self.tied_across(cut) is None for cut in range(1, len(self.units))
        )

    def crossing(self, cut: int) -> tuple[Made, ...]:
        """Return the tensors crossing the cut before unit ``cut``, in the order of the producing units.

        Before the first unit that is the model's input, after the last its output.
        """
        return self._crossings[cut]

    @cached_property
    def _crossings(self) -> tuple[tuple[Made, ...], ...]:
        """For each cut, the units before the cut whose outputs are read after the cut."""
        crossing: list[tuple[Made, ...]] = [((len(self.units) - 1, self.output),)]
        later: set[int] = set()
        for index in reversed(range(len(self.units))):
            later = {read for read in later if read < index} | {*self.reads(index)}
            crossing.append(tuple((read, self.made(read)) for read in sorted(later)))
        return tuple(reversed(crossing))

    def cut_bytes(self, cut: int) -> int:
        """Return the bytes of one sample that cross the cut before unit ``cut``."""
        return BYTES_PER_VALUE * sum(
            math.prod(shape) for _, shape in self.crossing(cut)
        )

    def weight_bytes(self, units: range) -> int:
        """Return the bytes of the trained values of consecutive units."""
        return (
            self._sums[0][units.stop]
            - self._sums[0][units.start]
            - BYTES_PER_VALUE * self._repeated_values(units)
        )

    def _repeated_values(self, units: range) -> int:
        """Return the values counted several times in consecutive units because the units share them."""
        counts = (
            (tied.values, sum(unit in units for unit in tied.units))
            for tied in self.tied
        )
        return sum(values * (count - 1) for values, count in counts if count)

    def frozen_bytes(self, units: range) -> int:
        """Return the bytes of the frozen values of consecutive units."""
        return BYTES_PER_VALUE * sum(
            unit.frozen for unit in self.units[units.start : units.stop]
        )

    def activation_bytes(self, units: range) -> int:
        """Return the bytes of the activations of consecutive units for one sample."""
        return self._sums[1][units.stop] - self._sums[1][units.start]

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """For each cut, the bytes of weights and of activations before the cut, cached because planners query many
        parts.
        """
        weights = accumulate((unit.weight_bytes for unit in self.units), initial=0)
        return [*weights], [
            *accumulate((unit.activation_bytes for unit in self.units), initial=0)
        ]

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(unit.parameters for unit in self.units) - self._repeated_values(
            range(len(self.units))
        )

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
        units = (
            replace(unit, layers=tuple(layer.initialised(how) for layer in unit.layers))
            for unit in self.units
        )
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
        from testbed.ml.models.modules import Joined, Segment

        if not 0 <= first <= last <= len(self.units):
            raise ValueError(
                f"{self.name} has units 0 to {len(self.units)}, not {first} to {last}"
            )
        built: list[nn.Module] = []
        if self.builder is not None:
            built = self.builder(first, last, seed)
        else:
            for index in range(first, last):
                generator = torch.Generator().manual_seed(
                    derive(seed, "weights", index)
                )
                unit = self.units[index]
                layers = sequence(unit.layers, unit.input, generator)
                built.append(Joined(*layers) if len(unit.reads) > 1 else layers)
        reads = [self.reads(index) for index in range(first, last)]
        segment = Segment(
            first, built, reads, [self.crossing(cut) for cut in range(first, last + 1)]
        )
        with torch.no_grad():
            for name, parameter in segment.named_parameters() if self.given else ():
                if name in self.given:
                    parameter.copy_(self.given[name])
        return segment

    def whole(self, index: int) -> nn.Module:
        """Build a unit without layer descriptions, as a module of its flattened and joined inputs."""
        from testbed.ml.models.modules import SplitInputs

        assert self.builder is not None
        [unit] = self.builder(index, index + 1, 0)
        return SplitInputs(unit, [self.made(read) for read in self.reads(index)])


def cost_of(units: Sequence[Unit]) -> Cost:
    """Return the forward cost of one sample through units."""
    return sum((unit.cost for unit in units), Cost())


def forward_of(cost: Cost, samples: int) -> Cost:
    """Return the forward cost of a batch from ``cost``, the cost of one sample: a batch reads the weights once."""
    return cost.scaled(flops=samples, accessed=samples, weights=1)


def backward_of(cost: Cost, samples: int) -> Cost:
    """Return the backward cost of a batch from ``cost``, the forward cost of one sample.

    A backward reads and writes a gradient for each value of the forward, reads the weights and writes their gradients.
    """
    return cost.scaled(
        flops=BACKWARD_OVER_FORWARD * samples, accessed=samples, weights=2
    )


def joined(parts: Sequence[Shape], whole: bool = True) -> Shape:
    """Return the shape of tensors joined along the first axis, or flattened to one axis; raises ValueError if
    impossible.
    """
    if not whole and len(parts) > 1:
        return (sum(math.prod(part) for part in parts),)
    if len({part[1:] for part in parts}) > 1:
        raise ValueError(
            f"{' and '.join(map(str, parts))} cannot be joined: they differ beyond the first axis"
        )
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
    """
    routes = routes or {}
    for index, wanted in routes.items():
        if (
            not wanted
            or len(set(wanted)) < len(wanted)
            or not all(INPUT <= read < index for read in wanted)
        ):
            raise ValueError(
                f"unit {index} reads {wanted}: name different units before it"
            )
    made = {INPUT: tuple(shape)}
    units: list[Unit] = []
    for index, (unit_name, run) in enumerate(layers):
        entering = joined([made[read] for read in routes.get(index, (index - 1,))])
        units.append(Unit(unit_name, tuple(run), entering, routes.get(index, ())))
        made[index] = units[-1].output
    return Model(name, made[INPUT], classes, tuple(units), detector)
