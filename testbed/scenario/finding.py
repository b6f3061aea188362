"""Lookup of scenarios by name in the current folder, in the testbed, and in installed packages."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from testbed.common import plugins
from testbed.common.errors import InputError

GROUP = "testbed.scenarios"
"""Entry point group of scenarios: ``FOLDER = "package"`` or ``FOLDER.KEY = "package"``."""
SCENARIOS = Path("scenarios")
"""Folder of scenarios in the current folder, in a checkout and beside a package."""
_INSTALLED = Path(__file__).parent / "shipped"
SHIPPED = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / SCENARIOS
"""Folder of the testbed's own scenarios, included in the wheel by setup.py."""


def find(path: str | Path) -> Path:
    """Return the scenario file of a path or of a name such as ``quickstart``.

    Raises `InputError` with a suggestion for a missing file.
    """
    path = Path(path)
    if path.exists():
        return path
    file = path if path.suffix in (".yaml", ".yml") else Path(f"{path}.yaml")
    # Packages come last and are searched only if they are reached: the scan takes about 20 ms.
    for candidate in chain(
        (SCENARIOS / file, file, SHIPPED / file), _in_packages(file)
    ):
        if candidate.exists():
            return candidate
    raise InputError(f"{path}: no such scenario: {_suggest_file(file)}")


def scenarios_in(folder: Path = SHIPPED) -> dict[str, Path]:
    """Return the scenarios of a folder and of all packages by the names accepted by `load`."""
    names = {}
    for file in sorted(folder.rglob("*.yaml")):
        names[file.relative_to(folder).with_suffix("").as_posix()] = file
    for prefix, package_folder in _packaged_folders():
        for file in sorted(package_folder.glob("*.yaml")):
            names[f"{prefix}/{file.stem}"] = file
    return names


def _packaged_folders() -> Iterator[tuple[str, Path]]:
    """Yield the name prefix and the folder of the scenarios of each package."""
    for point in plugins.installed(GROUP).values():
        spec = importlib.util.find_spec(point.module.partition(".")[0])
        if spec is None or spec.origin is None:
            continue
        package = Path(spec.origin).parent
        # In a checkout the folder is beside the package; an installed package contains it.
        for folder in (package / SCENARIOS, package.parent / SCENARIOS):
            if folder.is_dir():
                yield point.name.partition(".")[0], folder
                break


def _in_packages(file: Path) -> Iterator[Path]:
    for prefix, folder in _packaged_folders():
        if str(file.parent) == prefix:
            yield folder / file.name


def _suggest_file(file: Path) -> str:
    """Suggest a similar file in the same folder, or a scenario of a similar name."""
    neighbours = [str(each) for each in file.parent.glob("*.yaml")]
    names = [*scenarios_in(SCENARIOS), *scenarios_in()]
    name = file.with_suffix("").as_posix().removeprefix(f"{SCENARIOS}/")
    similar = [
        *difflib.get_close_matches(str(file), neighbours, n=1),
        *difflib.get_close_matches(name, names, n=1),
    ]
    # A name that merely lacks its folder has too few letters in common to be a close match.
    for candidate in names:
        if Path(candidate).name == file.stem:
            similar.append(candidate)
    if similar:
        return f"did you mean '{similar[0]}'?"
    return f"name a file, or a shipped scenario such as 'quickstart'; all of them are in {SHIPPED}"
