"""Memory limits of containers: within the limit a device works, beyond it the kernel kills it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run_command
from tests.integration.test_whole_runs import leftovers_of, write_scenario

pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]

LIMIT = "310MB"
"""Above the 290 MB of the network's weights, so that a plan for one device is accepted; plans do not count torch."""


@pytest.fixture(autouse=True)
def _isolate_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        # A device without a task is refused.
        del devices["worker"]
    path = write_scenario(
        folder, name, devices=devices, workload=workload(scheme), time_limit="60s"
    )
    completed = run_command("run", path, "--out", folder / name, "--accept-links")
    lines = (folder / name / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert leftovers_of(name) == []
    # On one line, since the messages are wrapped.
    output = " ".join((completed.stderr + completed.stdout).split())
    return completed.returncode, output, events


def test_part_of_model_fits_into_memory_and_whole_model_does_not(
    tmp_path: Path,
) -> None:
    code, output, events = run(tmp_path, "memory-share", "lop")
    assert code == 0, output
    # A third of 290 MB on each of three devices.
    for event in events:
        if event["event"] == "memory":
            assert 90e6 < event["weights"] < 100e6, event
    assert sum(event["event"] == "request" for event in events) == 2

    code, output, _ = run(tmp_path, "memory-whole", "single")
    assert code == 1
    message = "source ran out of memory: its container is limited to 310MB"
    assert message in output


def test_worker_out_of_memory_fails_run(
    tmp_path: Path,
) -> None:
    # With a sequential split one worker has 144 MB, too much beside torch.
    code, output, _ = run(
        tmp_path, "memory-worker", "sequential", source="2GB", worker="200MB"
    )
    assert code == 1
    assert "ran out of memory: its container is limited to 200MB" in output
    assert "worker" in output
