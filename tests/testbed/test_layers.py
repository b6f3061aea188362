"""The layers of the packages: each module imports from lower layers only, without cycles.

Imports for type checking and imports within functions count, too.
"""

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
LAYERS = {
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
"""Packages and modules of each layer, from the highest to the lowest.

Members of one layer do not import each other. Modules of `tools` may import everything, and nothing imports them.
"""

FOLDERS = {
    "testbed": ROOT / "testbed",
    "testbed_agent": ROOT / "agent" / "testbed_agent",
    "testbed_controller": ROOT / "controller" / "testbed_controller",
    **PAPERS,
    "tools": ROOT / "tools",
}
# This module imports `testbed_controller.api` at the first use of a name.
PUBLIC_INTERFACE = ROOT / "testbed" / "__init__.py"


def module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def find_modules() -> dict[str, Path]:
    """Return the file of each module except the public Python interface."""
    modules = {}
    for folder in FOLDERS.values():
        for path in sorted(folder.rglob("*.py")):
            if path != PUBLIC_INTERFACE:
                modules[module_name(path, folder)] = path
    return modules


MODULES = find_modules()


def top_package(module: str) -> str:
    return module.partition(".")[0]


@cache
def imported_names(path: Path) -> frozenset[tuple[str, str]]:
    """Return (module, name) for each import in a file; the name is empty if a module itself is imported."""
    imports = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                # `from package import module` imports a module, too.
                submodule = f"{node.module}.{alias.name}"
                if submodule in MODULES:
                    imports.add((submodule, ""))
                else:
                    imports.add((node.module, alias.name))
    return frozenset(imports)


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the project imported by a file."""
    return {module for module, _ in imported_names(path)} & MODULES.keys()


def layer_of(module: str) -> tuple[int, str]:
    """Return the depth of a module's layer, and the member of the layer with the module."""
    for depth, members in enumerate(LAYERS[top_package(module)]):
        for member in members:
            if module == member or module.startswith(f"{member}."):
                return depth, member
    # The package itself, which imports nothing.
    return -1, module


# The rules of ARCHITECTURE.md.
def is_allowed_import(module: str, imported: str) -> bool:
    if top_package(imported) != top_package(module):
        # Other packages may import from the testbed, and tools from all.
        return imported.startswith("testbed.") or module.startswith("tools")
    depth, member = layer_of(module)
    imported_depth, imported_member = layer_of(imported)
    return imported_member == member or imported_depth > depth


def test_modules_import_lower_layers_only() -> None:
    violations = []
    for module, path in MODULES.items():
        for imported in imported_modules(path):
            if not is_allowed_import(module, imported):
                violations.append(f"{module} -> {imported}")
    assert violations == []


def public_modules() -> set[str]:
    """Return the public modules listed in docs/extending.md."""
    page = (ROOT / "docs" / "extending.md").read_text()
    section = page.partition("## Public modules")[2].partition("\n## ")[0]
    table = section.partition("|---|")[2]
    return set(re.findall(r"`(testbed[\w.]+)`", table))


SYSTEMS = sorted(
    scenarios.parent for scenarios in (ROOT / "papers").glob("*/scenarios")
)
"""Folders of the published systems."""


def private_imports(path: Path) -> list[str]:
    """Return the imports of a file from private modules of the testbed, and of private names."""
    public = {"testbed", *public_modules()}
    imports = []
    for module, name in imported_names(path):
        is_own = top_package(module) == path.parent.name
        if is_own or not module.startswith("testbed"):
            continue
        if module not in public or name.startswith("_"):
            imports.append(f"{path.name}: {module} {name}")
    return imports


@pytest.mark.parametrize(
    "folder", [*SYSTEMS, ROOT / "scenarios"], ids=lambda folder: folder.name
)
def test_published_systems_and_examples_import_public_modules_only(
    folder: Path,
) -> None:
    violations = []
    for pattern in ("testbed_*/*.py", "examples/*.py", "study/*.py"):
        for path in folder.glob(pattern):
            violations += private_imports(path)
    assert violations == []


def test_documented_public_modules_exist() -> None:
    assert public_modules() - MODULES.keys() == set()


def test_imports_between_modules_have_no_cycle() -> None:
    graph = {}
    for module, path in MODULES.items():
        # A package may import from itself.
        graph[module] = imported_modules(path) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


CORE = [
    name
    for name in MODULES
    if name.startswith("testbed.") and "ml" not in name.split(".")
]
"""Modules that work without machine learning."""


@pytest.mark.parametrize("module", CORE)
def test_core_module_imports_neither_torch_nor_machine_learning(module: str) -> None:
    for imported, name in imported_names(MODULES[module]):
        # With its name, so that `from testbed import ml` counts as well.
        full_name = f"{imported}.{name}"
        assert not full_name.startswith(("torch", "testbed.ml"))


def test_core_works_without_torch_and_machine_learning() -> None:
    # None in sys.modules makes an import fail.
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['testbed.ml'] = None\n"
        "for module in sys.argv[1:]: importlib.import_module(module)\n"
        "from testbed.scenario.loading import load\n"
        "from testbed.scenario.expand import trials\n"
        "from testbed.prepare import prepare\n"
        "print(prepare(trials(load('examples/programs'))[0]).plan.method)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, *CORE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.stdout, process.stderr) == ("program\n", "")
