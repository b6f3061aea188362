"""The packages of an installation."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_an_installation_without_extras_is_small() -> None:
    assert len(PROJECT["dependencies"]) <= 14


def packages(lines: list[str]) -> set[str]:
    """Return the packages of requirements and of their own requirements, without extras."""
    found = set()
    for line in lines:
        name = Requirement(line).name
        found.add(canonicalize_name(name))
        for text in metadata.requires(name) or []:
            if "extra ==" not in text:
                found.add(canonicalize_name(Requirement(text).name))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of the modules that a module imports as it is loaded itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_modules_load_without_extras_but_those_that_draw() -> None:
    own = {"testbed", "testbed_agent", "testbed_controller", *sys.stdlib_module_names}
    required = packages(PROJECT["dependencies"])
    distributions = metadata.packages_distributions()
    others: dict[str, set[str]] = {}
    for top in ("testbed", "agent", "controller"):
        for path in (ROOT / top).rglob("*.py"):
            for name in set(imported(ast.parse(path.read_text()))) - own:
                if required.isdisjoint(
                    map(canonicalize_name, distributions.get(name, [name]))
                ):
                    others.setdefault(name, set()).add(
                        path.relative_to(ROOT).as_posix()
                    )
    drawing = {
        f"controller/testbed_controller/report/{name}.py"
        for name in ("devices", "drawing", "plots")
    }
    assert others == {"matplotlib": drawing}


def test_every_extra_is_documented() -> None:
    section = (ROOT / "docs" / "README.md").read_text().partition("## Extras")[2]
    names = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert names == set(PROJECT["optional-dependencies"])
