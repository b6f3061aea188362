"""Examples in the docstrings of all packages."""

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
"""A module whose examples run in tests/controller/api/test_public.py, each in a folder of its own."""


def module_names() -> list[str]:
    names = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            # A module `__main__` runs its command when it is imported.
            if module.name != INTERFACE and not module.name.endswith(".__main__"):
                names.append(module.name)
    return names


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples_of_module_pass(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module)
    # The output of doctest shows the failed examples.
    assert results.failed == 0
    # An example that doctest does not collect would never fail.
    assert results.attempted > 0 or ">>> " not in inspect.getsource(module)
