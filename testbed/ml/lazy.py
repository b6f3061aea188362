"""Lazy import of torch, which planning and idle devices do not need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.common.lazy import Lazy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional
else:
    torch, nn, functional = Lazy("torch"), Lazy("torch.nn"), Lazy("torch.nn.functional")

__all__ = ["functional", "nn", "torch"]
