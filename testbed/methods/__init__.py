"""Published systems and baselines, one folder each, and the registry of them all."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from testbed.errors import InputError

if TYPE_CHECKING:
    from testbed.methods.base import Method

_CLASSES = {
    "single": "testbed.methods.single:Single",
    "sequential": "testbed.methods.sequential:Sequential",
    "pipeline": "testbed.methods.pipeline:Pipeline",
    "distributed": "testbed.methods.distributed:Distributed",
    "gpipe": "testbed.methods.gpipe:GPipe",
    "model-parallelism": "testbed.methods.modelparallelism:ModelParallelism",
    "ftpipehd": "testbed.methods.ftpipehd:FTPipeHD",
    "pipedream": "testbed.methods.pipedream:PipeDream",
    "respipe": "testbed.methods.respipe:ResPipe",
    "exchange": "testbed.methods.exchange:Exchange",
}


@cache
def _load(name: str) -> Method:
    module, _, attribute = _CLASSES[name].partition(":")
    method: Method = getattr(importlib.import_module(module), attribute)()
    return method


class _Registry(Mapping[str, "Method"]):
    """Name -> method; a method's module is imported when it is first asked for."""

    def __getitem__(self, name: str) -> Method:
        if name not in _CLASSES:
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


METHODS: Mapping[str, Method] = _Registry()


def get(name: str) -> Method:
    """Return the method of that name; raises `InputError` naming those there are."""
    if name not in _CLASSES:
        raise InputError(f"there is no method '{name}'; choose one of {', '.join(_CLASSES)}", ("method", "name"))
    return _load(name)
