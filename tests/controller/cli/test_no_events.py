"""Runs of which no events are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import run
from testbed_controller.results import files

RING = ("examples/ring", "--runtime", "simulate", "--seed", "1")


def ring(folder: Path, *options: str) -> Path:
    run.main([*RING, "--out", str(folder), *options], standalone_mode=False)
    return folder


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_figures_are_the_same_and_the_large_files_are_not_there(
    tmp_path: Path, jobs: str
) -> None:
    whole, bare = ring(tmp_path / "whole"), tmp_path / "bare"
    ring(bare, "--repetitions", "2", "--jobs", jobs, "--no-events")
    first = files.places(bare)[0]
    assert (first / "metrics.json").read_text() == (whole / "metrics.json").read_text()
    left = {"events.jsonl", "trace.json"}
    assert {each.name for each in first.iterdir()} == {
        each.name for each in whole.iterdir()
    } - left
    assert (
        len(json.loads((bare / "summary.json").read_text())["points"][0]["runs"]) == 2
    )
    assert files.load_metrics(first).metrics["tokens_lost"] == 1
    with pytest.raises(
        InputError,
        match="has no events, as it was run with --no-events: run it again without",
    ):
        files.load(first)


def test_a_page_that_is_made_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match="--no-events cannot be combined with --watch, whose page needs events",
    ):
        ring(tmp_path / "run", "--no-events", "--watch")
    assert not (tmp_path / "run").exists()
