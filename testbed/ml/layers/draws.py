"""Random numbers for a micro-batch, equal to its rows of the random numbers for the whole batch.

Dropout then drops the same values however a batch is divided into micro-batches, so a pipeline computes the same
gradients as one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
"""Torch's operations in the form that a dispatch mode receives: ``aten.OPERATION.OVERLOAD``."""

_IN_PLACE = (
    aten.bernoulli_.float,
    aten.normal_.default,
    aten.uniform_.default,
)
"""Operations that fill a tensor with random numbers. Other random operations are drawn unchanged."""
_LIKE = {
    aten.randn_like.default: aten.normal_.default,
    aten.rand_like.default: aten.uniform_.default,
}
"""Operations that create a random tensor, each with the in-place operation that draws the same values."""
_LIKE_SETTINGS = (0.0, 1.0)
"""Arguments of these in-place operations: mean and standard deviation, or lower and upper bound."""


class RowsOfBatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which random tensors are drawn for the whole batch and reduced to the rows of a micro-batch.

    This covers all dropout layers of torch, modules that drop whole samples, and noise shaped like a tensor
    (`torch.randn_like`). Random tensors whose number of rows is no multiple of the samples are drawn unchanged.
    """

    def __init__(self, begin: int, count: int, samples: int) -> None:
        """Select ``count`` samples from index ``begin`` on, in a batch of ``samples`` samples."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._begin = begin
        self._count = count
        self._batch_samples = samples

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in _LIKE and self._has_rows(args[0]):
            # `randn_like` draws the same values as `normal_` on an empty tensor.
            func = _LIKE[func]
            empty = torch.empty_like(args[0], **options)
            args = (empty, *_LIKE_SETTINGS)
            options = {}
        if func not in _IN_PLACE or not self._has_rows(args[0]):
            return func(*args, **options)
        target, *settings = args
        # Attention, for example, has a row for each head of each sample.
        rows_per_sample = target.shape[0] // self._count
        whole = _empty_batch(target, rows_per_sample * self._batch_samples)
        func(whole, *settings, **options)
        first_row = rows_per_sample * self._begin
        own_rows = whole.narrow(0, first_row, rows_per_sample * self._count)
        return target.copy_(own_rows)

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the same number of rows for each sample of the micro-batch."""
        if tensor.ndim == 0:
            return False
        return bool(tensor.shape[0] % self._count == 0)


def _empty_batch(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an empty tensor of ``rows`` rows with the memory format of ``part``."""
    # Random numbers fill the memory in order, so the whole batch must have its axes in memory in the order of the part.
    axes = range(part.ndim)
    strides: Sequence[int] = part.stride()
    # In memory, the axis with the longest stride is the outermost.
    memory_order = sorted(axes, key=lambda axis: -strides[axis])
    sizes = (rows, *part.shape[1:])
    sizes_in_memory = [sizes[axis] for axis in memory_order]
    whole = part.new_empty(sizes_in_memory)
    places = [memory_order.index(axis) for axis in axes]
    return whole.permute(places)
