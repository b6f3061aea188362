"""The examples in the docstrings of the agent."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import testbed_agent

MODULES = [module.name for module in pkgutil.iter_modules(testbed_agent.__path__)]


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__main__"}))
def test_examples_of_a_module_work(name: str) -> None:
    module = importlib.import_module(f"testbed_agent.{name}")
    assert doctest.testmod(module).failed == 0
