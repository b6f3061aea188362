"""Slices of one layer: the output and input channels of a device, as indices into the layer's tensors.

Channels are given by number, as a ``range`` or an ascending tuple. Ranges of any length are cheap and cut tensors
without a copy; tuples serve scattered neurons that were moved one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.ml.lazy import torch

Channels = Sequence[int]
"""A range or an ascending tuple of numbers: channels of a convolution, features or neurons of a fully connected layer.
"""

NO_CHANNELS = range(0)
"""For a slice without any rows, columns or channels."""


@dataclass(frozen=True)
class Slice:
    """The part of one layer stored and computed by a device.

    From the input channels ``columns``, the device computes partial sums of the output channels ``rows``. As soon as
    the sums of the output channels ``channels`` are complete, the device finishes these: it adds the bias, normalises
    and activates.
    """

    rows: Channels
    """Output channels of the weights."""
    columns: Channels
    """Input channels of the weights."""
    channels: Channels
    """Output channels whose bias, normalisation and activation the device computes."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a layer's tensor: rows and columns of weights, channels of per-channel values.

        ``tensor`` is (output channels, input channels, ...), (channels,) or a single value, which is returned
        unchanged.
        """
        if tensor.dim() == 0:
            return tensor
        if tensor.dim() == 1:
            return pick(tensor, 0, self.channels)
        rows = pick(tensor, 0, self.rows)
        return pick(rows, 1, self.columns)


def pick(
    tensor: torch.Tensor,
    axis: int,
    channels: Channels,
    tensor_channels: Channels | None = None,
) -> torch.Tensor:
    """Return the entries of some channels along an axis of a tensor of any shape.

    ``tensor_channels`` are the channels of the axis, for a tensor that is a slice itself; None for all channels,
    numbered from 0. The result is a view if both are ranges. Raises ValueError for channels that the tensor lacks.

    >>> pick(torch.tensor([10, 11, 12, 13]), 0, (1, 3))
    tensor([11, 13])
    >>> pick(torch.tensor([14, 15, 16]), 0, range(5, 7), tensor_channels=range(4, 7))
    tensor([15, 16])
    """
    if tensor_channels is None:
        tensor_channels = range(tensor.shape[axis])
    if channels == tensor_channels:
        return tensor
    if not len(channels):
        return tensor.narrow(axis, 0, 0)
    if isinstance(channels, range) and isinstance(tensor_channels, range):
        first, last = channels[0], channels[-1]
        if first not in tensor_channels or last not in tensor_channels:
            raise ValueError(f"{channels} are not all among {tensor_channels}")
        # No copy: plans divide layers into ranges.
        return tensor.narrow(axis, first - tensor_channels[0], len(channels))
    positions = _positions_of(channels, tensor_channels)
    return tensor.index_select(axis, torch.tensor(positions))


def _positions_of(channels: Channels, tensor_channels: Channels) -> list[int]:
    """Return the position of each channel in ``tensor_channels``; raises ValueError for a channel without one."""
    position_of = {}
    for position, channel in enumerate(tensor_channels):
        position_of[channel] = position
    positions = []
    for channel in channels:
        if channel not in position_of:
            raise ValueError(f"{channels} are not all among {tensor_channels}")
        positions.append(position_of[channel])
    return positions


def even_ranges(size: int, count: int) -> tuple[range, ...]:
    """Divide ``size`` channels into ``count`` ranges whose lengths differ by at most one, longer ranges first.

    >>> even_ranges(8, 3)
    (range(0, 3), range(3, 6), range(6, 8))
    """
    min_length, longer_ranges = divmod(size, count)
    ranges = []
    start = 0
    for number in range(count):
        stop = start + min_length
        if number < longer_ranges:
            stop += 1
        ranges.append(range(start, stop))
        start = stop
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
        return NO_CHANNELS
    spanned = range(ascending[0], ascending[-1] + 1)
    # Equal lengths mean that no number of the range is missing.
    return spanned if len(spanned) == len(ascending) else ascending


def elements_of(channels: Channels, channel_size: int) -> Channels:
    """Return the indices of all elements of channels, in values stored channel after channel.

    ``channel_size`` is the number of elements of a channel: the pixels of a feature map, 1 for features.

    >>> elements_of((0, 2), 3)
    (0, 1, 2, 6, 7, 8)
    """
    if channel_size == 1:
        return channels
    if isinstance(channels, range):
        return range(channels.start * channel_size, channels.stop * channel_size)
    indices: list[int] = []
    for channel in channels:
        start = channel * channel_size
        indices += range(start, start + channel_size)
    return tuple(indices)
