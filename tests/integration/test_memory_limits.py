"""The memory of a device's profile is a limit that its container lives under, or dies of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run_command
from tests.integration.test_whole_runs import left_of, scenario

pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]

LIMIT = "310MB"
"""Above the 290 MB of the network's weights, so that a plan for one device is accepted; torch is not counted there."""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def workload(scheme: str) -> dict[str, Any]:
    return {
        "task": "infer",
        "model": {"name": "mlp", "hidden": [6000, 6000, 6000]},
        "data": {"name": "digits"},
        "method": {"name": "distributed", "scheme": scheme, "stall_timeout": "5s"},
        "batch_size": 1,
        "requests": 2,
    }


def run(
    folder: Path, name: str, scheme: str, **memory: str
) -> tuple[int, str, list[dict[str, Any]]]:
    devices = {
        "source": {"speed": "20gflops", "memory": memory.get("source", LIMIT)},
        "worker": {
            "speed": "20gflops",
            "memory": memory.get("worker", LIMIT),
            "count": 2,
        },
    }
    if scheme == "single":
        del devices["worker"]  # which would have nothing to do
    path = scenario(
        folder, name, devices=devices, workload=workload(scheme), time_limit="60s"
    )
    done = run_command("run", path, "--out", folder / name, "--accept-links")
    events = [
        json.loads(line)
        for line in (folder / name / "events.jsonl").read_text().splitlines()
    ]
    assert left_of(name) == []
    return done.returncode, done.stderr + done.stdout, events


def test_a_share_fits_where_the_whole_model_does_not(tmp_path: Path) -> None:
    code, said, events = run(tmp_path, "memory-share", "lop")
    assert code == 0, said
    held = {
        event["device"]: event["weights"]
        for event in events
        if event["event"] == "memory"
    }
    assert all(90e6 < weights < 100e6 for weights in held.values()), held
    assert sum(event["event"] == "request" for event in events) == 2

    code, said, _ = run(tmp_path, "memory-whole", "single")
    assert code == 1
    assert "source ran out of memory: its container is limited to 310MB" in " ".join(
        said.split()
    )


def test_a_worker_that_dies_of_its_limit_is_no_loss_to_recover_from(
    tmp_path: Path,
) -> None:
    # By equal shares in a row one worker has 144 MB, more than fits beside torch.
    code, said, _ = run(
        tmp_path, "memory-worker", "sequential", source="2GB", worker="200MB"
    )
    assert code == 1
    assert "ran out of memory: its container is limited to 200MB" in " ".join(
        said.split()
    )
    assert "worker" in said
