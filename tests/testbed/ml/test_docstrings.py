"""The examples in the docstrings of `testbed.ml`."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.helpers import ROOT

WITH_EXAMPLES = [
    path
    for path in sorted((ROOT / "testbed" / "ml").rglob("*.py"))
    if ">>>" in path.read_text()
]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", [name_of(path) for path in WITH_EXAMPLES])
def test_examples_of_a_module_work(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
