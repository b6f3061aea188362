"""The torch modules that `testbed.ml.models.layers` and `testbed.ml.models.chain` build, besides those of torch itself.

This file imports torch at once, so the two import it only when they build a module: planning needs no torch.
"""

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

    Darknet reads the memory of the C channels as C/s^2 larger images, of height s H and width s W. Every s-th pixel of
    an image along both axes makes an output channel of H x W pixels, s^2 of them for each image. The memory of these C
    channels is finally read as (C s^2, H/s, W/s). The order of the values differs from a plain space-to-depth, and
    weights trained with Darknet depend on the order.

    >>> DarknetReorganise(stride=2)(torch.zeros(1, 64, 26, 26)).shape
    torch.Size([1, 256, 13, 13])
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Sequential
        """Reorder the values of every sample, (samples, channels, height, width)."""
        stride = self.stride
        pixels = stride**2
        samples, channels, height, width = input.shape
        # Larger images, divided into height x width squares of stride x stride pixels.
        images = input.reshape(
            samples, channels // pixels, height, stride, width, stride
        )
        # (samples, row in the square, column in the square, image, row of the square, column of the square)
        reordered = images.permute(0, 3, 5, 1, 2, 4)
        return reordered.reshape(
            samples, channels * pixels, height // stride, width // stride
        )


class Joined(nn.Sequential):
    """A sequence of layers whose input is the concatenation of several tensors along their channels.

    >>> Joined(nn.Identity())(torch.zeros(1, 16, 8, 8), torch.zeros(1, 32, 8, 8)).shape
    torch.Size([1, 48, 8, 8])
    """

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Join the inputs, (samples, channels, ...) each, along the channels, and run the children."""
        joined = torch.cat(parts, dim=1)
        # The parts are a copy of the same values, and would stay in memory while the children run.
        del parts
        output: torch.Tensor = super().forward(joined)  # type: ignore[no-untyped-call]
        return output


class SplitInputs(nn.Module):
    """Wraps a unit with several arguments to take one tensor with the values of all arguments."""

    def __init__(self, unit: nn.Module, shapes: Sequence[Shape]) -> None:
        """``shapes`` are the shapes of the unit's arguments for one sample, in order."""
        super().__init__()
        self._shapes = shapes
        # State dictionaries have the names of the unit, without the prefix "unit." of the wrapper.
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
    """Consecutive units of a model, from the tensors crossing the cut before them to those crossing the cut behind."""

    def __init__(
        self,
        first: int,
        units: Sequence[nn.Module],
        reads: Sequence[Sequence[int]],
        crossing: Sequence[Sequence[UnitOutput]],
    ) -> None:
        """Name the modules of consecutive units by their indices in the model.

        Args:
            first: index of the first unit in the model.
            units: a module for each unit.
            reads: for each unit, the units whose outputs the unit reads, by index in the model.
            crossing: for the cut before each unit and behind the last, the crossing tensors (`Model.crossing_tensors`).
        """
        units_by_name = OrderedDict()
        for place, unit in enumerate(units):
            units_by_name[str(first + place)] = unit
        super().__init__(units_by_name)
        self._first = first
        self._reads = reads
        self._crossing = crossing

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name of the argument
        before: Callable[[str], object] | None = None,
    ) -> torch.Tensor:
        """Run the units and return the tensors crossing the cut behind the last unit, as one tensor.

        ``input`` is (samples, ...), with several tensors flattened and joined. If given, ``before`` is called with each
        unit's name before the unit runs. Outputs of units are dropped after their last use.
        """
        # Outputs by the index of their unit in the model.
        outputs = _split_tensors(input, self._crossing[0])
        for place, (name, unit) in enumerate(self.named_children()):
            if before is not None:
                before(name)
            inputs = [outputs[index] for index in self._reads[place]]
            outputs[self._first + place] = unit(*inputs)
            # The list would keep the inputs in memory while the next unit runs.
            del inputs
            crossing = self._crossing[place + 1]
            outputs = {index: outputs[index] for index, _ in crossing}
        return _join_tensors(outputs, self._crossing[-1])


def _split_tensors(
    joined: torch.Tensor, crossing: Sequence[UnitOutput]
) -> dict[int, torch.Tensor]:
    """Return the tensors crossing a cut, each (samples, ...), by the index of the computing unit."""
    if len(crossing) == 1:
        # A single tensor is not flattened.
        [(index, _)] = crossing
        return {index: joined}
    sizes = [math.prod(shape) for _, shape in crossing]
    parts = torch.split(joined, sizes, dim=1)
    tensors = {}
    for (index, shape), part in zip(crossing, parts, strict=True):
        tensors[index] = part.reshape(-1, *shape)
    return tensors


def _join_tensors(
    outputs: dict[int, torch.Tensor], crossing: Sequence[UnitOutput]
) -> torch.Tensor:
    """Return the tensors crossing a cut as one tensor, the inverse of `_split_tensors`."""
    if len(crossing) == 1:
        [(index, _)] = crossing
        return outputs[index]
    parts = [outputs[index].flatten(1) for index, _ in crossing]
    return torch.cat(parts, dim=1)


class ChannelMean(nn.Module):
    """The mean of each channel, over height and width.

    >>> ChannelMean()(torch.ones(2, 16, 8, 8)).shape
    torch.Size([2, 16])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Module
        """Map (samples, channels, height, width) to (samples, channels)."""
        return input.mean((2, 3))
