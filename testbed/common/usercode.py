"""Python that is no part of this code: in a file that a scenario names, and as text on the devices.

A device has no such file, so its source text travels there, and is imported under the same module name. Text is all
that travels, nothing is unpickled, and it is the code of the user who runs the experiment, on their own machines.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from testbed.common.errors import InputError, Key


class Code(BaseModel):
    """Something that a module defines, as text."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    name: str
    """Name of a method, or of a function."""
    module: str
    """The module that defines it."""
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
        return compile(self.sources[fullname], shown(fullname), "exec", dont_inherit=True)


_IMPORTER = _TextImporter()


def read(file: Path, name: str, key: Key) -> Code:
    """Return a file's text as the code of something in it; raises `InputError` naming the key.

    A process reads a file once: what runs, what it declares and what is kept with the results is the same text.
    """
    module, text = _text(file.resolve(), str(file), key)
    return Code(name=name, module=module, sources={module: text})


@cache
def _text(file: Path, named: str, key: Key) -> tuple[str, str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{named} is not text: name a Python file", key) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{named} cannot be read ({reason}): name a Python file, relative to the scenario", key
        ) from None
    # By its content: two files of one name are two modules, and a file that was edited is another one.
    module = f"{key[0]}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if _IMPORTER.files.get(module, named) != named:
        sys.modules.pop(module, None)  # compiled under another file's name, which errors would be looked for in
    _IMPORTER.files[module] = named
    return module, text


def clear_cache() -> None:
    """Read files again when they are next asked for, so that edits are seen."""
    _text.cache_clear()


def load(code: Code, key: Key) -> ModuleType:
    """Import the module that defines something; raises `InputError` naming the key and the line."""
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.append(_IMPORTER)
    _IMPORTER.sources |= code.sources
    try:
        return importlib.import_module(code.module)
    except SyntaxError as error:
        raise InputError(f"{error.filename}:{error.lineno}: is not Python: {error.msg}", key) from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{line_of(error, code)}: {type(error).__name__}: {error}", key) from error


def call(code: Code, key: Key, **arguments: Any) -> Any:
    """Return what a function returns; raises `InputError` naming the key and the line that raised something."""
    called = function(code, key)
    try:
        return called(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{line_of(error, code)}: {type(error).__name__}: {error}", key) from error


def function(code: Code, key: Key) -> Callable[..., Any]:
    """Return the function or class of that name that a module defines; raises `InputError` naming those there are."""
    module = load(code, key)
    found: Any = vars(module).get(code.name)
    if not callable(found):
        own = [name for name, each in vars(module).items() if getattr(each, "__module__", None) == code.module]
        wrong = f"defines no function '{code.name}': " if code.name else "is a file: "
        text = f"{shown(code.module)} {wrong}name a function of it (there: {', '.join(own) or 'none'})"
        raise InputError(text, (key[0], "name"))
    checked: Callable[..., Any] = found
    return checked


def line_of(error: BaseException, code: Code) -> str:
    """Return the last line of this text that an exception went through; its file where it went through none."""
    files = {shown(name) for name in code.sources}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else shown(code.module)


def shown(module: str) -> str:
    """Return the file of a module's text as the user named it."""
    return _IMPORTER.files.get(module, f"<{module}>")
