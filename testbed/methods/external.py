"""Methods from a file named by a scenario, or from an installed package.

Devices have neither the file nor the package, so they receive the source text as a `testbed.common.usercode.Code`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from testbed.common import plugins, usercode
from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.method import Method
from testbed.trace.registry import metrics_of
from testbed.work import register_workload
from testbed.workload import Workload

GROUP = "testbed.methods"
"""Entry point group of methods in installed packages: ``name = "module:Class"``."""
FILE_KEY = ("method", "file")
"""Scenario key, below `workload`, at which errors of a method's file are reported."""


def from_file(file: Path, name: str) -> Method:
    """Load a method by name from a file. Raises `InputError` naming the key and the line."""
    return from_code(usercode.read(file, name, FILE_KEY))


def from_code(code: Code) -> Method:
    """Import a method from source text. Raises `InputError` describing the problem."""
    module = usercode.load(code, FILE_KEY)
    return _make_instance(_method_classes(module, code), code)


def register_work(code: Code) -> None:
    """Import and register a workload from source text. Raises `InputError` describing the problem."""
    for candidate in vars(usercode.load(code, ("task",))).values():
        if not inspect.isclass(candidate) or not issubclass(candidate, Workload):
            continue
        # Only a name defined in the class itself: a subclass may inherit the name of another workload.
        if vars(candidate).get("name") == code.name:
            register_workload(code.name, candidate())


def _method_classes(module: ModuleType, code: Code) -> dict[str, type[Method]]:
    """Return the methods defined by a module, by name."""
    classes: dict[str, type[Method]] = {}
    for candidate in vars(module).values():
        if not inspect.isclass(candidate) or not issubclass(candidate, Method):
            continue
        # The file may import methods of the testbed, which it does not define.
        is_own = candidate.__module__ in code.sources
        if is_own and isinstance(vars(candidate).get("name"), str):
            classes[candidate.name] = candidate
    return classes


def _make_instance(classes: Mapping[str, type[Method]], code: Code) -> Method:
    file = usercode.file_of(code.module)
    if code.name not in classes:
        defined = ", ".join(classes) or "none"
        raise InputError(
            f"{file} defines no method '{code.name}': add a class derived from Method with `name = \"{code.name}\"` "
            f"(methods of the file: {defined})",
            FILE_KEY,
        )
    method_class = classes[code.name]
    missing = sorted(method_class.__abstractmethods__)
    if missing:
        raise InputError(
            f"{file}: {method_class.__name__} lacks {' and '.join(missing)}", FILE_KEY
        )
    try:
        metrics_of(method_class.declared)
    except ValueError as error:
        raise InputError(
            f"{file}: {method_class.__name__}: {error}", FILE_KEY
        ) from None
    return make(method_class)


def make(method_class: type[Method]) -> Method:
    """Instantiate a method class; the first paragraph of the class docstring is the default summary."""
    if not hasattr(method_class, "summary"):
        method_class.summary = plugins.summarize(method_class)
    return method_class()


def code_of(method: Method | Workload) -> Code | None:
    """Return the source text of a method or workload for devices; None for the testbed's own.

    Raises `InputError` if the source text is unavailable or too long.
    """
    module = type(method).__module__
    # Every device has the testbed's own packages.
    if module == "testbed" or module.startswith("testbed."):
        return None
    code = usercode.code_of_module(method.name, module)
    if code is not None:
        return code
    return usercode.code_of_package(method.name, module, ("method", "name"))
