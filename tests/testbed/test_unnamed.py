"""Modules that no test imports, and that have no file of tests in their place: there may be fewer, and no more."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import ROOT
from tests.testbed.test_layers import MODULES, imported

MOST = 50


def test_no_more_modules_are_without_tests_of_their_own() -> None:
    named = set().union(*map(imported, (ROOT / "tests").rglob("*.py")))
    unnamed = []
    for module, path in MODULES.items():
        place = Path("tests", *module.split(".")[:-1], f"test_{path.stem}.py")
        if not (module.startswith("tools") or path.stem.startswith("__") or module in named or (ROOT / place).exists()):
            unnamed.append(f"{module}: write {place}")
    assert len(unnamed) <= MOST, "\n".join(unnamed)
