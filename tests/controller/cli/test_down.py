"""The runs that `testbed down` removes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from testbed_controller.cli.lab import down
from testbed_controller.hosts import removal
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
    """Collect removed runs of an engine with runs of this user, of other users, and an abandoned run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runstate.write(runstate.RunState("lab-mine", "secret"))
    engine_client = client(
        container("lab-mine", "running"),
        container("lab-other", "running"),
        container("lab-other", "exited"),
        # All containers have ended.
        container("lab-abandoned", "exited"),
        # A run that is being created has no running containers yet.
        container("lab-new", "created", age=1.0),
    )
    clients = {EngineAddress(): engine_client}
    monkeypatch.setattr(engine, "connect_to_all", lambda: clients)
    runs: list[str] = []

    def remove(run: str, _client: object) -> int:
        runs.append(run)
        return 1

    monkeypatch.setattr(removal, "remove", remove)
    return runs


def run_down(*arguments: str) -> Result:
    return CliRunner().invoke(down, arguments)


def test_all_removes_own_and_abandoned_runs_and_lists_others(
    removed: list[str],
) -> None:
    result = run_down("--all")
    assert removed == ["lab-abandoned", "lab-mine"]
    assert "lab-new, lab-other" in result.output
    assert "--everyone" in result.output


def test_everyone_names_and_removes_runs_of_others(removed: list[str]) -> None:
    result = run_down("--all", "--everyone")
    assert removed == ["lab-abandoned", "lab-mine", "lab-new", "lab-other"]
    assert result.output.startswith(
        "removing the runs of other users: lab-new, lab-other\n"
    )


def test_pattern_does_not_remove_run_of_another_user_but_full_name_does(
    removed: list[str],
) -> None:
    # A pattern may match more runs than its user expects.
    assert "--everyone" in str(run_down("lab-o*").exception)
    assert removed == []
    run_down("lab-other")
    assert removed == ["lab-other"]


def test_old_network_without_containers_is_abandoned() -> None:
    # A run creates its networks before its containers.
    networks = (
        {"Labels": {RUN: "old"}, "Created": "2020-01-01T00:00:00.123456789Z"},
        {"Labels": {RUN: "new"}, "Created": "2999-01-01T00:00:00Z"},
    )
    assert abandoned_runs(client(networks=networks)) == {"old"}
