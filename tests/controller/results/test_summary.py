"""Summaries of sweeps: means with confidence intervals for each point."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.common.intervals import interval, student_quantile
from testbed.scenario.points import short_keys
from testbed_controller.results import files
from testbed_controller.results.run import run_name
from testbed_controller.results.summary import summarize
from tests.helpers import recorded


def test_confidence_interval_uses_student_distribution() -> None:
    # t(0.975; 2) = 4.3027, standard deviation 1, three values.
    mean, half_width = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half_width == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert interval([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="no values"):
        interval([])


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 29, 101, 1000])
def test_student_quantiles_equal_scipy(freedom: int) -> None:
    special = pytest.importorskip("scipy.special")
    # A two-sided interval of 95 % leaves 2.5 % at each end.
    expected = special.stdtrit(freedom, 0.975)
    assert student_quantile(freedom, 0.95) == pytest.approx(expected, rel=1e-9)


def test_sweep_with_repetitions_is_summarized_by_point(tmp_path: Path) -> None:
    for rate in ("8mbit", "16mbit"):
        for repetition in range(2):
            trial = replace(
                recorded.make_trial(),
                point={"network.link.rate": rate},
                repetition=repetition,
            )
            recorded.write_run(
                tmp_path / run_name(trial),
                trial,
                recorded.make_plan(),
                recorded.make_outcome(),
            )
    runs = [files.load_metrics(folder) for folder in files.run_folders(tmp_path)]
    summary = summarize(tmp_path, runs)
    first, second = summary["points"]
    # In the order of the scenario rather than of folder names.
    assert first["point"] == {"network.link.rate": "8mbit"}
    assert second["point"] == {"network.link.rate": "16mbit"}
    assert first["trusted"] == 2
    assert first["metrics"]["accuracy"] == {"mean": 0.95, "ci95": 0.0, "n": 2}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["network.link.rate"] for row in rows] == ["8mbit", "16mbit"]
    assert float(rows[0]["step_time"]) == pytest.approx(1.0)


def test_keys_are_shortened_as_long_as_they_differ() -> None:
    expected = {
        "workload.method.name": "method",
        "network.link.rate": "rate",
        "devices.a.speed": "a speed",
        "devices.b.speed": "b speed",
        "workload.batch_size": "batch size",
    }
    assert list(short_keys(list(expected)).values()) == list(expected.values())
