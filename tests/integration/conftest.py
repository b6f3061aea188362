"""Shared by the tests of links."""

from __future__ import annotations

import os
from functools import cache

import pytest

from testbed_controller.shaping.backends import missing_modules


@cache
def _lacks_netem() -> bool:
    return bool(missing_modules()["netem"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is of netem on a kernel without it, before any namespace is made for it."""
    of_netem = (
        "netem" in getattr(getattr(item, "callspec", None), "params", {}).values()
    )
    if of_netem and os.geteuid() == 0 and _lacks_netem():
        pytest.skip("this kernel has no netem; tests/netem boots one that has")
