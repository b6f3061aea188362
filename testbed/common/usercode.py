"""User code outside the testbed's packages: loaded from a file named by a scenario, or from text on a device.

Devices have no copy of the user's file, so its source text is sent to them together with the neighbouring files that it
imports. Only text is sent and nothing is unpickled; the code belongs to the user who runs the experiment on their own
machines.

Modules of user files have unique names such as ``ring_0a1b2c3d4e5f``, derived from the content of the file and its
imports: two files of one name are two modules, an edited file is a new module, and no user file hides an installed
module. Import statements inside these modules still use the original names, such as ``import ring``.

`read` collects the source text of an object and of its imports as a `Code`; on any host, `load`, `function` and `call`
import and use it. The argument ``key`` is the scenario key that names the object, for error messages.
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
"""Maximum number of source characters of a method or model, imports included, since every device receives them."""


_HOME = Path(__file__).resolve().parents[2]
"""Folder that contains the package `testbed`: a checkout, or the site-packages of an installation."""
_PACKAGES = ("testbed", "testbed_agent", "testbed_controller")
"""The testbed's own packages, which may be imported from a checkout."""


class Code(BaseModel):
    """Source text of an object, for example a method or a model, with all imports from the same folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    name: str
    """Name of the class or function in its module."""
    module: str
    """Unique name of the defining module."""
    sources: dict[str, str]
    """Source text by module name: the module itself and all its imports from the same folder or package."""
    files: dict[str, str] = {}
    """File by module name, as the user would write it; empty for an installed package."""
    imports: dict[str, dict[str, str]] = {}
    """For each module, the names in its import statements -> unique names of the imported modules."""


class _TextImporter(MetaPathFinder, InspectLoader):
    """Import hook loading modules from source text."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        """See `Code.sources`."""
        self.files: dict[str, str] = {}
        """See `Code.files`; used for tracebacks and ``__file__``."""
        self.imports: dict[str, dict[str, str]] = {}
        """See `Code.imports`."""

    def add(self, code: Code) -> None:
        """Register the modules of a code object."""
        for module, file in code.files.items():
            if self.files.get(module, file) != file:
                # The loaded module was compiled for a copy with another name, to which its errors would point.
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
        # With a location, a module has `__file__`, by which a user's code may find data files.
        if spec is not None:
            spec.has_location = file is not None
        return spec

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self.sources)

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname]

    def get_code(self, fullname: str) -> CodeType:
        # Without dont_inherit, the `from __future__ import annotations` of this file would apply to the user's code.
        return compile(
            self.sources[fullname], file_of(fullname), "exec", dont_inherit=True
        )

    def exec_module(self, module: ModuleType) -> None:
        unique_names = self.imports.get(_root_package(module.__name__))
        if unique_names:
            # An import statement, also within a function, calls `__import__` of its module's builtins.
            import_function = partial(_import_module, unique_names)
            module.__dict__["__builtins__"] = {
                **vars(builtins),
                "__import__": import_function,
            }
        super().exec_module(module)


_IMPORTER = _TextImporter()


def _root_package(module: str) -> str:
    return module.partition(".")[0]


def _import_module(
    unique_names: Mapping[str, str], name: str, *arguments: Any, **keywords: Any
) -> ModuleType:
    """Replace ``__import__``; ``unique_names`` maps the names of user modules in import statements to unique names."""
    # The signature is __import__(name, globals, locals, fromlist, level); level 0 is an absolute import.
    level = arguments[3] if len(arguments) > 3 else keywords.get("level", 0)
    first, dot, rest = name.partition(".")
    if not level and first in unique_names:
        name = unique_names[first] + dot + rest
    return builtins.__import__(name, *arguments, **keywords)


def read(file: Path, name: str, key: Key) -> Code:
    """Read a file, and all imports from the same folder, as the code of the object ``name``.

    A process reads a file only once, so the planner, the devices and the results have the same text. Raises
    `InputError` naming the key, also if an imported file has the name of another module that can be imported.
    """
    code = _gather_code(file.resolve(), str(file), key)
    return code.model_copy(update={"name": name})


@dataclass
class _Source:
    """A Python file, or a folder of Python files (a package), importable by a user's file."""

    path: Path
    """The file or folder."""
    files: dict[str, Path]
    """Files by the dotted name of the module within the package; "" is the file, or the package itself."""
    texts: dict[str, str]
    """Texts of `files`; empty for a missing ``__init__.py``."""
    imported: dict[str, _Source]
    """Imported sources of the same folder, by the name in import statements."""
    module: str = ""
    """Unique name of the module, set after all imports are known."""

    @property
    def characters(self) -> int:
        """Length of all texts."""
        return sum(map(len, self.texts.values()))


@cache
def _gather_code(file: Path, shown_path: str, key: Key) -> Code:
    """Collect a file and all imports from the same folder.

    ``shown_path`` is the path of the file as written by the user, for error messages and tracebacks.
    """
    main = _Source(file, {"": file}, {"": _read_text(file, shown_path, key)}, {})
    folder, shown_folder = file.parent, Path(shown_path).parent
    sources = _with_imports(main, shown_folder, key)
    if sum(source.characters for source in sources) > MAX_CHARACTERS:
        text = f"{shown_path} and the files that it imports have more than {MAX_CHARACTERS:,} characters: import less"
        raise InputError(text, key)
    # Imports may be circular, so all modules get their names before any import is resolved.
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
            shown_file = shown_folder / source.files[name].relative_to(folder)
            code.sources[module] = text
            code.files[module] = str(shown_file)
    # Registered before the import, so that a syntax error is located in the user's file.
    _IMPORTER.add(code)
    return code


def _with_imports(main: _Source, shown_folder: Path, key: Key) -> list[_Source]:
    """Return a source and all transitive imports from the same folder, and set `_Source.imported` of each source.

    Raises `InputError` for a file with the name of another module.
    """
    folder = main.path.parent
    sources = {main.path: main}
    remaining = [main]
    while remaining:
        source = remaining.pop()
        for name, file, line in _absolute_imports(source):
            path = _find_beside(folder, name)
            if path is None:
                continue
            other_module = _describe_other_module(name, path)
            # Devices could import the other module instead, depending on the order of their search path.
            if other_module is not None:
                where = f"{shown_folder / file.relative_to(folder)}:{line}"
                text = f"{where}: imports '{name}', which is {path.name} beside it and {other_module}: "
                raise InputError(f"{text}rename {path.name}", key)
            if path not in sources:
                sources[path] = _open_source(path, key)
                remaining.append(sources[path])
            source.imported[name] = sources[path]
    return list(sources.values())


def _read_text(file: Path, shown_path: str, key: Key) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{shown_path} is not text: name a Python file", key) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{shown_path} cannot be read ({reason}): name a Python file, relative to the scenario",
            key,
        ) from None


def _find_beside(folder: Path, name: str) -> Path | None:
    """Return the file or the package of a folder for a name in an import statement; None if both are missing."""
    file, package = folder / f"{name}.py", folder / name
    # The testbed's own packages are on every device and need not be sent.
    if package == _HOME / name:
        return None
    # The order of Python's search: a package, a module, then a folder without `__init__.py`.
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
            # A folder without `__init__.py` is a package, too, whose own text is empty.
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
            # Loading the module reports this error with its line.
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield _root_package(alias.name), source.files[name], node.lineno
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield _root_package(node.module), source.files[name], node.lineno


def _describe_other_module(name: str, path: Path) -> str | None:
    """Describe an importable module with the same name as the user's file or package; None if none exists."""
    if name in sys.stdlib_module_names:
        return "a module of the standard library"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    origins = [*(spec.submodule_search_locations or ())]
    if spec.origin:
        origins = [spec.origin]
    # Python may search the current folder, and thus find the user's file itself.
    harmless = [path, path / "__init__.py"]
    # In a checkout, Python also searches the checkout, whose other folders, such as tests, are no installed modules.
    if name not in _PACKAGES and (_HOME / "pyproject.toml").is_file():
        harmless += [_HOME / name, _HOME / name / "__init__.py", _HOME / f"{name}.py"]
    if all(Path(origin).resolve() in harmless for origin in origins):
        return None
    return f"an installed module ({origins[0]})"


def _source_digest(source: _Source, folder: Path) -> str:
    """Return a digest of the texts of a source and of all imports, changed by every edit."""
    sources: dict[Path, _Source] = {}
    remaining = [source]
    while remaining:
        each = remaining.pop()
        if each.path not in sources:
            sources[each.path] = each
            remaining.extend(each.imported.values())
    digest = hashlib.sha256()
    for path in sorted(sources):
        relative = path.relative_to(folder).as_posix()
        for name, text in sources[path].texts.items():
            digest.update(f"{relative}\0{name}\0{text}\0".encode())
    # 48 bits suffice for the files of one user and keep names short in tracebacks.
    return digest.hexdigest()[:12]


def code_of_module(name: str, module: str) -> Code | None:
    """Return the code of an object in a user's module, with all imports; None for other modules."""
    if module not in _IMPORTER.files:
        return None
    # The unique names of the user's files and packages that the module imports, without modules inside packages.
    roots: list[str] = []
    remaining = [_root_package(module)]
    # Imports may be circular, so each module is visited once.
    while remaining:
        root = remaining.pop()
        if root not in roots:
            roots.append(root)
            remaining.extend(_IMPORTER.imports.get(root, {}).values())
    sources = {}
    for each, text in _IMPORTER.sources.items():
        if _root_package(each) in roots:
            sources[each] = text
    files = {each: _IMPORTER.files[each] for each in sources}
    imports = {}
    for root in roots:
        if root in _IMPORTER.imports:
            imports[root] = _IMPORTER.imports[root]
    return Code(name=name, module=module, sources=sources, files=files, imports=imports)


def code_of_package(name: str, module: str, key: Key) -> Code:
    """Return the code of an object in an installed package, with the text of the whole package.

    Raises `InputError` for a package without source text or above the size limit.
    """
    # All modules are sent, since only a run shows which of them the object needs.
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
    """Forget all files read by `read`, so that the next call reads edited files again."""
    _gather_code.cache_clear()


def load(code: Code, key: Key) -> ModuleType:
    """Import the defining module of a code object. Raises `InputError` naming the key and the line."""
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.append(_IMPORTER)
    _IMPORTER.add(code)
    try:
        return importlib.import_module(code.module)
    # A syntax error has no frame of the user's file in its traceback, so its line comes from the error itself.
    except SyntaxError as error:
        raise InputError(
            f"{error.filename}:{error.lineno}: is not Python: {error.msg}", key
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{line_of(error, code)}: {type(error).__name__}: {error}", key
        ) from error


def call(code: Code, key: Key, **arguments: Any) -> Any:
    """Call the object of a code with keyword arguments. Raises `InputError` naming the key and the failing line."""
    target = function(code, key)
    try:
        return target(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{line_of(error, code)}: {type(error).__name__}: {error}", key
        ) from error


def function(code: Code, key: Key) -> Callable[..., Any]:
    """Return the object of a code, a function or class. Raises `InputError` listing the available names."""
    module = load(code, key)
    value: Any = vars(module).get(code.name)
    if not callable(value):
        defined_names = []
        for name, each in vars(module).items():
            # Imported objects belong to another module.
            if getattr(each, "__module__", None) == code.module:
                defined_names.append(name)
        available = ", ".join(defined_names) or "none"
        problem = f"defines no function '{code.name}'" if code.name else "is a file"
        text = f"{file_of(code.module)} {problem}: name a function of it (available: {available})"
        raise InputError(text, (key[0], "name"))
    checked: Callable[..., Any] = value
    return checked


def line_of(error: BaseException, code: Code) -> str:
    """Return ``file:line`` of the innermost frame of the code in an exception's traceback; the file without a frame."""
    frames = _user_frames(error, {file_of(name) for name in code.sources})
    if not frames:
        return file_of(code.module)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def describe_error(error: BaseException) -> str | None:
    """Format an error with the lines of user files in the traceback; None without lines of user files.

    The first line has the innermost line of a user file and the error, as ``ring.py:42: KeyError: 'round'``.
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
    # Unique module names end in a digest, which means nothing to a user.
    for module in _IMPORTER.files:
        if "." not in module:
            text = text.replace(module, module.rpartition("_")[0])
    return text


def texts_of(code: Code) -> dict[str, str]:
    """Return the texts of a code by file, relative to the folder of the code's own file, which comes first."""
    folder = Path(code.files[code.module]).parent
    texts = {}
    for module in dict.fromkeys([code.module, *code.sources]):
        file = Path(code.files[module]).relative_to(folder)
        texts[file.as_posix()] = code.sources[module]
    return texts


def _user_frames(
    error: BaseException, files: Iterable[str]
) -> list[traceback.FrameSummary]:
    file_names = set(files)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename in file_names]


def file_of(module: str) -> str:
    """Return the file of a user's module as written by the user; ``<module>`` for other modules."""
    return _IMPORTER.files.get(module, f"<{module}>")
