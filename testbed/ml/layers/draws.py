"""Random numbers for some rows of a batch, equal to those of the whole batch, so dropout ignores splitting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_IN_PLACE = (
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
)
_LIKE = {
    torch.ops.aten.randn_like.default: (torch.ops.aten.normal_.default, (0.0, 1.0)),
    torch.ops.aten.rand_like.default: (torch.ops.aten.uniform_.default, (0.0, 1.0)),
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
            func, settings = _LIKE[func]
            args = (torch.empty_like(args[0], **options), *settings)
            options = {}
        if func not in _IN_PLACE or not self._has_rows(args[0]):
            return func(*args, **options)
        drawn, *settings = args
        # Attention has a row for each head of each sample, for example.
        rows_each = drawn.shape[0] // self._count
        whole = _empty_batch(drawn, rows_each * self._samples)
        func(whole, *settings, **options)
        own = whole.narrow(0, rows_each * self._begin, rows_each * self._count)
        return drawn.copy_(own)

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has as many rows for each sample."""
        return tensor.ndim > 0 and tensor.shape[0] % self._count == 0


def _empty_batch(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an empty tensor of ``rows`` rows with the memory format of ``part``."""
    # Random numbers fill the memory in order, so the axes of the whole batch must lie in it as those of the part do.
    axes = range(part.ndim)
    strides: Sequence[int] = part.stride()
    order = sorted(axes, key=lambda axis: -strides[axis])
    sizes = (rows, *part.shape[1:])
    whole = part.new_empty([sizes[axis] for axis in order])
    return whole.permute([order.index(axis) for axis in axes])
