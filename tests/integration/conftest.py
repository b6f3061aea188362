"""Hooks for tests of links, and fixtures for tests of agents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

from testbed_controller.shaping.backends import missing_modules

if TYPE_CHECKING:
    from tests.helpers.agents import LoopbackDevice


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


@pytest.fixture(scope="module")
def booted() -> Iterator[list[LoopbackDevice]]:
    # The virtual machine of tests/netem reads this file, too, and lacks the packages of this import.
    from tests.helpers.agents import LoopbackDevice

    devices = [LoopbackDevice("a", 0), LoopbackDevice("b", 1)]
    for device in devices:
        device.boot()
    yield devices
    for device in devices:
        device.kill()


@pytest.fixture
def pair(booted: list[LoopbackDevice]) -> Iterator[list[LoopbackDevice]]:
    """Two agents without a running program, which a test may kill."""
    yield booted
    for device in booted:
        if device.process is None or device.process.poll() is not None:
            device.boot()
        elif device.agent.health()["state"] == "running":
            device.agent.stop()
