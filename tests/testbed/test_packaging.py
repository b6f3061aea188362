"""Dependencies of an installation, and its extras."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Other modules import these within functions, when a chart is drawn.
DRAWING_MODULES = {
    "controller/testbed_controller/report/devices.py",
    "controller/testbed_controller/report/drawing.py",
    "controller/testbed_controller/report/plots.py",
}


def test_installation_without_extras_has_few_dependencies() -> None:
    assert len(PROJECT["dependencies"]) <= 14


def required_packages() -> set[str]:
    """Return the dependencies without extras, and their own dependencies."""
    packages = set()
    for line in PROJECT["dependencies"]:
        name = Requirement(line).name
        packages.add(canonicalize_name(name))
        for requirement in metadata.requires(name) or []:
            if "extra ==" not in requirement:
                packages.add(canonicalize_name(Requirement(requirement).name))
    return packages


def imported_packages(path: Path) -> set[str]:
    """Return the top-level packages imported by a file at the import of the file itself."""
    names = set()
    # Imports within functions and for type checking are not in the body of the module.
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_only_drawing_modules_import_packages_of_extras() -> None:
    own = {"testbed", "testbed_agent", "testbed_controller", *sys.stdlib_module_names}
    required = required_packages()
    distributions = metadata.packages_distributions()
    importing_files: dict[str, set[str]] = {}
    for folder in ("testbed", "agent", "controller"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported_packages(path) - own:
                # The package yaml, for example, is in the distribution PyYAML.
                packages = map(canonicalize_name, distributions.get(name, [name]))
                if required.isdisjoint(packages):
                    file = path.relative_to(ROOT).as_posix()
                    importing_files.setdefault(name, set()).add(file)
    assert importing_files == {"matplotlib": DRAWING_MODULES}


def test_every_extra_is_documented() -> None:
    section = (ROOT / "docs" / "README.md").read_text().partition("## Extras")[2]
    names: set[str] = set()
    for first_cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        names.update(re.findall(r"`(\w+)`", first_cell))
    assert names == set(PROJECT["optional-dependencies"])
