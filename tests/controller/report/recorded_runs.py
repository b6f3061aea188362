"""The recorded run of the test helpers, written to a folder and loaded from there."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed_controller.results import files
from testbed_controller.results.run import Run, run_name
from tests.helpers import recorded


def load_recorded(
    folder: Path, scenario: dict[str, Any] | None = None, **changes: Any
) -> Run:
    """Return the recorded run with other keys of the scenario and other fields of the outcome."""
    trial = recorded.make_trial(**(scenario or {}))
    outcome = recorded.make_outcome(**changes)
    return files.load(recorded.write_run(folder, trial, recorded.make_plan(), outcome))


def load_point(
    results: Path, point: dict[str, Any], repetition: int = 0, **changes: Any
) -> Run:
    """Return the recorded run as one point of a sweep, in a folder named after the point."""
    trial = replace(recorded.make_trial(), point=point, repetition=repetition)
    outcome = recorded.make_outcome(**changes)
    # Commands read keys and values of points from these names.
    folder = results / run_name(trial)
    return files.load(recorded.write_run(folder, trial, recorded.make_plan(), outcome))


def text_of(console: Console) -> str:
    """Return the text written to a console with an `io.StringIO`."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
