"""Each method in containers: the tokens and messages of the virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from generation.clocks import compare_clocks, points

# A run starts and measures containers for up to a minute on a busy host.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]


@pytest.mark.parametrize("label", points())
def test_tokens_and_messages_are_those_of_the_virtual_clock(
    tmp_path: Path, label: str
) -> None:
    both = compare_clocks(label, points()[label], tmp_path)
    containers = both.containers.run
    assert containers.outcome.status == "finished", containers.outcome.error
    assert both.has_same_tokens
    if both.has_fault:
        assert containers.metrics["recoveries"] == 1
    else:
        assert list(both.different_messages()) == []
