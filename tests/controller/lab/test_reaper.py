"""Ownership of a run by its controller and its reaper; without both, the run is orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed_controller.lab.paths import orphaned_runs, state_folder
from testbed_controller.lab.reaper import Reaper


@pytest.fixture(autouse=True)
def _empty_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_missing_state_folder_is_empty_and_not_created(
    tmp_path: Path,
) -> None:
    assert orphaned_runs() == []
    assert list(tmp_path.iterdir()) == []


def test_run_is_owned_until_reaper_is_dismissed() -> None:
    reaper = Reaper("x-1")
    assert [path.name for path in state_folder().glob("x-1.*")] == ["x-1.owned"]
    assert orphaned_runs() == []
    reaper.dismiss()
    assert list(state_folder().glob("x-1.*")) == []


@pytest.mark.parametrize("is_reaper_killed", [True, False])
def test_run_is_orphaned_if_controller_and_reaper_are_killed(
    is_reaper_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without an engine, the reaper cannot finish its work, and remains.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    program = (
        "import time; from testbed_controller.lab.reaper import Reaper; r = Reaper('x-1')\n"
        "print(r._process.pid, flush=True); time.sleep(60)"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    reaper = int(controller.stdout.readline())
    try:
        assert orphaned_runs() == []
        if is_reaper_killed:
            os.kill(reaper, signal.SIGKILL)
        controller.kill()
        controller.wait()
        deadline = time.monotonic() + 5.0
        # The kernel releases the lock of a killed process after a moment.
        while is_reaper_killed and not orphaned_runs() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert orphaned_runs() == (["x-1"] if is_reaper_killed else [])
    finally:
        if not is_reaper_killed:
            os.kill(reaper, signal.SIGKILL)
        controller.stdout.close()
