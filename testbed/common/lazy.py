"""Deferred imports of numpy, asyncio and the packages of extras.

Neither planning nor an idle device needs any of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError, Key


class Lazy:
    """Proxy of a module, imported on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        # Python calls __getattr__ for missing attributes only, so later accesses find the stored value at once.
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import asyncio

    import numpy as np
    from numpy import typing as npt
else:
    asyncio, np, npt = Lazy("asyncio"), Lazy("numpy"), Lazy("numpy.typing")

__all__ = ["Lazy", "asyncio", "np", "npt", "require_extra"]


def require_extra(module: str, extra: str, feature: str, key: Key = ()) -> Any:
    """Import an optional module for a feature. Raises `InputError` naming the missing extra."""
    try:
        return importlib.import_module(module)
    # The original error is part of the text, since the module may be installed but lack one of its own dependencies.
    except ImportError as error:
        missing = module.partition(".")[0]
        raise InputError(
            f"{feature} needs {missing}: pip install 'edge-testbed[{extra}]' ({error})",
            key,
        ) from None
