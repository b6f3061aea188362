"""Examples in docstrings of generation: each is true when a reader pastes it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import testbed_generation

MODULES = [
    module.name
    for module in pkgutil.iter_modules(
        testbed_generation.__path__, "testbed_generation."
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
