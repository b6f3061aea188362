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


def test_interval_after_student() -> None:
    # t(0.975; 2) = 4.3027, standard deviation 1, three values.
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert interval([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_quantiles_of_student_equal_scipy() -> None:
    stats = pytest.importorskip("scipy.special")
    for freedom in (1, 2, 3, 4, 9, 10, 29, 101, 1000):
        assert student_quantile(freedom, 0.95) == pytest.approx(
            stats.stdtrit(freedom, 0.975), rel=1e-9
        )


def test_a_sweep_with_repetitions_is_summarized_by_point(tmp_path: Path) -> None:
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
    summary = summarize(
        tmp_path, [files.load_metrics(place) for place in files.places(tmp_path)]
    )
    assert [point["point"] for point in summary["points"]] == [
        {"network.link.rate": "8mbit"},
        {"network.link.rate": "16mbit"},
    ]
    first = summary["points"][0]
    assert first["trusted"] == 2
    assert first["metrics"]["accuracy"] == {"mean": 0.95, "ci95": 0.0, "n": 2}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["network.link.rate"] for row in rows] == ["8mbit", "16mbit"]
    assert float(rows[0]["step_time"]) == pytest.approx(1.0)


def test_keys_are_as_short_as_they_can_be_told_apart() -> None:
    keys = [
        "workload.method.name",
        "network.link.rate",
        "devices.a.speed",
        "devices.b.speed",
        "workload.batch_size",
    ]
    assert list(short_keys(keys).values()) == [
        "method",
        "rate",
        "a speed",
        "b speed",
        "batch size",
    ]
