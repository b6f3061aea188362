"""Construction of a user's network by the function in the user's file, and the measured sizes of its units."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.device import Cost
from testbed.ml.lazy import nn, torch
from testbed.ml.models.layers import Layer
from testbed.ml.models.shapes import BYTES_PER_VALUE, Shape
from testbed.ml.training.schema import LoraPart

MODEL_FILE_KEY = ("model", "file")
"""Key in a scenario's workload to which errors about a user's network refer."""


@dataclass(frozen=True)
class Maker:
    """Constructs a network by calling the user's function with certain arguments."""

    # `Code` contains a dictionary, which has no hash; the hash of the arguments distinguishes enough.
    code: Code = field(hash=False)
    arguments: str
    """JSON of the keyword arguments; as text they have a hash."""
    lora: LoraPart | None = None
    """Adapters of the network's linear layers; None for none."""

    def __call__(self) -> nn.Module:
        """Construct the network; raises `InputError` naming the failing line."""
        keywords = json.loads(self.arguments)
        network = usercode.call(self.code, MODEL_FILE_KEY, **keywords)
        if not isinstance(network, nn.Module):
            text = f"{self.code.name} returned {type(network).__name__}, not a torch.nn.Module"
            raise InputError(text, (MODEL_FILE_KEY[0], "name"))
        if self.lora is not None:
            from testbed.ml.models.lora import Lora, adapt

            part = self.lora
            adapt(network, Lora(part.rank, part.alpha, part.modules))
        return network


@dataclass(frozen=True)
class MeasuredUnit(Layer):
    """A unit of a user's network as one layer, with sizes measured by torch for one sample."""

    output_shape: Shape
    trained_values: int
    """Number of trained values."""
    matrix_values: int
    """Number of trained values in tensors of two or more axes."""
    activation_values: int
    """Number of values of all tensors created within the unit."""
    forward_cost: Cost
    """FLOPs and bytes by kind of layer."""
    undivided_reason: str = field(default="", compare=False)
    """Reason why the unit is not divided further, with the line; empty if nothing prevents it, or nothing is left."""
    smallest_batch: int = 1
    """Minimum batch size in training."""
    known_layers: tuple[tuple[str, Layer], ...] = ()
    """The equivalent layers, each with the path of its module; empty if the unit is not a sequence of known layers."""
    build_flat: Callable[[], nn.Module] | None = field(
        default=None, compare=False, repr=False
    )
    """Builds the unit as a module whose inputs arrive as one tensor, (samples, values); None if only the model can
    build the unit."""
    frozen_values: int = 0
    """Number of frozen values, stored but not trained."""

    # Methods that divide layers among devices divide `known_layers` in place of the unit, if there are any.
    division = "no"

    # The methods ignore ``shape``, the input shape, since all sizes are measured.

    def output(self, shape: Shape) -> Shape:
        """Output shape of the unit."""
        return self.output_shape

    def min_samples(self, shape: Shape) -> int:
        """Minimum batch size in training."""
        return self.smallest_batch

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""
        return self.trained_values

    def frozen_parameters(self, shape: Shape) -> int:
        """Number of frozen values, stored but not trained."""
        return self.frozen_values

    def weights(self, shape: Shape) -> int:
        """Number of trained values in tensors of two or more axes."""
        return self.matrix_values

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample."""
        return self.forward_cost.of().flops

    def activations(self, shape: Shape) -> int:
        """Number of values of all intermediate results and the output for one sample."""
        return self.activation_values

    def accesses(self, shape: Shape) -> int:
        """Number of values read and written by forward for one sample."""
        accessed_bytes = self.forward_cost.of().accessed
        return int(accessed_bytes) // BYTES_PER_VALUE

    def cost(self, shape: Shape) -> Cost:
        """Return the cost of forward for one sample."""
        return self.forward_cost

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module without using ``generator``; raises TypeError if only the whole model can build it."""
        if self.build_flat is not None:
            return self.build_flat()
        return super().build(shape, generator)
