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
    unsupported: Collection[str] = (),
) -> Callable[..., Any]:
    """Return the class or function with the name of a part: from the user's file if the part names one, else a class.

    Classes are those of ``module`` derived from ``base``, except ``unsupported`` names. In a name, case, dashes, and a
    ``suffix`` common to the classes of the module are optional. ``codes`` has the text of files by `NamedPart.title`;
    ``key`` is the part's key in the scenario. Raises `InputError` that lists the available names.

    >>> import torch
    >>> part = NamedPart(name="smooth-l1")
    >>> find_definition(part, {}, ("training", "loss"), torch.nn, torch.nn.Module, "Loss").__name__
    'SmoothL1Loss'
    """
    if part.file is not None:
        return usercode.function(codes[part.title], (*key, "file"))
    classes = _subclasses(module, base, unsupported)
    normalised_name = _normalise_name(part.name, suffix)
    for name, definition in classes.items():
        if _normalise_name(name, suffix) == normalised_name:
            return definition
    raise InputError(
        f"{module.__name__} has no '{part.name}' supported here; available: {', '.join(sorted(classes))}",
        (*key, "name"),
    )


def _subclasses(
    module: ModuleType, base: type, unsupported: Collection[str]
) -> dict[str, Callable[..., Any]]:
    """Return the public classes of a module derived from ``base``, by name, without ``unsupported`` ones."""
    classes: dict[str, Callable[..., Any]] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in unsupported:
            continue
        if inspect.isclass(value) and issubclass(value, base) and value is not base:
            classes[name] = value
    return classes


def call_definition(
    definition: Callable[..., Any],
    part: NamedPart,
    key: Key,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Return the result of a class or function for ``arguments`` and ``options``.

    Raises `InputError` with the key and the name of the part if the definition rejects the options.
    """
    try:
        return definition(*arguments, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        # In "SGD.__init__() got an unexpected ..." the prefix names a method that the user never sees.
        text = re.sub(r"\w+\.__init__\(\) ", "", str(error))
        raise InputError(
            f"{part.title}: {text or type(error).__name__}", key
        ) from error


def _normalise_name(name: str, suffix: str) -> str:
    """Return a name without case, dashes and suffix: "smooth-l1" and "SmoothL1Loss" are one name."""
    letters = re.sub("[-_ ]", "", name.lower())
    return letters.removesuffix(suffix.lower())
