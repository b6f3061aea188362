"""The recorded run of the test helpers in a folder: complete, or still being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed_controller.results.recorder import Recorder
from tests.helpers import recorded


def write_recorded(folder: Path, **changes: Any) -> Path:
    """Write the recorded run with other fields of the outcome, and return the folder."""
    outcome = recorded.make_outcome(**changes)
    return recorded.write_run(
        folder, recorded.make_trial(), recorded.make_plan(), outcome
    )


def start_recorder(folder: Path, first_events: int = 0) -> Recorder:
    """Return a recorder with the first events of the recorded run."""
    recorder = Recorder(folder, recorded.make_trial(), recorded.make_plan(), "emulate")
    for event in recorded.make_events()[:first_events]:
        recorder.event(event)
    return recorder
