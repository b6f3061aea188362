"""User code outside the testbed's packages: loaded from a file named by a scenario, or from text on a device.

Devices have no copy of the user's file, so its source text is sent to them together with the neighbouring files that it
imports. Only text is sent and nothing is unpickled; the code belongs to the user who runs the experiment on their own
machines.

Modules of user files have unique names such as ``ring_0a1b2c3d4e5f``, derived from the content of the file and its
imports: two files of one name are two modules, an edited file is a new module, and no user file hides an installed
module. Import statements inside these modules resolve by the original names.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from testbed.common.errors import InputError, Key

MAX_CHARACTERS = 2_000_000
"""Maximum number of source characters of a method or model."""


_HOME = Path(__file__).resolve().parents[2]
"""Folder of the testbed's own packages."""
_PACKAGES = ("testbed", "testbed_agent", "testbed_controller")
"""The testbed's own packages, which may be imported from a checkout."""


class Code(BaseModel):
    """Source text of an object defined by a module."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    name: str
    """Name of a method, or of a function."""
    module: str
    """Name of the defining module."""
    sources: dict[str, str]
    """Source text by module name: the module itself and all its imports from the same folder or package."""
    files: dict[str, str] = {}
    """Original file name by module name, where known."""
    imports: dict[str, dict[str, str]] = {}
    """Resolution of import names, by module."""


class _TextImporter(MetaPathFinder, InspectLoader):
    """Import hook that loads modules from source text."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.files: dict[str, str] = {}
        """Where a text comes from, for tracebacks and ``__file__``."""
        self.imports: dict[str, dict[str, str]] = {}
        """See `Code.imports`."""

    def add(self, code: Code) -> None:
        """Register the modules of a code object."""
        for module, file in code.files.items():
            if self.files.get(module, file) != file:
                # Compiled under another file's name, to which its errors would point.
                sys.modules.pop(module, None)
        self.sources |= code.sources
        self.files |= code.files
        self.imports |= code.imports

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        file = self.files.get(fullname)
        origin = None if file is None else str(Path(file).absolute())
        spec = importlib.util.spec_from_loader(fullname, self, origin=origin)
        # With a location, a module has `__file__`, beside which a user's code may read data.
        if spec is not None:
            spec.has_location = file is not None
        return spec

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self.sources)

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname]

    def get_code(self, fullname: str) -> CodeType:
        # Without dont_inherit, this module's own `from __future__ import annotations` would apply.
        return compile(
            self.sources[fullname], file_of(fullname), "exec", dont_inherit=True
        )

    def exec_module(self, module: ModuleType) -> None:
        own = self.imports.get(_root_package(module.__name__))
        if own:
            # Import statements, also those in functions, call what the builtins of their module have for it.
            importing = {"__import__": partial(_import_module, own)}
            module.__dict__["__builtins__"] = {**vars(builtins), **importing}
        super().exec_module(module)


_IMPORTER = _TextImporter()


def _root_package(module: str) -> str:
    return module.partition(".")[0]


def _import_module(
    own: Mapping[str, str], name: str, *arguments: Any, **keywords: Any
) -> ModuleType:
    """Resolve an import statement; ``own`` maps names of user modules to their unique names."""
    relative = arguments[3] if len(arguments) > 3 else keywords.get("level", 0)
    first, dot, rest = name.partition(".")
    if not relative and first in own:
        name = own[first] + dot + rest
    return builtins.__import__(name, *arguments, **keywords)


def read(file: Path, name: str, key: Key) -> Code:
    """Read a file and its imports from the same folder as the code of a named object.

    A process reads a file once: what runs, what it declares and what is kept with the results is the same text. Raises
    `InputError` naming the key, also where a file beside it has the name of another module that can be imported.
    """
    code = _gather_code(file.resolve(), str(file), key)
    return code.model_copy(update={"name": name})


@dataclass
class _Source:
    """An importable file, or a folder of Python files."""

    path: Path
    files: dict[str, Path]
    """Files by module name below the source; "" is the source itself."""
    texts: dict[str, str]
    imported: dict[str, _Source]
    """Imported sources of the same folder, by name."""
    module: str = ""
    """Unique name of the module."""

    @property
    def characters(self) -> int:
        """Length of all texts."""
        return sum(map(len, self.texts.values()))


@cache
def _gather_code(file: Path, named: str, key: Key) -> Code:
    """Collect a file and all its imports from the same folder."""
    main = _Source(file, {"": file}, {"": _read_text(file, named, key)}, {})
    folder, named_folder = file.parent, Path(named).parent
    sources = _with_imports(main, named_folder, key)
    if sum(source.characters for source in sources) > MAX_CHARACTERS:
        text = f"{named} and the files that it imports have more than {MAX_CHARACTERS:,} characters: import less"
        raise InputError(text, key)
    # All names first: an import may be circular.
    for source in sources:
        identifier = re.sub(r"[^0-9A-Za-z_]", "_", source.path.stem)
        source.module = f"{identifier}_{_source_digest(source, folder)}"
    code = Code(name="", module=main.module, sources={}, files={}, imports={})
    for source in sources:
        if source.imported:
            code.imports[source.module] = {
                name: each.module for name, each in source.imported.items()
            }
        for name, text in source.texts.items():
            module = f"{source.module}.{name}" if name else source.module
            place = named_folder / source.files[name].relative_to(folder)
            code.sources[module] = text
            code.files[module] = str(place)
    # Registered before it is loaded, so that a syntax error is located in the user's file.
    _IMPORTER.add(code)
    return code


def _with_imports(main: _Source, named: Path, key: Key) -> list[_Source]:
    """Return a source and its transitive imports from the same folder; fill in `_Source.imported`.

    Raises `InputError` for a name shared with another module.
    """
    folder = main.path.parent
    sources = {main.path: main}
    waiting = [main]
    while waiting:
        source = waiting.pop()
        for name, file, line in _absolute_imports(source):
            path = _find_beside(folder, name)
            if path is None:
                continue
            other = _other_origin(name, path)
            # Devices could import the other module instead, depending on the order of their search path.
            if other is not None:
                where = f"{named / file.relative_to(folder)}:{line}"
                text = f"{where}: imports '{name}', which is {path.name} beside it and {other}: rename {path.name}"
                raise InputError(text, key)
            if path not in sources:
                sources[path] = _open_source(path, key)
                waiting.append(sources[path])
            source.imported[name] = sources[path]
    return list(sources.values())


def _read_text(file: Path, named: str, key: Key) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{named} is not text: name a Python file", key) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{named} cannot be read ({reason}): name a Python file, relative to the scenario",
            key,
        ) from None


def _find_beside(folder: Path, name: str) -> Path | None:
    """Return the file or package of a name in a folder."""
    file, package = folder / f"{name}.py", folder / name
    # The testbed's own packages are on every device.
    if package == _HOME / name:
        return None
    # In Python's order: a package, a module, then a folder without `__init__.py`.
    if (package / "__init__.py").is_file():
        return package
    if file.is_file():
        return file
    return package if package.is_dir() and any(package.glob("*.py")) else None


def _open_source(path: Path, key: Key) -> _Source:
    if path.is_file():
        return _Source(path, {"": path}, {"": _read_text(path, str(path), key)}, {})
    files = {"": path / "__init__.py"}
    for file in sorted(path.rglob("*.py")):
        parts = file.relative_to(path).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if all(part.isidentifier() for part in parts):
            files[".".join(parts)] = file
            # A folder without `__init__.py` is a package, too: an empty one.
            for depth in range(1, len(parts)):
                inner = parts[:depth]
                files.setdefault(".".join(inner), path.joinpath(*inner, "__init__.py"))
    texts = {}
    for name, file in files.items():
        texts[name] = _read_text(file, str(file), key) if file.is_file() else ""
    return _Source(path, files, texts, {})


def _absolute_imports(source: _Source) -> Iterator[tuple[str, Path, int]]:
    """Yield the top-level name of each absolute import, with file and line."""
    for name, text in source.texts.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            # Reported with its line when the module is loaded.
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield _root_package(alias.name), source.files[name], node.lineno
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield _root_package(node.module), source.files[name], node.lineno


def _other_origin(name: str, path: Path) -> str | None:
    """Return the origin of an importable module of the same name outside the folder."""
    if name in sys.stdlib_module_names:
        return "a module of the standard library"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = (
        [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
    )
    # The current folder may be searched for modules; so is a checkout, whose other folders are nobody's modules.
    own = [path, path / "__init__.py"]
    if name not in _PACKAGES and (_HOME / "pyproject.toml").is_file():
        own += [_HOME / name, _HOME / name / "__init__.py", _HOME / f"{name}.py"]
    if all(Path(place).resolve() in own for place in places):
        return None
    return f"an installed module ({places[0]})"


def _source_digest(source: _Source, folder: Path) -> str:
    """Return a digest of a source and all its imports, which distinguishes its module from an edited one."""
    sources: dict[Path, _Source] = {}
    waiting = [source]
    while waiting:
        each = waiting.pop()
        if each.path not in sources:
            sources[each.path] = each
            waiting.extend(each.imported.values())
    digest = hashlib.sha256()
    for path in sorted(sources):
        relative = path.relative_to(folder).as_posix()
        for name, text in sources[path].texts.items():
            digest.update(f"{relative}\0{name}\0{text}\0".encode())
    # 48 bits tell a user's files apart and keep names short in tracebacks.
    return digest.hexdigest()[:12]


def code_of_module(name: str, module: str) -> Code | None:
    """Return the code of an object in a user's module, with all imports; None for other modules."""
    if module not in _IMPORTER.files:
        return None
    roots: list[str] = []
    waiting = [_root_package(module)]
    # Imports may be circular, so each module is visited once.
    while waiting:
        root = waiting.pop()
        if root not in roots:
            roots.append(root)
            waiting.extend(_IMPORTER.imports.get(root, {}).values())
    sources = {}
    for each, text in _IMPORTER.sources.items():
        if _root_package(each) in roots:
            sources[each] = text
    files = {each: _IMPORTER.files[each] for each in sources}
    imports = {
        root: _IMPORTER.imports[root] for root in roots if root in _IMPORTER.imports
    }
    return Code(name=name, module=module, sources=sources, files=files, imports=imports)


def code_of_package(name: str, module: str, key: Key) -> Code:
    """Return the code of an object in an installed package, with the text of the whole package.

    Raises `InputError` for a package without source text or above the size limit.
    """
    # All modules: which of them the object needs shows only while it runs.
    modules = _package_modules(_root_package(module))
    sources = {each: _installed_text(each, key) for each in modules}
    if sum(map(len, sources.values())) > MAX_CHARACTERS:
        text = f"the package of '{name}' has more than {MAX_CHARACTERS:,} characters: move '{name}' to a smaller one"
        raise InputError(text, key)
    return Code(name=name, module=module, sources=sources)


def _package_modules(package: str) -> list[str]:
    imported = importlib.import_module(package)
    paths = getattr(imported, "__path__", None)
    inner = pkgutil.walk_packages(paths, f"{package}.") if paths is not None else ()
    return [package, *(each.name for each in inner)]


def _installed_text(module: str, key: Key) -> str:
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    text = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    if text is None:
        raise InputError(
            f"{module} has no source text to send to the devices: install the package from source",
            key,
        )
    return text


def clear_cache() -> None:
    """Forget all files read so far, so that edits are noticed."""
    _gather_code.cache_clear()


def load(code: Code, key: Key) -> ModuleType:
    """Import the defining module of a code object. Raises `InputError` naming the key and the line."""
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.append(_IMPORTER)
    _IMPORTER.add(code)
    try:
        return importlib.import_module(code.module)
    # Before the others, since a syntax error has no frame in the traceback.
    except SyntaxError as error:
        raise InputError(
            f"{error.filename}:{error.lineno}: is not Python: {error.msg}", key
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{line_of(error, code)}: {type(error).__name__}: {error}", key
        ) from error


def call(code: Code, key: Key, **arguments: Any) -> Any:
    """Call a function of a code object. Raises `InputError` naming the key and the failing line."""
    called = function(code, key)
    try:
        return called(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{line_of(error, code)}: {type(error).__name__}: {error}", key
        ) from error


def function(code: Code, key: Key) -> Callable[..., Any]:
    """Return the named function or class. Raises `InputError` listing the available names."""
    module = load(code, key)
    value: Any = vars(module).get(code.name)
    if not callable(value):
        own = []
        for name, each in vars(module).items():
            if getattr(each, "__module__", None) == code.module:
                own.append(name)
        available = ", ".join(own) or "none"
        wrong = f"defines no function '{code.name}'" if code.name else "is a file"
        text = f"{file_of(code.module)} {wrong}: name a function of it (there: {available})"
        raise InputError(text, (key[0], "name"))
    checked: Callable[..., Any] = value
    return checked


def line_of(error: BaseException, code: Code) -> str:
    """Return the innermost line of the code in an exception's traceback; the file alone if there is no such line."""
    frames = _user_frames(error, {file_of(name) for name in code.sources})
    if not frames:
        return file_of(code.module)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def describe_error(error: BaseException) -> str | None:
    """Format an error with the lines of user files in its traceback; None without such lines.

    The first line has the last of those lines and the error, as ``ring.py:42: KeyError: 'round'``.
    """
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            text = describe_error(inner)
            if text is not None:
                return text
        return None
    frames = _user_frames(error, _IMPORTER.files.values())
    if not frames:
        return None if error.__cause__ is None else describe_error(error.__cause__)
    last = frames[-1]
    lines = [f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"]
    if len(frames) > 1:
        lines += [
            f"  {each.filename}:{each.lineno}, in {each.name}: {each.line}"
            for each in frames
        ]
    text = "\n".join(lines)
    # Names of modules end in a digest, which tells a user nothing.
    for module in _IMPORTER.files:
        if "." not in module:
            text = text.replace(module, module.rpartition("_")[0])
    return text


def texts_of(code: Code) -> dict[str, str]:
    """Return the texts of a code by their files, relative to the folder of the named file, which is the first."""
    folder = Path(code.files[code.module]).parent
    texts = {}
    for module in dict.fromkeys([code.module, *code.sources]):
        file = Path(code.files[module]).relative_to(folder)
        texts[file.as_posix()] = code.sources[module]
    return texts


def _user_frames(
    error: BaseException, files: Iterable[str]
) -> list[traceback.FrameSummary]:
    known = set(files)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename in known]


def file_of(module: str) -> str:
    """Return the original file name of a module."""
    return _IMPORTER.files.get(module, f"<{module}>")
