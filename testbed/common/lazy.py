"""What is imported late: torch and numpy by their first use, since planning needs neither, and packages of extras."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError, Key

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy import typing as npt
    from torch import nn
    from torch.nn import functional
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, found)  # it is not asked for here again
            return found

    np, npt = _Lazy("numpy"), _Lazy("numpy.typing")
    torch, nn, functional = _Lazy("torch"), _Lazy("torch.nn"), _Lazy("torch.nn.functional")

__all__ = ["functional", "need", "nn", "np", "npt", "torch"]


def need(module: str, extra: str, what: str, key: Key = ()) -> Any:
    """Import a module for what needs it; raises `InputError` that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0]
        raise InputError(f"{what} needs {missing}: pip install 'edge-testbed[{extra}]' ({error})", key) from None
