"""Imports of packages that import much themselves, of which an agent uses nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

ALONE = threading.Lock()
"""Held by who imports something in a thread of its own, so that it does not find others' placeholders."""


class Placeholder(ModuleType):
    """Has a class of every name, so that it can be imported from, called and inherited from."""

    __path__: list[str] = []  # noqa: RUF012 - as every package has it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):  # what a module may have, such as __spec__
            raise AttributeError(name)
        return type(name, (Exception,), {"__module__": self.__name__})


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let what is imported meanwhile find placeholders in the place of these modules, where they are not there yet.

    Whoever imports them later gets them as they are. To be called with `ALONE` held.
    """
    absent = {name: Placeholder(name) for name in names if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
