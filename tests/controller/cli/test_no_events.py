"""Runs without stored events: `testbed run --no-events`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import run
from testbed_controller.results import files

RING = ("examples/ring", "--runtime", "simulate", "--seed", "1")


def run_ring(folder: Path, *options: str) -> Path:
    run.main([*RING, "--out", str(folder), *options], standalone_mode=False)
    return folder


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_run_without_events_has_same_metrics_and_no_large_files(
    tmp_path: Path, jobs: str
) -> None:
    with_events = run_ring(tmp_path / "with-events")
    results = tmp_path / "without-events"
    run_ring(results, "--repetitions", "2", "--jobs", jobs, "--no-events")
    # The first repetition has the same seed as the single run.
    first = files.run_folders(results)[0]
    metrics = (first / "metrics.json").read_text()
    assert metrics == (with_events / "metrics.json").read_text()
    assert names_in(first) == names_in(with_events) - {"events.jsonl", "trace.json"}
    summary = json.loads((results / "summary.json").read_text())
    assert len(summary["points"][0]["runs"]) == 2
    # A metric of the scenario's own method.
    assert files.load_metrics(first).metrics["tokens_lost"] == 1
    message = "has no events, as it was run with --no-events: run it again without"
    with pytest.raises(InputError, match=message):
        files.load(first)


def test_page_of_running_experiment_needs_events(tmp_path: Path) -> None:
    message = "--no-events cannot be combined with --watch, whose page needs events"
    with pytest.raises(InputError, match=message):
        run_ring(tmp_path / "run", "--no-events", "--watch")
    assert not (tmp_path / "run").exists()
