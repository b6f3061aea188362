"""What tensors a device holds, and how many bytes it held at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.common import formats
from testbed.common.errors import TestbedError

if TYPE_CHECKING:
    import torch


class Ledger:
    """Bytes of weights and activations that are resident, counted as tensors come and go.

    A device that would hold more than it has memory fails, as one would whose kernel has nothing left to give.
    """

    def __init__(self, device: str, memory: float) -> None:
        self.weights = 0
        self.activations = 0
        self.peak = 0
        """Most bytes of activations at once."""
        self._device = device
        self._memory = memory

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count activations that begin to be resident; raises `TestbedError` where the memory does not suffice."""
        self.activations += tensor.nbytes
        self.peak = max(self.peak, self.activations)
        if self.weights + self.activations > self._memory:
            raise TestbedError(
                f"{self._device} has {formats.size(self._memory)} of memory, and its weights "
                f"({formats.size(self.weights)}) and activations ({formats.size(self.activations)}) are more: use more "
                "devices, a smaller batch_size or fewer requests in_flight"
            )
        return tensor

    def drop(self, tensor: torch.Tensor) -> None:
        """Count activations that are resident no more."""
        self.activations -= tensor.nbytes
