"""Entry points by which installed packages extend the testbed; docs/extending.md describes the groups."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from testbed.common.errors import InputError, Key, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Loaded = TypeVar("Loaded")


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name."""
    # Imported here, because the import and the scan take about 20 ms, which many commands can save.
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=group)}


def find(group: str, name: str, key: Key) -> Any:
    """Import an object of a group by name; None if missing. Raises `InputError` as `load` does."""
    point = installed(group).get(name)
    return None if point is None else load(point, key, lambda plugin: plugin)


def load(point: EntryPoint, key: Key, convert: Callable[[Any], Loaded]) -> Loaded:
    """Import an entry point and convert the object. Raises `InputError` naming the package if either fails."""
    try:
        return convert(point.load())
    # A package's code may raise any exception, and a script without a main guard may exit.
    except (Exception, SystemExit) as error:
        package = point.dist.name if point.dist is not None else point.module
        reason = " ".join(str(error).split())
        text = f"the package '{package}' that brings '{point.name}' cannot be used: {type(error).__name__}: {reason}"
        raise InputError(text, key) from error


def summarize(extension: object) -> str:
    """Return the first paragraph of an extension's own docstring as one line; empty without a docstring.

    >>> summarize(Registry)
    "The objects of one extension point by name: the testbed's own, then those of installed packages."
    """
    # Not `inspect.getdoc`, which returns the docstring of torch.nn.Module for a model without one.
    text = extension.__doc__ or ""
    return " ".join(text.strip().partition("\n\n")[0].split())


class Registry(Generic[Loaded]):
    """The objects of one extension point by name: the testbed's own, then those of installed packages.

    ``own`` maps names to ``module:attribute``, in the form that a package uses in its ``pyproject.toml``. An object is
    imported when it is first needed. ``convert`` checks the object and raises an error if it does not suit the
    extension point. ``noun`` names the extension point in error messages, as in "unknown fault 'x'".
    """

    def __init__(
        self,
        group: str,
        own: Mapping[str, str],
        noun: str,
        convert: Callable[[Any], Loaded],
    ) -> None:
        self.group = group
        self.own = dict(own)
        self._noun = noun
        self._convert = convert

    def __iter__(self) -> Iterator[str]:
        yield from {**self.own, **installed(self.group)}

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in installed(self.group)

    def find(self, name: str, key: Key = ()) -> Loaded:
        """Return an object by name. Raises `InputError` for an unknown name or an unusable package."""
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return self._convert(getattr(importlib.import_module(module), attribute))
        if name not in self:
            raise InputError(
                f"unknown {self._noun} '{name}': {nearest(name, self)}", key
            )
        return load(installed(self.group)[name], key, self._convert)


def subclass_of(base: type[Loaded]) -> Callable[[Any], type[Loaded]]:
    """Return a converter accepting only subclasses of ``base``.

    >>> subclass_of(Exception)(ValueError)
    <class 'ValueError'>
    """

    def convert(candidate: Any) -> type[Loaded]:
        if not (isinstance(candidate, type) and issubclass(candidate, base)):
            raise TypeError(
                f"{candidate!r} must be a subclass of {base.__module__}.{base.__qualname__}"
            )
        return candidate

    return convert
