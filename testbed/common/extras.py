"""Packages that only some things need: each is an extra of this package, and named where it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from testbed.common.errors import InputError, Key


def need(module: str, extra: str, what: str, key: Key = ()) -> Any:
    """Import a module for what needs it; raises `InputError` that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0]
        raise InputError(f"{what} needs {missing}: pip install 'edge-testbed[{extra}]' ({error})", key) from None
