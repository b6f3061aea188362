"""Examples in the docstrings of the controller: each is true when a reader pastes it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import testbed_controller

FOLDERS = ("api", "cli", "report", "results", "watch")


def modules() -> list[str]:
    names = []
    for folder in FOLDERS:
        package = importlib.import_module(f"{testbed_controller.__name__}.{folder}")
        prefix = f"{package.__name__}."
        names += [each.name for each in pkgutil.iter_modules(package.__path__, prefix)]
    return names


@pytest.mark.parametrize("name", modules())
def test_examples_of_a_module_are_true(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
