"""The registry of link backends and the properties that built-in backends reject."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.network.link import Link
from testbed_controller.shaping.backend import (
    LINK_BACKENDS,
    check_name,
    environment_for,
)


def test_registered_names_and_auto_are_accepted() -> None:
    accepted = [check_name(name) for name in ("auto", *LINK_BACKENDS)]
    assert accepted == ["auto", "netem", "userspace"]
    with pytest.raises(
        InputError,
        match="unknown link backend 'net'; available: auto, netem, userspace",
    ):
        check_name("net")


def test_built_in_backends_need_no_environment_variables() -> None:
    # Only plug-ins have to be named to the shaper; its image contains these backends.
    assert environment_for(["auto", "netem", "userspace"]) == {}


def test_only_userspace_correlates_delays() -> None:
    correlated = Link(delay=0.02, jitter=0.004, jitter_correlation=0.5)
    netem, userspace = LINK_BACKENDS.find("netem"), LINK_BACKENDS.find("userspace")
    netem_problem = netem.link_problem(correlated, None)
    assert userspace.link_problem(correlated, None) is None
    assert "netem cannot correlate successive delays" in str(netem_problem)
