"""Examples in the docstrings of the core: each is true when a reader pastes it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import testbed

ML = "testbed.ml"


def core_modules() -> list[str]:
    found = pkgutil.walk_packages(testbed.__path__, "testbed.")
    return [each.name for each in found if not each.name.startswith(ML)]


@pytest.mark.parametrize("name", core_modules())
def test_examples_of_a_module_are_true(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
