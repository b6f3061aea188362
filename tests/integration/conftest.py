"""Hooks for tests of links."""

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
    """Skip tests with the parameter "netem" on a kernel without netem.

    The skip precedes all fixtures, some of which would create network namespaces.
    """
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    needs_netem = "netem" in parameters.values()
    if needs_netem and os.geteuid() == 0 and _lacks_netem():
        pytest.skip("this kernel has no netem; tests/netem boots one that has")
