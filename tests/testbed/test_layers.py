"""The house has floors: imports of every kind, type-only and inside functions too, lead down and never in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAPERS = {
    folder.name: folder for folder in sorted((ROOT / "papers").glob("*/testbed_*"))
}
FLOORS = {
    "testbed": (
        ("testbed.ml.learning",),
        ("testbed.ml.preparation",),
        ("testbed.ml.methods",),
        ("testbed.ml.rounds", "testbed.ml.slots"),
        ("testbed.ml.pipeline",),
        ("testbed.ml.layers",),
        ("testbed.ml.transfer",),
        ("testbed.ml.method",),
        ("testbed.ml.partition",),
        ("testbed.ml.schedule",),
        ("testbed.ml.models", "testbed.ml.data"),
        ("testbed.ml.workload",),
        ("testbed.ml.training",),
        ("testbed.ml.fields", "testbed.ml.kernels"),
        ("testbed.ml.arrays",),
        ("testbed.ml.lazy",),
        ("testbed.simulation",),
        ("testbed.prepare",),
        ("testbed.validation",),
        ("testbed.deployment",),
        ("testbed.methods",),
        ("testbed.workload",),
        ("testbed.messaging",),
        ("testbed.method",),
        ("testbed.scenario",),
        ("testbed.trace",),
        ("testbed.experiment", "testbed.plan"),
        ("testbed.faults",),
        ("testbed.network",),
        ("testbed.hardware",),
        ("testbed.work",),
        ("testbed.device",),
        ("testbed.wire",),
        ("testbed.common",),
    ),
    "testbed_controller": (
        ("testbed_controller.cli",),
        ("testbed_controller.api",),
        ("testbed_controller.profiling", "testbed_controller.watch"),
        ("testbed_controller.report", "testbed_controller.running"),
        ("testbed_controller.results",),
        ("testbed_controller.hosts",),
        ("testbed_controller.lab",),
        ("testbed_controller.shaping",),
    ),
    "testbed_agent": (("testbed_agent",),),
    **{package: ((package,),) for package in PAPERS},
    "tools": (("tools",),),
}
"""From the top down: a room imports only from rooms below its own floor. Rooms of one floor do not know each other.
What is in `tools` may import everything; nothing imports it."""

FOLDERS = {
    "testbed": ROOT / "testbed",
    "testbed_agent": ROOT / "agent" / "testbed_agent",
    "testbed_controller": ROOT / "controller" / "testbed_controller",
    **PAPERS,
    "tools": ROOT / "tools",
}
MODULES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for folder in FOLDERS.values()
    for path in sorted(folder.rglob("*.py"))
    if path != ROOT / "testbed" / "__init__.py"
}
"""All but the public Python interface: it imports `testbed_controller.api` with the first use of a name."""


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the modules of this project that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return frozenset(found & MODULES.keys())


def floor(module: str) -> tuple[int, str]:
    """Return how deep the room of a module lies, and the room."""
    for depth, rooms in enumerate(FLOORS[module.partition(".")[0]]):
        for room in rooms:
            if module == room or module.startswith(f"{room}."):
                return depth, room
    return -1, module  # the package itself, which imports nothing


def test_imports_lead_down() -> None:
    wrong = []
    for module, path in MODULES.items():
        depth, room = floor(module)
        for other in imported(path):
            if other.partition(".")[0] != module.partition(".")[0]:
                if not other.startswith("testbed.") and not module.startswith("tools"):
                    wrong.append(f"{module} -> {other}")
            elif floor(other)[1] != room and floor(other)[0] <= depth:
                wrong.append(f"{module} -> {other}")
    assert wrong == []


def public_modules() -> set[str]:
    """Return the modules that docs/extending.md lists as public."""
    section = (
        (ROOT / "docs" / "extending.md")
        .read_text()
        .partition("## Public modules")[2]
        .partition("\n## ")[0]
    )
    return set(re.findall(r"`(testbed[\w.]+)`", section.partition("|---|")[2]))


def imported_names(path: Path) -> set[tuple[str, str]]:
    """Return the modules of the testbed that a file imports, with the names taken from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(
                    (inner, "") if inner in MODULES else (node.module, alias.name)
                )
    return {
        (module, name)
        for module, name in found
        if module.partition(".")[0].startswith("testbed")
    }


SYSTEMS = sorted(
    scenarios.parent for scenarios in (ROOT / "papers").glob("*/scenarios")
)


@pytest.mark.parametrize(
    "folder", [*SYSTEMS, ROOT / "scenarios"], ids=lambda folder: folder.name
)
def test_published_systems_and_examples_import_public_modules_only(
    folder: Path,
) -> None:
    public = {"testbed", *public_modules()}
    wrong = []
    for path in [
        *folder.glob("testbed_*/*.py"),
        *folder.glob("examples/*.py"),
        *folder.glob("study/*.py"),
    ]:
        for module, name in imported_names(path):
            own = module.partition(".")[0] == path.parent.name
            if not own and (module not in public or name.startswith("_")):
                wrong.append(f"{path.name}: {module} {name}")
    assert wrong == []


def test_public_modules_exist() -> None:
    assert public_modules() - MODULES.keys() == set()


def test_no_file_imports_itself_by_way_of_others() -> None:
    try:
        TopologicalSorter(
            {module: imported(path) - {module} for module, path in MODULES.items()}
        ).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


CORE = {
    name: path
    for name, path in MODULES.items()
    if name.startswith("testbed.") and "ml" not in name.split(".")
}


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_neither_torch_nor_machine_learning(module: str) -> None:
    """Local and type-only imports count, too."""
    modules = set()
    for node in ast.walk(ast.parse(CORE[module].read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names),
            }
    assert [
        each for each in sorted(modules) if each.startswith(("torch", "testbed.ml"))
    ] == []


def test_the_core_works_where_torch_and_machine_learning_are_missing() -> None:
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['testbed.ml'] = None\n"
        "for module in sys.argv[1:]: importlib.import_module(module)\n"
        "from testbed.scenario.loading import load\n"
        "from testbed.scenario.expand import trials\n"
        "from testbed.prepare import prepare\n"
        "print(prepare(trials(load('examples/programs'))[0]).plan.method)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *CORE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("program\n", "")
