"""The registry of all methods, including methods of installed packages such as those in papers/."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.common import plugins
from testbed.common.errors import InputError, nearest
from testbed.method import Method
from testbed.methods import external
from testbed.work import WorkloadPart

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Classes are named as text: each module is imported with the first use of its method, and the core works without torch.
_CLASSES = {
    "single": "testbed.ml.methods.single:Single",
    "sequential": "testbed.ml.methods.sequential:Sequential",
    "pipeline": "testbed.ml.methods.pipeline:Pipeline",
    "gpipe": "testbed.ml.methods.pipeline:GPipe",
    "model-parallelism": "testbed.ml.methods.pipeline:ModelParallelism",
    "pipedream": "testbed.ml.methods.pipedream:PipeDream",
    "respipe": "testbed.ml.methods.pipedream:ResPipe",
    "federated": "testbed.ml.methods.federated:Federated",
    "split-learning": "testbed.ml.methods.federated:SplitLearning",
    "split-federated": "testbed.ml.methods.federated:SplitFederated",
    "program": "testbed.methods.program:Program",
    "exchange": "testbed.ml.methods.exchange:Exchange",
}


@cache
def _load_method(name: str) -> Method:
    if name in _CLASSES:
        module, _, attribute = _CLASSES[name].partition(":")
        method: Method = getattr(importlib.import_module(module), attribute)()
        return method
    return plugins.load(_installed_methods()[name], ("method", "name"), external.make)


def _installed_methods() -> Mapping[str, EntryPoint]:
    return plugins.installed(external.GROUP)


class _Registry(Mapping[str, "Method"]):
    """Mapping of names to methods, each imported on first use."""

    def __getitem__(self, name: str) -> Method:
        if name not in _CLASSES and name not in _installed_methods():
            raise KeyError(name)
        return _load_method(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**_CLASSES, **_installed_methods()})

    def __len__(self) -> int:
        return len({**_CLASSES, **_installed_methods()})


METHODS: Mapping[str, Method] = _Registry()
"""All methods by name. The testbed's own methods come first in lists, and win over installed methods of the same name.

A key ``TASK.NAME`` is a package's method NAME for one task only; the key NAME is the method for all other tasks.
"""


def get(name: str, task: str = "") -> Method:
    """Return a method by name; raises `InputError` with the most similar names, or with all names.

    >>> get("program").tasks
    ('program',)
    """
    # A package's method for the task overrides the method of that name for all tasks.
    for key in (f"{task}.{name}", name):
        if key in METHODS:
            return METHODS[key]
    raise InputError(
        f"unknown method '{name}': {nearest(name, METHODS)}", ("method", "name")
    )


def find(workload: WorkloadPart, folder: Path) -> Method:
    """Return the method of a workload; a file of the method is relative to ``folder``, the folder of the scenario.

    Raises `InputError` as `get` does.
    """
    part = workload.method
    if part.file is None:
        return get(part.name, workload.task)
    return external.from_file(folder / part.file, part.name)
