"""The registry of link backends, and what the testbed's own refuse."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.link import Link
from testbed_controller.shaping.backend import (
    LINK_BACKENDS,
    check_name,
    environment_for,
)


def test_names_are_those_of_the_registry_and_auto() -> None:
    assert [check_name(name) for name in ("auto", *LINK_BACKENDS)] == [
        "auto",
        "netem",
        "userspace",
    ]
    with pytest.raises(
        InputError,
        match="unknown link backend 'net'; available: auto, netem, userspace",
    ):
        check_name("net")


def test_own_backends_are_in_the_image_and_need_nothing_in_its_environment() -> None:
    assert environment_for(["auto", "netem", "userspace"]) == {}


def test_only_userspace_correlates_delays() -> None:
    correlated = Link(delay=0.02, jitter=0.004, jitter_correlation=0.5)
    problems = {
        name: LINK_BACKENDS.find(name).link_problem(correlated, None)
        for name in LINK_BACKENDS
    }
    assert problems["userspace"] is None
    assert "netem cannot correlate successive delays" in str(problems["netem"])
