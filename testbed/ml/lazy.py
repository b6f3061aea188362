"""Torch, imported by its first use: planning needs none of it, nor does a device that has nothing to do."""

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
