"""Late imports: numpy and asyncio by their first use, and packages of extras.

Planning needs none of them, nor does a device that has nothing to do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError, Key


class Lazy:
    """A module that is imported with the first use of one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # it is not asked for here again
        return found


if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy import typing as npt
else:
    asyncio, np, npt = Lazy("asyncio"), Lazy("numpy"), Lazy("numpy.typing")

__all__ = ["Lazy", "asyncio", "need", "np", "npt"]


def need(module: str, extra: str, what: str, key: Key = ()) -> Any:
    """Import a module for what needs it; raises `InputError` that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0]
        raise InputError(f"{what} needs {missing}: pip install 'edge-testbed[{extra}]' ({error})", key) from None
