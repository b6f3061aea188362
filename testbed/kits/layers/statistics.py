"""Running statistics of batch normalisation, where batches are under way that may have to be done again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from testbed.common.lazy import torch

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """Keeps what a forward adds to the running statistics aside until its batch is done.

    A forward normalises by its own batch and only adds to the running averages, r = (1 - m) r + m x. It runs on
    averages of zero, which leaves m x in them; `apply` does the rest, in the order of the backwards. Without a
    momentum m is one over the number of batches so far, which was one in that forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        from torch.nn.modules.batchnorm import _NormBase

        self._normalisations = [
            part for part in module.modules() if isinstance(part, _NormBase) and part.running_mean is not None
        ]
        self._aside: dict[Hashable, list[dict[str, torch.Tensor]]] = {}

    @contextmanager
    def set_aside(self, key: Hashable) -> Iterator[None]:
        """Run a forward of this key within."""
        lasting = [{name: part._buffers[name] for name in _BUFFERS} for part in self._normalisations]
        for part, buffers in zip(self._normalisations, lasting, strict=True):
            part._buffers.update(
                {name: torch.zeros_like(value) for name, value in buffers.items() if value is not None}
            )
        yield
        self._aside[key] = [{name: part._buffers[name] for name in _BUFFERS} for part in self._normalisations]  # type: ignore[misc]
        for part, buffers in zip(self._normalisations, lasting, strict=True):
            part._buffers.update(buffers)

    def apply(self, key: Hashable) -> None:
        """Add what the forward of this key had to add."""
        for part, added in zip(self._normalisations, self._aside.pop(key), strict=True):
            assert part.num_batches_tracked is not None
            part.num_batches_tracked.add_(added["num_batches_tracked"])
            weight = 1.0 if part.momentum is not None else 1 / int(part.num_batches_tracked)
            keep = 1 - (weight if part.momentum is None else part.momentum)
            for name in ("running_mean", "running_var"):
                buffer = part._buffers[name]
                assert buffer is not None
                buffer.mul_(keep).add_(added[name], alpha=weight)

    def drop(self, key: Hashable) -> None:
        """Forget what the forward of this key had to add."""
        del self._aside[key]

    def clear(self) -> None:
        """Forget what was set aside: those batches are done again."""
        self._aside.clear()
