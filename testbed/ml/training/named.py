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


def find_definition(
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

    >>> import torch
    >>> part = NamedPart(name="smooth-l1")
    >>> find_definition(part, {}, ("training", "loss"), torch.nn, torch.nn.Module, "Loss").__name__
    'SmoothL1Loss'
    """
    if part.file is not None:
        return usercode.function(codes[part.title], (*key, "file"))
    known = _subclasses(module, base, without)
    wanted = _normalise_name(part.name, suffix)
    for name, definition in known.items():
        if _normalise_name(name, suffix) == wanted:
            return definition
    raise InputError(
        f"{module.__name__} has no '{part.name}' supported here; available: {', '.join(sorted(known))}",
        (*key, "name"),
    )


def _subclasses(
    module: ModuleType, base: type, without: Collection[str]
) -> dict[str, Callable[..., Any]]:
    """Return the public classes of a module that are derived from ``base``, by name."""
    classes: dict[str, Callable[..., Any]] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in without:
            continue
        if inspect.isclass(value) and issubclass(value, base) and value is not base:
            classes[name] = value
    return classes


def call_definition(
    called: Callable[..., Any],
    part: NamedPart,
    key: Key,
    *given: Any,
    **options: Any,
) -> Any:
    """Call a class or function with the options of a part; raises `InputError` for wrong options."""
    try:
        return called(*given, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        # "SGD.__init__() got an unexpected ..." names a method that the user never sees.
        text = re.sub(r"\w+\.__init__\(\) ", "", str(error))
        raise InputError(
            f"{part.title}: {text or type(error).__name__}", key
        ) from error


def _normalise_name(name: str, suffix: str) -> str:
    """Return a name without case, dashes and suffix: "smooth-l1" and "SmoothL1Loss" are one name."""
    letters = re.sub("[-_ ]", "", name.lower())
    return letters.removesuffix(suffix.lower())
