"""Methods that are no part of this code: in a file that a scenario names, or in an installed package.

A device has neither the file nor the package, so the source text travels to it, and is imported there under the same
module names. Text is all that travels, and it is the code of the user who runs the experiment, on their own machines.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from testbed.errors import InputError
from testbed.trace.registry import figures_of

if TYPE_CHECKING:
    from testbed.methods.base import Method

GROUP = "testbed.methods"
"""Entry points under which an installed package registers its methods: ``name = "module:Class"``."""
FILE_KEY = ("method", "file")
MOST_CHARACTERS = 2_000_000
"""Of all source text of a method together: more is no method, but a package that should be split."""


class MethodCode(BaseModel):
    """A method as text."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    """Of the method."""
    module: str
    """The module that defines its class."""
    sources: dict[str, str]
    """Source text of that module, and of the others of its package, by module name."""


class _TextImporter(MetaPathFinder, InspectLoader):
    """Finds and loads modules whose source text it was given."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.files: dict[str, str] = {}
        """Where a text comes from, for tracebacks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.files.get(fullname))

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self.sources)

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname]

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.sources[fullname], self.files.get(fullname, f"<{fullname}>"), "exec")


_IMPORTER = _TextImporter()


def from_file(file: Path, name: str) -> Method:
    """Return the method of that name that a file defines; raises `InputError` naming the key and the file's line.

    A process reads a file once: what runs, what its figures are and what is kept with the results is the same text.
    """
    return _from_file(file.resolve(), name, str(file))


@cache
def _from_file(file: Path, name: str, shown: str) -> Method:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{shown} is not text: name a Python file", FILE_KEY) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{shown} cannot be read ({reason}): name a Python file, relative to the scenario", FILE_KEY
        ) from None
    # By its content: two files of one name are two modules, and a file that was edited is another one.
    module = f"method_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    _IMPORTER.files[module] = shown
    return from_code(MethodCode(name=name, module=module, sources={module: text}))


def from_code(code: MethodCode) -> Method:
    """Import a method from its text; raises `InputError` saying what is wrong with it."""
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.append(_IMPORTER)
    _IMPORTER.sources |= code.sources
    try:
        module = importlib.import_module(code.module)
    except SyntaxError as error:
        raise InputError(f"{error.filename}:{error.lineno}: is not Python: {error.msg}", FILE_KEY) from None
    except Exception as error:
        raise InputError(f"{_line(error, code)}: {type(error).__name__}: {error}", FILE_KEY) from error
    return _instance(_classes(module, code), code)


def _line(error: Exception, code: MethodCode) -> str:
    """Return the last line of the method's own text that an exception went through."""
    files = {_IMPORTER.files.get(name, f"<{name}>") for name in code.sources}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else _IMPORTER.files.get(code.module, code.module)


def _classes(module: ModuleType, code: MethodCode) -> dict[str, type[Method]]:
    """Return the methods that a module defines, by name."""
    from testbed.methods.base import Method

    own = (each for each in vars(module).values() if inspect.isclass(each) and each.__module__ in code.sources)
    return {each.name: each for each in own if issubclass(each, Method) and isinstance(vars(each).get("name"), str)}


def _instance(classes: Mapping[str, type[Method]], code: MethodCode) -> Method:
    file = _IMPORTER.files.get(code.module, code.module)
    if code.name not in classes:
        known = ", ".join(classes) or "none"
        raise InputError(
            f"{file} defines no method '{code.name}': a class derived from Method with `name = \"{code.name}\"` is "
            f"looked for (there: {known})",
            FILE_KEY,
        )
    found = classes[code.name]
    if missing := sorted(found.__abstractmethods__):
        raise InputError(f"{file}: {found.__name__} lacks {' and '.join(missing)}", FILE_KEY)
    try:
        figures_of(found.declared)
    except ValueError as error:
        raise InputError(f"{file}: {found.__name__}: {error}", FILE_KEY) from None
    if not hasattr(found, "summary"):
        found.summary = inspect.getdoc(found) or ""
    return found()


def code_of(method: Method) -> MethodCode | None:
    """Return a method as text, to be sent to devices; None for one of this code, which they have.

    Raises `InputError` where it is no text, or too much.
    """
    module = type(method).__module__
    if module == "testbed" or module.startswith("testbed."):
        return None
    if module in _IMPORTER.sources:
        return MethodCode(name=method.name, module=module, sources={module: _IMPORTER.sources[module]})
    sources = {name: _source(name) for name in _modules(module.partition(".")[0])}
    if sum(map(len, sources.values())) > MOST_CHARACTERS:
        raise InputError(
            f"the package of '{method.name}' has more than {MOST_CHARACTERS:,} characters: put the method into one of "
            "its own",
            ("method", "name"),
        )
    return MethodCode(name=method.name, module=module, sources=sources)


def _modules(package: str) -> list[str]:
    """Return a package and all modules in it, or a module that is no package."""
    found = importlib.import_module(package)
    paths = getattr(found, "__path__", None)
    inner = pkgutil.walk_packages(paths, f"{package}.") if paths is not None else ()
    return [package, *(each.name for each in inner)]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    text = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    if text is None:
        raise InputError(f"{module} has no source text, which is what devices are sent", ("method", "name"))
    return text
