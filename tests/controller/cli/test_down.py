"""Whose runs `testbed down` ends."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from testbed_controller.cli.lab import down
from testbed_controller.hosts import removal as everywhere
from testbed_controller.lab import engine, runstate
from testbed_controller.lab.engineaddress import EngineAddress
from testbed_controller.lab.removal import RUN, abandoned_runs


def container(run: str, state: str, age: float = 3600.0) -> dict[str, Any]:
    return {"Labels": {RUN: run}, "State": state, "Created": time.time() - age}


def client(
    *containers: dict[str, Any], networks: tuple[dict[str, Any], ...] = ()
) -> Any:
    api = SimpleNamespace(
        containers=lambda **_: list(containers),
        networks=lambda **_: list(networks),
        volumes=lambda **_: {"Volumes": None},
    )
    return SimpleNamespace(api=api)


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the runs that are removed from an engine with a run of ours, one of another user and an abandoned one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runstate.write(runstate.RunState("lab-mine", "secret"))
    there = client(
        container("lab-mine", "running"),
        container("lab-other", "running"),
        container("lab-other", "exited"),
        container("lab-abandoned", "exited"),
        container("lab-new", "created", age=1.0),
    )
    monkeypatch.setattr(engine, "connect_to_all", lambda: {EngineAddress(): there})
    found: list[str] = []
    monkeypatch.setattr(
        everywhere, "remove", lambda run, _client: found.append(run) or 1
    )
    return found


def command(*arguments: str) -> Result:
    return CliRunner().invoke(down, arguments)


def test_all_are_our_own_runs_and_abandoned_ones_and_the_others_are_named(
    removed: list[str],
) -> None:
    done = command("--all")
    assert removed == ["lab-abandoned", "lab-mine"]
    assert "lab-new, lab-other" in done.output
    assert "--everyone" in done.output


def test_everyone_ends_the_runs_of_others_after_naming_them(removed: list[str]) -> None:
    done = command("--all", "--everyone")
    assert removed == ["lab-abandoned", "lab-mine", "lab-new", "lab-other"]
    assert done.output.startswith(
        "removing the runs of other users: lab-new, lab-other\n"
    )


def test_a_pattern_ends_no_run_of_another_user_and_its_whole_name_does(
    removed: list[str],
) -> None:
    assert "--everyone" in str(command("lab-o*").exception)
    assert removed == []
    command("lab-other")
    assert removed == ["lab-other"]


def test_a_network_without_containers_is_abandoned_once_it_is_old() -> None:
    networks = (
        {"Labels": {RUN: "old"}, "Created": "2020-01-01T00:00:00.123456789Z"},
        {"Labels": {RUN: "new"}, "Created": "2999-01-01T00:00:00Z"},
    )
    assert abandoned_runs(client(networks=networks)) == {"old"}
