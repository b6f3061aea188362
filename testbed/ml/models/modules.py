"""Torch modules of the layers; the only module of this package with an immediate torch import."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from testbed.ml.models.shapes import Shape, UnitOutput


class Sum(nn.Sequential):
    """Applies all children to the same input and adds their results.

    >>> doubled = Sum(nn.Identity(), nn.Identity())
    >>> doubled(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Sequential
        """Add the children's outputs, which have one shape, in their order."""
        outputs: list[torch.Tensor] = [child(input) for child in self]
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


class DarknetReorganise(nn.Module):
    """Darknet's reorganisation: (C, H, W) to (C s^2, H/s, W/s).

    Darknet reads the C channels as C/s^2 images of s times the height and width, takes every s-th pixel of these
    images, and writes s^2 C/s^2 = C channels of the old height and width, which are then read with s^2 as many
    channels. The result differs from a plain space-to-depth, and weights trained with Darknet depend on it.

    >>> DarknetReorganise(stride=2)(torch.zeros(1, 64, 26, 26)).shape
    torch.Size([1, 256, 13, 13])
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Sequential
        """Reorder the values of every sample, (samples, channels, height, width)."""
        step = self.stride
        area = step**2
        samples, channels, height, width = input.shape
        # The same memory as larger images: (height x step) rows of (width x step) pixels.
        images = input.reshape(samples, channels // area, height, step, width, step)
        # First the place within each square of step x step pixels, then the square.
        reordered = images.permute(0, 3, 5, 1, 2, 4)
        return reordered.reshape(
            samples, channels * area, height // step, width // step
        )


class Joined(nn.Sequential):
    """Applies its children to the concatenation of several tensors along their first axis.

    >>> Joined(nn.Identity())(torch.zeros(1, 16, 8, 8), torch.zeros(1, 32, 8, 8)).shape
    torch.Size([1, 48, 8, 8])
    """

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Join the inputs, (samples, channels, ...) each, along the channels, and run the children."""
        joined = torch.cat(parts, dim=1)
        # The children run with the copy alone in memory.
        del parts
        output: torch.Tensor = super().forward(joined)  # type: ignore[no-untyped-call]
        return output


class SplitInputs(nn.Module):
    """Wraps a unit with several inputs, which arrive as one tensor with all values along one axis."""

    def __init__(self, unit: nn.Module, shapes: Sequence[Shape]) -> None:
        """``shapes`` are those of the unit's inputs for one sample, in order."""
        super().__init__()
        self._shapes = shapes
        # Weights are loaded by the unit's own names, without the wrapper's.
        self.load_state_dict = unit.load_state_dict  # type: ignore[method-assign]
        self.unit = unit

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Split the input, (samples, values), and return the unit's output, (samples, ...)."""
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = torch.split(values.flatten(1), sizes, dim=1)
        inputs = []
        for part, shape in zip(parts, self._shapes, strict=True):
            inputs.append(part.reshape(-1, *shape))
        outputs: torch.Tensor = self.unit(*inputs)
        return outputs


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of frozen parameters in the module's state dictionary.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.bias.requires_grad_(False)
    >>> sorted(frozen_names(layer))
    ['bias']
    """
    names = set()
    # A weight with several names is in the state dictionary under each of them.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            names.add(name)
    return frozenset(names)


class Segment(nn.Sequential):
    """Consecutive units of a model, each of which reads the outputs of certain earlier units."""

    def __init__(
        self,
        first: int,
        units: Sequence[nn.Module],
        reads: Sequence[Sequence[int]],
        crossing: Sequence[Sequence[UnitOutput]],
    ) -> None:
        """Take consecutive units of a model.

        Args:
            first: index of the first unit in the model.
            units: a module for each unit.
            reads: for each unit, the units whose outputs the unit reads, by index in the model.
            crossing: for the cut before each unit and behind the last, the crossing tensors (`Model.crossing_tensors`).
        """
        named = OrderedDict()
        for place, unit in enumerate(units):
            named[str(first + place)] = unit
        super().__init__(named)
        self._first = first
        self._reads = reads
        self._crossing = crossing

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name of the argument
        before: Callable[[str], object] | None = None,
    ) -> torch.Tensor:
        """Run the units; ``before`` is called with each unit's name before the unit runs.

        ``input`` is (samples, ...), several tensors flattened and joined. Values are dropped after their last use.
        """
        # Outputs by the index of their unit in the model.
        outputs = _split_tensors(input, self._crossing[0])
        for place, (name, unit) in enumerate(self.named_children()):
            if before is not None:
                before(name)
            inputs = [outputs[index] for index in self._reads[place]]
            outputs[self._first + place] = unit(*inputs)
            # Without this list, too, the inputs would live until the next unit has run.
            del inputs
            needed = self._crossing[place + 1]
            outputs = {index: outputs[index] for index, _ in needed}
        return _join_tensors(outputs, self._crossing[-1])


def _split_tensors(
    packed: torch.Tensor, crossing: Sequence[UnitOutput]
) -> dict[int, torch.Tensor]:
    """Return the tensors crossing a cut, each (samples, ...), by the units that made them."""
    if len(crossing) == 1:
        # A single tensor crosses with its own shape.
        [(only, _)] = crossing
        return {only: packed}
    sizes = [math.prod(shape) for _, shape in crossing]
    parts = torch.split(packed, sizes, dim=1)
    tensors = {}
    for (index, shape), part in zip(crossing, parts, strict=True):
        tensors[index] = part.reshape(-1, *shape)
    return tensors


def _join_tensors(
    outputs: dict[int, torch.Tensor], crossing: Sequence[UnitOutput]
) -> torch.Tensor:
    """Return the tensors crossing a cut as one tensor, the inverse of `_split_tensors`."""
    if len(crossing) == 1:
        [(only, _)] = crossing
        return outputs[only]
    parts = [outputs[index].flatten(1) for index, _ in crossing]
    return torch.cat(parts, dim=1)


class ChannelMean(nn.Module):
    """The mean over height and width.

    >>> ChannelMean()(torch.ones(2, 16, 8, 8)).shape
    torch.Size([2, 16])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Module
        """Map (samples, channels, height, width) to (samples, channels)."""
        return input.mean((2, 3))
