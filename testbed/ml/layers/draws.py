"""Random numbers for some rows of a batch, equal to those of the whole batch.

With these, dropout drops the same values however a batch is cut into micro-batches. A pipeline therefore computes the
same gradients as one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
"""Torch's operations as a dispatch mode receives them: each with the name of its overload."""

_IN_PLACE = (
    aten.bernoulli_.float,
    aten.normal_.default,
    aten.uniform_.default,
)
"""Functions that fill a tensor with random numbers."""
_STANDARD = (0.0, 1.0)
"""Arguments of the functions of `_LIKE`: mean and standard deviation, or lower and upper bound."""
_LIKE = {
    aten.randn_like.default: aten.normal_.default,
    aten.rand_like.default: aten.uniform_.default,
}
"""Functions creating a random tensor, and the in-place functions drawing their values."""


class RowsOfBatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which random tensors are drawn for the whole batch and reduced to the rows of some samples.

    All dropout layers of torch draw this way, as do modules dropping whole samples, and noise shaped like a tensor
    (`torch.randn_like`). Random tensors without one row per sample are drawn unchanged.
    """

    def __init__(self, begin: int, count: int, samples: int) -> None:
        """Select ``count`` rows starting at ``begin`` in a batch of ``samples``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._begin = begin
        self._count = count
        self._samples = samples

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in _LIKE and self._has_rows(args[0]):
            # `randn_like` is the same as `normal_` on an empty tensor.
            func = _LIKE[func]
            empty = torch.empty_like(args[0], **options)
            args = (empty, *_STANDARD)
            options = {}
        if func not in _IN_PLACE or not self._has_rows(args[0]):
            return func(*args, **options)
        drawn, *settings = args
        # Attention has a row for each head of each sample, for example.
        rows_per_sample = drawn.shape[0] // self._count
        whole = _empty_batch(drawn, rows_per_sample * self._samples)
        func(whole, *settings, **options)
        first = rows_per_sample * self._begin
        own = whole.narrow(0, first, rows_per_sample * self._count)
        return drawn.copy_(own)

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has rows, and the same number of rows for each sample."""
        if tensor.ndim == 0:
            return False
        return bool(tensor.shape[0] % self._count == 0)


def _empty_batch(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an empty tensor of ``rows`` rows with the memory format of ``part``."""
    # Random numbers fill the memory in order, so the axes of the whole batch must lie in it as those of the part do.
    axes = range(part.ndim)
    strides: Sequence[int] = part.stride()
    # A contiguous tensor has its axes in memory from the longest stride to the shortest.
    order = sorted(axes, key=lambda axis: -strides[axis])
    sizes = (rows, *part.shape[1:])
    sizes_in_memory = [sizes[axis] for axis in order]
    whole = part.new_empty(sizes_in_memory)
    places = [order.index(axis) for axis in axes]
    return whole.permute(places)
