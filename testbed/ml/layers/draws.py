"""Random numbers for some rows of a batch, equal to those of the whole batch, so dropout ignores splitting."""

from __future__ import annotations

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
        if func in _LIKE and args[0].ndim and args[0].shape[0] % self._count == 0:
            func, settings = _LIKE[func]
            args, options = (torch.empty_like(args[0], **options), *settings), {}
        if func not in _IN_PLACE or not args[0].ndim or args[0].shape[0] % self._count:
            return func(*args, **options)
        drawn, *probability = args
        each = drawn.shape[0] // self._count
        # Draws go by memory: the whole batch lies in it as these rows do.
        order = sorted(range(drawn.ndim), key=lambda axis: -drawn.stride(axis))
        sizes = (each * self._samples, *drawn.shape[1:])
        whole = drawn.new_empty([sizes[axis] for axis in order])
        whole = whole.permute([order.index(axis) for axis in range(drawn.ndim)])
        func(whole, *probability, **options)
        return drawn.copy_(whole.narrow(0, each * self._begin, each * self._count))
