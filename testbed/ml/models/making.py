"""Construction of a user's network, and the measured sizes of its units."""

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

KEY = ("model", "file")
"""Key of a scenario's workload that errors about a network of the user's name."""


@dataclass(frozen=True)
class Maker:
    """Constructs the network by calling the user's function with certain arguments."""

    # `Code` holds a dictionary, which has no hash; the arguments distinguish enough.
    code: Code = field(hash=False)
    arguments: str
    """JSON of the keyword arguments: text, so that a maker is a key of caches."""
    lora: LoraPart | None = None
    """Adapters of the network's linear layers."""

    def __call__(self) -> nn.Module:
        """Construct the network; raises `InputError` naming the failing line."""
        keywords = json.loads(self.arguments)
        made = usercode.call(self.code, KEY, **keywords)
        if not isinstance(made, nn.Module):
            text = f"{self.code.name} returned {type(made).__name__}, not a torch.nn.Module"
            raise InputError(text, (KEY[0], "name"))
        if self.lora is not None:
            from testbed.ml.models.lora import Lora, adapt

            part = self.lora
            adapt(made, Lora(part.rank, part.alpha, part.modules))
        return made


@dataclass(frozen=True)
class CountedUnit(Layer):
    """A unit of a traced network as one layer, with sizes measured by torch."""

    shape: Shape
    """Shape of the unit's output."""
    trained: int
    """Number of trained values."""
    matrices: int
    """Trained values in tensors of two and more axes."""
    kept: int
    """Values of all outputs made within the unit for a sample."""
    charged: Cost
    """FLOPs, and bytes read and written, for a sample by kind of layer; bytes of weights."""
    undivided_reason: str = field(default="", compare=False)
    """Reason why the unit is not divided further, with the line; empty for a single step with work."""
    least: int = 1
    """Minimum number of samples in training."""
    described: tuple[tuple[str, Layer], ...] = ()
    """The equivalent layers, each with the path of its module; empty if the unit is not a sequence of layers."""
    make: Callable[[], nn.Module] | None = field(
        default=None, compare=False, repr=False
    )
    """Builds the unit's module from its flattened and joined inputs; None if only the model can build it."""
    untrained: int = 0
    """Values of parameters whose `requires_grad` is off."""

    # The layers within the unit are unknown here; `described` are divided in its place.
    division = "no"

    def output(self, shape: Shape) -> Shape:
        """Output shape of the unit."""
        return self.shape

    def min_samples(self, shape: Shape) -> int:
        """Minimum batch size in training."""
        return self.least

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""
        return self.trained

    def frozen_parameters(self, shape: Shape) -> int:
        """Number of frozen values."""
        return self.untrained

    def weights(self, shape: Shape) -> int:
        """Trained values in tensors of two or more axes."""
        return self.matrices

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample."""
        return self.charged.of().flops

    def activations(self, shape: Shape) -> int:
        """Values of all intermediate outputs for one sample."""
        return self.kept

    def accesses(self, shape: Shape) -> int:
        """Values read and written by forward for one sample."""
        accessed_bytes = self.charged.of().accessed
        return int(accessed_bytes) // BYTES_PER_VALUE

    def cost(self, shape: Shape) -> Cost:
        """Return the cost of forward for one sample."""
        return self.charged

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Build the torch module; raises TypeError for units only the whole model can build."""
        if self.make is not None:
            return self.make()
        return super().build(shape, generator)
