"""Torch, imported by the first use of it: validating, planning and the begin of a run take none of its seconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, found)  # it is not asked for here again
            return found

    torch, nn, functional = _Lazy("torch"), _Lazy("torch.nn"), _Lazy("torch.nn.functional")
