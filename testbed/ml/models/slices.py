"""Slices of one layer's weights: output and input channels, and the channels of per-channel values.

A set of channels is a ``range`` or an ascending tuple of numbers. Ranges of any length are cheap and cut tensors
without a copy; tuples serve scattered neurons that were moved one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.ml.lazy import torch

Channels = Sequence[int]
"""A range, or a rising tuple: output channels of a convolution, output features of a fully connected layer, ..."""

NONE = range(0)
"""No channels."""


@dataclass(frozen=True)
class Slice:
    """The held part of one layer: ``rows`` and ``columns`` of its weights, and the channels finished on the device.

    Finishing takes complete sums: it adds the bias, normalises and activates.
    """

    rows: Channels
    """Output channels of the weights."""
    columns: Channels
    """Input channels of the weights."""
    channels: Channels
    """Output channels whose bias, normalisation and activation are held."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a layer's tensor: rows and columns of weights, channels of per-channel values.

        ``tensor`` is (output channels, input channels, ...), (channels,) or a single value, which is returned
        unchanged.
        """
        if tensor.dim() > 1:
            return pick(pick(tensor, 0, self.rows), 1, self.columns)
        return pick(tensor, 0, self.channels) if tensor.dim() else tensor


def pick(
    tensor: torch.Tensor,
    axis: int,
    wanted: Channels,
    held: Channels | None = None,
) -> torch.Tensor:
    """Return the entries ``wanted`` along an axis with the entries ``held``; None means all, numbered from 0.

    ``tensor`` is of any shape. The result is a view if both are ranges. Raises ValueError for entries not held.

    >>> pick(torch.tensor([10, 11, 12, 13]), 0, (1, 3))
    tensor([11, 13])
    >>> pick(torch.tensor([14, 15, 16]), 0, range(5, 7), held=range(4, 7))
    tensor([15, 16])
    """
    if held is None:
        held = range(tensor.shape[axis])
    if wanted == held:
        return tensor
    if not len(wanted):
        return tensor.narrow(axis, 0, 0)
    if isinstance(wanted, range) and isinstance(held, range):
        contains_ends = wanted[0] in held and wanted[-1] in held
        if not contains_ends:
            raise ValueError(f"{wanted} are not all among {held}")
        # No copy: all planned divisions are of ranges.
        return tensor.narrow(axis, wanted[0] - held[0], len(wanted))
    return tensor.index_select(axis, torch.tensor(_places_of(wanted, held)))


def _places_of(wanted: Channels, held: Channels) -> list[int]:
    """Return the place of each wanted channel among the held ones; raises ValueError for channels not held."""
    places = {}
    for place, channel in enumerate(held):
        places[channel] = place
    indices = []
    for channel in wanted:
        if channel not in places:
            raise ValueError(f"{wanted} are not all among {held}")
        indices.append(places[channel])
    return indices


def even_ranges(size: int, count: int) -> tuple[range, ...]:
    """Divide ``size`` channels into ``count`` ranges whose lengths differ by at most one, longer ones first.

    >>> even_ranges(8, 3)
    (range(0, 3), range(3, 6), range(6, 8))
    """
    length, longer = divmod(size, count)
    ranges = []
    first = 0
    for number in range(count):
        last = first + length
        if number < longer:
            last += 1
        ranges.append(range(first, last))
        first = last
    return tuple(ranges)


def as_channels(numbers: Iterable[int]) -> Channels:
    """Return numbers in any order as a range if contiguous, otherwise as an ascending tuple.

    >>> as_channels([3, 1, 2])
    range(1, 4)
    >>> as_channels([5, 1])
    (1, 5)
    """
    ascending = tuple(sorted(numbers))
    if not ascending:
        return NONE
    spanned = range(ascending[0], ascending[-1] + 1)
    # Without a gap, the numbers are all that they span.
    return spanned if len(spanned) == len(ascending) else ascending


def elements_of(channels: Channels, each: int) -> Channels:
    """Return the element indices of channels with ``each`` elements, channel after channel.

    >>> elements_of((0, 2), 3)
    (0, 1, 2, 6, 7, 8)
    """
    if each == 1:
        return channels
    if isinstance(channels, range):
        return range(channels.start * each, channels.stop * each)
    indices: list[int] = []
    for channel in channels:
        indices += range(channel * each, (channel + 1) * each)
    return tuple(indices)
