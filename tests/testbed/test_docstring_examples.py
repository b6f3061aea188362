"""Examples in the docstrings of all packages: each is true when a reader pastes it."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

PACKAGES = (
    "testbed",
    "testbed_agent",
    "testbed_controller",
    "testbed_comparison",
    "testbed_generation",
    "testbed_edgepipe",
    "testbed_ftpipehd",
    "testbed_pipelearn",
    "testbed_stahl",
    "testbed_versatilefl",
    "tools",
)

INTERFACE = "testbed_controller.api"
"""Its examples run in tests/controller/api/test_public.py, each in a folder of its own."""


def module_names() -> list[str]:
    names = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        names += [each.name for each in pkgutil.walk_packages(path, f"{package}.")]
    # A module `__main__` runs its command when it is imported.
    own = [name for name in names if not name.endswith(".__main__")]
    return [name for name in own if name != INTERFACE]


@pytest.mark.parametrize("name", module_names())
def test_examples_of_a_module_are_true(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module)
    assert results.failed == 0
    # An example that doctest does not collect would be true for ever.
    assert results.attempted > 0 or ">>> " not in inspect.getsource(module)
