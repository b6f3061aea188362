"""Lookup of torch classes by name, and of classes and functions in a user's file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from testbed.common import usercode
from testbed.common.errors import InputError, Key
from testbed.common.usercode import Code
from testbed.ml.training.schema import NamedPart


def find(
    part: NamedPart,
    codes: Mapping[str, Code],
    key: Key,
    module: ModuleType,
    base: type,
    suffix: str = "",
    without: Collection[str] = (),
) -> Callable[..., Any]:
    """Return the class of ``module``, derived from ``base``, named by a part, or the definition in its file.

    Case, dashes, and a ``suffix`` common to all names of the module are optional. ``codes`` has the text of files by
    `NamedPart.title`. Raises `InputError` listing the valid names; ``without`` lists unsupported names.
    """
    if part.file is not None:
        return usercode.function(codes[part.title], (*key, "file"))
    known = {
        _normalise_name(name, suffix): (name, each)
        for name, each in vars(module).items()
        if inspect.isclass(each) and issubclass(each, base) and each is not base
        if not name.startswith("_") and name not in without
    }
    if (wanted := _normalise_name(part.name, suffix)) not in known:
        names = ", ".join(sorted(name for name, _ in known.values()))
        raise InputError(
            f"{module.__name__} has no '{part.name}' supported here; available: {names}",
            (*key, "name"),
        )
    definition: Callable[..., Any] = known[wanted][1]
    return definition


def make(
    called: Callable[..., Any], part: NamedPart, key: Key, *given: Any, **options: Any
) -> Any:
    """Call a class or function with the options of a part; raises `InputError` for wrong options."""
    try:
        return called(*given, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        text = re.sub(r"\w+\.__init__\(\) ", "", str(error))
        raise InputError(
            f"{part.title}: {text or type(error).__name__}", key
        ) from error


def _normalise_name(name: str, suffix: str) -> str:
    return (
        name.lower()
        .replace("-", "")
        .replace("_", "")
        .replace(" ", "")
        .removesuffix(suffix.lower())
    )
