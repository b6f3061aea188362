"""The examples in the docstrings of the rooms that talk to kernels and engines."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

ROOMS = ("hosts", "lab", "profiling", "running", "shaping")


def modules_of(room: str) -> list[str]:
    package = importlib.import_module(f"testbed_controller.{room}")
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in modules if not module.name.endswith("__main__")]


@pytest.mark.parametrize("room", ROOMS)
def test_examples_of_a_room_work(room: str) -> None:
    for name in modules_of(room):
        result = doctest.testmod(importlib.import_module(name))
        assert result.failed == 0, name
