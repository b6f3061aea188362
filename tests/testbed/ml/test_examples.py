"""The examples in docstrings of `testbed.ml` are reproduced."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.helpers import ROOT


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = [
    module_name(path)
    for path in sorted((ROOT / "testbed" / "ml").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_work(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0
