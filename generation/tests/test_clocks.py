"""Each method generates the same tokens, and sends the same messages, in containers and on the virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import testbed
from generation.clocks import (
    SCENARIO,
    UNCOMPARED,
    Comparison,
    points,
    run_point,
)
from tests.helpers.commands import run_command
from tests.helpers.message_counts import lost_in_containers

# A run starts and measures containers for up to a minute on a busy host.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def standing_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Create the devices and links of the scenario once for all points; yield the name of the lab.

    Starting and removing containers takes longer than most of these runs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        up = run_command("up", SCENARIO, "--json", "--set", "points=[]")
        assert up.returncode == 0, up.stderr
        lab = json.loads(up.stdout)["run"]
        yield lab
        down = run_command("down", lab)
        assert down.returncode == 0, down.stderr


def run_on_lab(lab: str, changes: Mapping[str, Any], out: Path) -> testbed.Result:
    """Run one point of the scenario on a lab, and start the devices that its faults have killed."""
    sets = ["--set", "points=[]"]
    for key, value in changes.items():
        sets += ["--set", f"{key}={json.dumps(value)}"]
    try:
        finished = run_command(
            "run", SCENARIO, "--on", lab, "--accept-links", "--out", out, *sets
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
    finally:
        for fault in changes.get("faults", ()):
            restarted = run_command("fault", "restart", fault["kill"], "--run", lab)
            assert restarted.returncode == 0, restarted.stderr
    [result] = testbed.open_results(out)
    return result


@pytest.mark.parametrize("label", points())
def test_tokens_and_messages_agree_with_virtual_clock(
    tmp_path: Path, label: str, request: pytest.FixtureRequest
) -> None:
    changes = points()[label]
    # A lab has the devices with which it was created.
    if any(key.startswith("devices.") for key in changes):
        in_containers = run_point(changes, "emulate", tmp_path / "containers")
    else:
        lab = request.getfixturevalue("standing_lab")
        in_containers = run_on_lab(lab, changes, tmp_path / "containers")
    simulated = run_point(changes, "simulate", tmp_path / "simulated")
    comparison = Comparison(label, simulated, in_containers)
    run = in_containers.run
    assert run.outcome.status == "finished", run.outcome.error
    assert comparison.has_same_tokens
    if comparison.has_fault:
        assert run.metrics["recoveries"] == 1
    else:
        assert list(comparison.different_messages()) == []
        assert lost_in_containers(run.outcome, excluded=UNCOMPARED) == []
