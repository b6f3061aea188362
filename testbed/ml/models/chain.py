"""A neural network as a chain of units; methods cut models between units.

A unit reads the output of the previous unit, or the outputs of any earlier units, so several tensors may cross a cut:
`Model.crossing_tensors`. Cut i lies before unit i; cut 0 lies before the whole model, and the last cut behind it. A
route, as Darknet calls it, is a unit without layers: it only joins its inputs.

Parameters are trained values. Frozen parameters are stored and used, but not trained. Weights are the elements of
matrices and kernels alone, without biases and normalisation parameters.

Shapes, parameters and FLOPs are formulas over plain descriptions of layers, so planning never imports torch; only
``build`` does. A network from a user's file has no layer descriptions: torch traces and measures it
(`testbed.ml.models.own`). All quantities are for one sample, and values are float32, unless stated otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from testbed.common.seeds import derive
from testbed.device import Cost
from testbed.ml.fields import Fields
from testbed.ml.lazy import nn, torch
from testbed.ml.models.detection import Detector
from testbed.ml.models.layers import Layer, build_sequence, shapes_through
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT, Shape, UnitOutput

if TYPE_CHECKING:
    from testbed.ml.models.modules import Segment
    from testbed.ml.workload import Initialisation

BACKWARD_OVER_FORWARD = 2.0
"""FLOPs of backward per FLOP of forward: the gradients of input and weights need a matrix product each."""


@dataclass(frozen=True)
class Unit:
    """An indivisible row of layers with a fixed input shape."""

    name: str
    layers: tuple[Layer, ...]
    """The layers, each of which reads the output of the layer before; empty for a route."""
    input: Shape
    """Shape of the input; of several inputs, joined along their first axis."""
    reads: tuple[int, ...] = ()
    """The units whose outputs are the inputs, in this order; empty for the previous unit."""
    flattens_inputs: bool = False
    """Whether several inputs, of any shapes, count as one axis with all their values in ``input``."""

    # Planners read these properties very often, and a frozen dataclass may cache: its fields never change.

    @cached_property
    def _shapes(self) -> list[Shape]:
        """Shape of the unit's input, then the output shape of each layer."""
        return shapes_through(self.layers, self.input)

    @cached_property
    def _layer_inputs(self) -> list[tuple[Layer, Shape]]:
        """The layers, each with the shape of the layer's input."""
        input_shapes = self._shapes[:-1]
        return list(zip(self.layers, input_shapes, strict=True))

    @cached_property
    def output(self) -> Shape:
        """Output shape of the unit."""
        return self._shapes[-1]

    @cached_property
    def parameters(self) -> int:
        """Number of trained values."""
        values = 0
        for layer, shape in self._layer_inputs:
            values += layer.parameters(shape)
        return values

    @cached_property
    def frozen_parameters(self) -> int:
        """Number of frozen values, stored but not trained."""
        values = 0
        for layer, shape in self._layer_inputs:
            values += layer.frozen_parameters(shape)
        return values

    @cached_property
    def weights(self) -> int:
        """Number of elements of trained matrices and kernels."""
        elements = 0
        for layer, shape in self._layer_inputs:
            elements += layer.weights(shape)
        return elements

    @property
    def multiplications(self) -> int:
        """Multiplications of forward for one sample."""
        # Each is followed by an add, and both count as FLOPs.
        return int(self.forward_flops) // 2

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        flops = 0.0
        for layer, shape in self._layer_inputs:
            flops += layer.flops(shape)
        return flops

    @cached_property
    def cost(self) -> Cost:
        """Cost of the forward of one sample; `forward_of` and `backward_of` derive the costs of a batch."""
        cost = Cost()
        for layer, shape in self._layer_inputs:
            cost += layer.cost(shape)
        return cost

    @property
    def min_samples(self) -> int:
        """Minimum batch size in training; two if a layer normalises over samples alone."""
        samples = 1
        for layer, shape in self._layer_inputs:
            samples = max(samples, layer.min_samples(shape))
        return samples

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trained values."""
        return BYTES_PER_VALUE * self.parameters

    @property
    def input_bytes(self) -> int:
        """Bytes of the unit's input for one sample."""
        return BYTES_PER_VALUE * math.prod(self.input)

    @property
    def output_bytes(self) -> int:
        """Bytes of the unit's output for one sample."""
        return BYTES_PER_VALUE * math.prod(self.output)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of all layer outputs for one sample, kept for backward."""
        values = 0
        for layer, shape in self._layer_inputs:
            values += layer.activations(shape)
        # Joining several inputs copies them; flattened inputs are only counted, and reach the unit separately.
        if len(self.reads) > 1 and not self.flattens_inputs:
            values += math.prod(self.input)
        return BYTES_PER_VALUE * values


@dataclass(frozen=True)
class TiedWeight:
    """A trained weight used by several units, such as the embedding and the head of a language model.

    Each of the units has a copy of the weight, and the gradients of all copies must be added.

    >>> tied = TiedWeight(("0.embedding.weight", "3.head.weight"), values=640)
    >>> tied.units
    (0, 3)
    >>> tied.title
    'embedding.weight and head.weight'
    >>> tied.holders([0, 2])
    [0, 1]
    """

    names: tuple[str, ...]
    """The weight's names in the module of `Model.build`, in the order of the units: "3.head.weight" is the weight that
    unit 3 calls "head.weight"."""
    values: int
    """Number of values of the weight."""

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Indices of the units using the weight, ascending and without repetition."""
        indices = []
        for name in self.names:
            index, _, _ = name.partition(".")
            indices.append(int(index))
        # A unit may use the weight under several names; a dictionary keeps the order, and each unit once.
        return tuple(dict.fromkeys(indices))

    @property
    def title(self) -> str:
        """The weight's names in the user's network, which have no index of a unit, for messages."""
        network_names = []
        for name in self.names:
            _, _, network_name = name.partition(".")
            network_names.append(network_name)
        return " and ".join(dict.fromkeys(network_names))

    def holders(self, cuts: Sequence[int]) -> list[int]:
        """Return the stages using the weight, ascending; ``cuts`` is the first unit of each stage, beginning with 0."""
        stages = set()
        for unit in self.units:
            # The last stage that begins at the unit or before.
            stages.add(bisect_right(cuts, unit) - 1)
        return sorted(stages)


class Builder(Protocol):
    """Builds the torch modules of a network without layer descriptions."""

    def __call__(self, first: int, last: int, seed: int) -> list[nn.Module]:
        """Build units ``first`` to ``last`` (exclusive), each as a module with one argument for each input."""

    def network(self, seed: int) -> nn.Module:
        """Build the user's whole network, in which "3.head.weight" of `Model.build` is called "head.weight"."""


@dataclass(frozen=True)
class Model:
    """A whole network; the output of the last unit is the model's output."""

    name: str
    input: Shape
    """Shape of a sample."""
    classes: int
    """Number of output values of a sample or token; for a detector, the number of classes of objects."""
    units: tuple[Unit, ...]
    detector: Detector | None = None
    """Decoder of the output as boxes around objects; None for any other network."""
    integers: bool = False
    """Whether samples are integers (int64), such as tokens, instead of float32."""
    fields: Fields = ()
    """The inputs of a network with several, such as tokens and a mask; empty for a single input."""
    builder: Builder | None = None
    """Builds the units of a network without layer descriptions; None for a network described by layers."""
    frozen_state: Mapping[str, torch.Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Values of frozen parameters by name in `build`; frozen parameters without an entry are drawn from the seed."""
    tied_weights: tuple[TiedWeight, ...] = ()

    def __post_init__(self) -> None:
        """Check the shapes between units and of the output; raises ValueError for a mismatch."""
        self._check_inputs()
        self._check_output()

    def _check_inputs(self) -> None:
        for index, unit in enumerate(self.units):
            inputs = self.input_shapes(index)
            source_shape = joined_shape(inputs, flatten=unit.flattens_inputs)
            if unit.input != source_shape:
                raise ValueError(
                    f"unit '{unit.name}' takes {unit.input}, but {source_shape} arrives"
                )

    def _check_output(self) -> None:
        if self.detector is None:
            # Classes are along the last axis; a language model has an axis of tokens before it.
            if self.output[-1:] != (self.classes,):
                raise ValueError(
                    f"{self.name} ends with {self.output}, not with one value for each of {self.classes} classes"
                )
            return
        # A detector reads (channels, height, width), where height and width depend on the image.
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
                # Only `MeasuredUnit` has this attribute, the layer of a user's network, whose module imports this one.
                reason = getattr(layer, "undivided_reason", "")
                if reason and reason not in reasons:
                    reasons.append(reason)
        return tuple(reasons)

    @property
    def output(self) -> Shape:
        """Output shape of the model."""
        return self.output_shape(len(self.units) - 1)

    def output_shape(self, index: int) -> Shape:
        """Return the shape of a unit's output, or of the model's input for `INPUT`."""
        return self.input if index == INPUT else self.units[index].output

    def reads(self, index: int) -> tuple[int, ...]:
        """Return the units whose outputs a unit reads; the previous unit by default."""
        # The unit before unit 0 is `INPUT`, the model's input.
        return self.units[index].reads or (index - 1,)

    def input_shapes(self, index: int) -> list[Shape]:
        """Return the shape of each tensor read by a unit, in the order of reading.

        >>> from testbed.ml.models.catalog import create
        >>> create("mlp", {"hidden": [32]}, (1, 8, 8), 10).input_shapes(1)
        [(32,)]
        """
        return [self.output_shape(source) for source in self.reads(index)]

    def tied_weight_across(self, cut: int) -> TiedWeight | None:
        """Return a weight used on both sides of a cut, the first of several; None if the sides share no weight."""
        for tied in self.tied_weights:
            if tied.units[0] < cut <= tied.units[-1]:
                return tied
        return None

    @property
    def untied_parts(self) -> int:
        """Largest number of parts into which cuts can divide the model without separating units sharing a weight."""
        parts = 1
        for cut in range(1, len(self.units)):
            if self.tied_weight_across(cut) is None:
                parts += 1
        return parts

    def crossing_tensors(self, cut: int) -> tuple[UnitOutput, ...]:
        """Return the tensors crossing the cut before unit ``cut``, in the order of the producing units.

        The model's input crosses cut 0, and the model's output crosses the last cut.

        >>> from testbed.ml.models.catalog import create
        >>> create("mlp", {"hidden": [32]}, (1, 8, 8), 10).crossing_tensors(1)
        ((0, (32,)),)
        """
        return self._crossings[cut]

    @cached_property
    def _crossings(self) -> tuple[tuple[UnitOutput, ...], ...]:
        """The tensors crossing each cut, in the order of the cuts."""
        last = len(self.units) - 1
        crossings: list[tuple[UnitOutput, ...]] = [((last, self.output),)]
        sources: set[int] = set()
        # Backwards, so that `sources` always has the units before a cut that any unit after the cut reads.
        for index in range(last, -1, -1):
            # This unit lies behind the cut before it, so its own output does not cross that cut.
            sources.discard(index)
            sources.update(self.reads(index))
            tensors = []
            for source in sorted(sources):
                tensors.append((source, self.output_shape(source)))
            crossings.append(tuple(tensors))
        return tuple(reversed(crossings))

    def cut_bytes(self, cut: int) -> int:
        """Return the bytes crossing the cut before unit ``cut`` for one sample.

        >>> from testbed.ml.models.catalog import create
        >>> create("mlp", {"hidden": [32]}, (1, 8, 8), 10).cut_bytes(1)
        128
        """
        values = 0
        for _, shape in self.crossing_tensors(cut):
            values += math.prod(shape)
        return BYTES_PER_VALUE * values

    def weight_bytes(self, units: range) -> int:
        """Return the bytes of the trained values of consecutive units; a tied weight counts once."""
        weights, _ = self._sums
        repeated = BYTES_PER_VALUE * self._repeated_values(units)
        return weights[units.stop] - weights[units.start] - repeated

    def _repeated_values(self, units: range) -> int:
        """Return how many values the units count too often together, since each of them counts its tied weights."""
        repeated = 0
        for tied in self.tied_weights:
            copies = len([unit for unit in tied.units if unit in units])
            repeated += tied.values * max(0, copies - 1)
        return repeated

    def frozen_bytes(self, units: range) -> int:
        """Return the bytes of the frozen parameters of consecutive units."""
        values = 0
        for unit in self.units[units.start : units.stop]:
            values += unit.frozen_parameters
        return BYTES_PER_VALUE * values

    def activation_bytes(self, units: range) -> int:
        """Return the bytes of the activations of consecutive units for one sample."""
        _, activations = self._sums
        return activations[units.stop] - activations[units.start]

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """For each cut, the bytes of parameters and of activations before the cut.

        Planners query very many ranges of units; a difference of two sums answers each.
        """
        weights = [0]
        activations = [0]
        for unit in self.units:
            weights.append(weights[-1] + unit.weight_bytes)
            activations.append(activations[-1] + unit.activation_bytes)
        return weights, activations

    @property
    def parameters(self) -> int:
        """Number of trained values; a tied weight counts once."""
        values = sum(unit.parameters for unit in self.units)
        all_units = range(len(self.units))
        return values - self._repeated_values(all_units)

    @property
    def frozen_parameters(self) -> int:
        """Number of frozen values, stored but not trained."""
        return sum(unit.frozen_parameters for unit in self.units)

    @property
    def weights(self) -> int:
        """Number of elements of trained matrices and kernels."""
        return sum(unit.weights for unit in self.units)

    @property
    def multiplications(self) -> int:
        """Multiplications of forward for one sample."""
        return sum(unit.multiplications for unit in self.units)

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return sum(unit.forward_flops for unit in self.units)

    def with_initialisation(self, how: Initialisation) -> Model:
        """Return the same network with another initialisation of all layers."""
        units = []
        for unit in self.units:
            layers = tuple(layer.with_initialisation(how) for layer in unit.layers)
            units.append(replace(unit, layers=layers))
        return replace(self, units=tuple(units))

    def build(self, first: int, last: int, seed: int) -> Segment:
        """Build units ``first`` to ``last`` (exclusive) as one module containing one ``nn.Sequential`` per unit.

        The module maps the tensors crossing the cut before ``first`` to the tensors crossing the cut before ``last``.
        Several tensors cross as one: flattened, and joined in the order of `crossing_tensors`. Child i of the result is
        unit ``first + i`` and is named by the unit's index in the whole model, so the state dictionaries of different
        units can be merged.

        Each unit's weights depend on ``seed`` and the unit's index only, so they equal the weights of the same unit in
        the whole model. No global state is changed, so devices sharing a process may build at the same time; a
        ``builder`` may use torch's global generator, and then restores the generator's state.

        Raises ValueError for unit indices outside the model.
        """
        from testbed.ml.models.modules import Segment

        if not 0 <= first <= last <= len(self.units):
            raise ValueError(
                f"{self.name} has units 0 to {len(self.units)}, not {first} to {last}"
            )
        indices = range(first, last)
        if self.builder is not None:
            built = self.builder(first, last, seed)
        else:
            built = [self._build_unit(index, seed) for index in indices]
        reads = [self.reads(index) for index in indices]
        # The cut before each unit, and the cut behind the last unit.
        crossings = [self.crossing_tensors(cut) for cut in range(first, last + 1)]
        segment = Segment(first, built, reads, crossings)
        self._load_frozen_state(segment)
        return segment

    def _load_frozen_state(self, segment: nn.Module) -> None:
        """Replace values drawn from the seed by the values of ``frozen_state``."""
        if not self.frozen_state:
            return
        with torch.no_grad():
            for name, parameter in segment.named_parameters():
                if name in self.frozen_state:
                    parameter.copy_(self.frozen_state[name])

    def _build_unit(self, index: int, seed: int) -> nn.Module:
        from testbed.ml.models.modules import Joined

        unit = self.units[index]
        # A generator for each unit, so that its weights do not depend on the units built before it.
        generator = torch.Generator().manual_seed(derive(seed, "weights", index))
        layers = build_sequence(unit.layers, unit.input, generator)
        return Joined(*layers) if len(unit.reads) > 1 else layers

    def build_flat_unit(self, index: int) -> nn.Module:
        """Build a unit without layer descriptions, as a module whose inputs arrive as one tensor, (samples, values)."""
        from testbed.ml.models.modules import SplitInputs

        assert self.builder is not None
        # Any seed: the caller loads the weights of the unit.
        [unit] = self.builder(index, index + 1, seed=0)
        return SplitInputs(unit, self.input_shapes(index))


def cost_of(units: Sequence[Unit]) -> Cost:
    """Return the forward cost of units for one sample.

    >>> from testbed.ml.models.catalog import create
    >>> model = create("mlp", {"hidden": [32]}, (1, 8, 8), 10)
    >>> cost_of(model.units).of().flops
    4736.0
    """
    total = Cost()
    for unit in units:
        total += unit.cost
    return total


def forward_of(cost: Cost, samples: int) -> Cost:
    """Return the forward cost of a batch from ``cost``, the cost of one sample: a batch reads the weights once.

    >>> batch = forward_of(Cost(flops=100.0, accessed=40, weights=20), samples=8).of()
    >>> batch.flops, batch.accessed, batch.weights
    (800.0, 320.0, 20.0)
    """
    return cost.scaled(flops=samples, accessed=samples, weights=1)


def backward_of(cost: Cost, samples: int) -> Cost:
    """Return the backward cost of a batch from ``cost``, the forward cost of one sample.

    A backward accesses a gradient for each value that the forward accesses; it reads the weights, and writes as many
    gradients of weights.

    >>> backward_of(Cost(flops=100.0, accessed=40, weights=20), samples=8).of().flops
    1600.0
    """
    return cost.scaled(
        flops=BACKWARD_OVER_FORWARD * samples, accessed=samples, weights=2
    )


def joined_shape(parts: Sequence[Shape], *, flatten: bool = False) -> Shape:
    """Return the shape of tensors joined along their first axis, (channels, ...).

    With ``flatten``, several tensors are flattened first, so that the result has a single axis. Raises ValueError for
    tensors that differ beyond the first axis.

    >>> joined_shape([(16, 8, 8), (32, 8, 8)])
    (48, 8, 8)
    >>> joined_shape([(16, 8, 8), (10,)], flatten=True)
    (1034,)
    """
    if flatten and len(parts) > 1:
        values = sum(math.prod(part) for part in parts)
        return (values,)
    further_axes = parts[0][1:]
    length = 0
    for part in parts:
        if part[1:] != further_axes:
            names = " and ".join(map(str, parts))
            raise ValueError(
                f"{names} cannot be joined: they differ beyond the first axis"
            )
        length += part[0]
    return (length, *further_axes)


def chain(
    name: str,
    shape: Shape,
    classes: int,
    layers: Sequence[tuple[str, Sequence[Layer]]],
    routes: Mapping[int, tuple[int, ...]] | None = None,
    detector: Detector | None = None,
) -> Model:
    """Create a model from named units, deriving all shapes from the input shape.

    Args:
        name: the model's name.
        shape: shape of a sample.
        classes: number of output values of a sample, or of classes that ``detector`` distinguishes.
        layers: name and layers of each unit, in order.
        routes: for units that do not simply read the previous unit: index of the unit -> indices of the units that it
            reads, whose outputs are joined along the channels.
        detector: decoder of the output as boxes.

    Raises ValueError for units that read later units, and for layers that do not accept the output of the layer before.

    >>> from testbed.ml.models.layers import Flatten, Linear, ReLU
    >>> hidden = [Flatten(), Linear(32), ReLU()]
    >>> model = chain("mlp", (1, 8, 8), 10, [("hidden", hidden), ("output", [Linear(10)])])
    >>> model.units[1].input
    (32,)
    >>> model.parameters
    2410
    """
    routes = routes or {}
    _check_routes(routes)
    outputs = {INPUT: tuple(shape)}
    units: list[Unit] = []
    for index, (unit_name, unit_layers) in enumerate(layers):
        reads = routes.get(index, ())
        # By default the previous unit; before unit 0 that is `INPUT`.
        sources = reads or (index - 1,)
        input_shape = joined_shape([outputs[source] for source in sources])
        unit = Unit(unit_name, tuple(unit_layers), input_shape, reads)
        units.append(unit)
        outputs[index] = unit.output
    return Model(name, outputs[INPUT], classes, tuple(units), detector)


def _check_routes(routes: Mapping[int, tuple[int, ...]]) -> None:
    """Raise ValueError for a unit reading nothing, itself, a later unit, or another unit twice."""
    for index, sources in routes.items():
        has_repetition = len(set(sources)) < len(sources)
        are_earlier = all(INPUT <= source < index for source in sources)
        if not sources or has_repetition or not are_earlier:
            raise ValueError(
                f"unit {index} reads {sources}: name different units before it"
            )
