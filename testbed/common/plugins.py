"""Entry points by which installed packages extend the testbed; docs/extending.md describes the groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from testbed.common.errors import InputError, Key

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Loaded = TypeVar("Loaded")


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name."""
    # The import and the scan take about 20 ms, which commands without a use for packages do not pay.
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=group)}


def find(group: str, name: str, key: Key) -> Any:
    """Import the object of that name in a group; None without one. Raises `InputError` as `load` does."""
    point = installed(group).get(name)
    return None if point is None else load(point, key, lambda found: found)


def load(point: EntryPoint, key: Key, convert: Callable[[Any], Loaded]) -> Loaded:
    """Import an entry point and convert the object; raises `InputError` naming the package where either fails."""
    try:
        return convert(point.load())
    except (Exception, SystemExit) as error:
        package = point.dist.name if point.dist is not None else point.module
        reason = " ".join(str(error).split())
        text = f"the package '{package}' that brings '{point.name}' cannot be used: {type(error).__name__}: {reason}"
        raise InputError(text, key) from error
