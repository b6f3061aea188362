"""The house has floors: imports of every kind, type-only and inside functions too, lead down and never in a circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAPERS = {folder.name: folder for folder in sorted((ROOT / "papers").glob("*/testbed_*"))}
FLOORS = {
    "testbed": (
        ("testbed.simulation",),
        ("testbed.prepare",),
        ("testbed.validation",),
        ("testbed.deployment",),
        ("testbed.methods",),
        ("testbed.ml.methods",),
        ("testbed.ml.rounds", "testbed.ml.slots"),
        ("testbed.ml.pipeline",),
        ("testbed.ml.layers",),
        ("testbed.ml.transfer",),
        ("testbed.messaging",),
        ("testbed.method",),
        ("testbed.scenario",),
        ("testbed.trace",),
        ("testbed.experiment", "testbed.plan"),
        ("testbed.faults",),
        ("testbed.ml.partition",),
        ("testbed.ml.schedule",),
        ("testbed.ml.models", "testbed.ml.data", "testbed.network"),
        ("testbed.workload", "testbed.hardware"),
        ("testbed.ml.training",),
        ("testbed.ml.fields", "testbed.ml.kernels"),
        ("testbed.device",),
        ("testbed.ml.arrays",),
        ("testbed.ml.lazy",),
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
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
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


def test_no_file_imports_itself_by_way_of_others() -> None:
    try:
        TopologicalSorter({module: imported(path) - {module} for module, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
