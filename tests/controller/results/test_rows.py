"""A run as tables: what is in them, and that files hold what the rows hold."""

from __future__ import annotations

import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed_controller.cli.export import export
from testbed_controller.results import files
from testbed_controller.results.recorder import Recorder
from testbed_controller.results.rows import (
    TABLES,
    every_table,
    points,
    rows,
    write_csv,
    write_parquet,
    write_tables,
)
from testbed_controller.results.run import Run
from tests.helpers import recorded

FRAMES = pytest.mark.skipif(
    not (importlib.util.find_spec("pandas") and importlib.util.find_spec("pyarrow")),
    reason="needs the extra `frames`",
)
UNLIKE = [
    {"name": "a", "peers": ["b", "c"], "size": 3},
    {"name": None, "size": 4.5},
    {"name": "c", "peers": None},
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return files.load(
        recorded.write_run(
            tmp_path / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            recorded.make_outcome(),
        )
    )


def test_events_are_rows_in_their_order_with_their_own_keys(run: Run) -> None:
    found = rows(run, "events")
    assert len(found) == len(recorded.make_events())
    assert found[0] == {
        "time": 0.0,
        "device": "a",
        "event": "state",
        "state": "started",
    }
    assert [row["time"] for row in found] == [
        event.time for event in recorded.make_events()
    ]


def test_metrics_of_the_scenario_are_rows_and_columns(run: Run) -> None:
    measured = replace(run, metrics={**run.metrics, "metrics": {"f1": 0.9}})
    found = {row["metric"]: row["value"] for row in rows(measured, "metrics")}
    assert found["metrics.f1"] == 0.9
    assert [row["metrics.f1"] for row in points([measured])] == [0.9]


def test_timeline_of_an_interrupted_run_is_exported(tmp_path: Path) -> None:
    writer = Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    for event in recorded.make_events()[:20]:
        writer.event(event)
    writer.abandon(KeyboardInterrupt())
    done = CliRunner().invoke(export, [str(tmp_path / "run"), "--perfetto"])
    assert done.exit_code == 0, done.output
    trace = json.loads((tmp_path / "run" / "export" / "trace.json").read_text())
    assert trace["traceEvents"]


def test_metrics_of_one_value_are_rows_with_their_meaning(run: Run) -> None:
    found = {row["metric"]: row for row in rows(run, "metrics")}
    assert found["accuracy"]["value"] == 0.95
    assert found["duration"] == {
        "metric": "duration",
        "value": 8.6,
        "kind": "seconds",
        "meaning": "time from the start of the workload to the end of the coordinator's program",
    }
    assert "reception" not in found, "what there is no ground for is left out"


def test_what_a_link_was_asked_for_and_measured_as_are_columns(run: Run) -> None:
    there, back = rows(run, "links")
    assert (there["source"], there["destination"]) == ("a", "b")
    assert there["requested.rate"] == 8e6
    assert (there["measured.delay"], back["measured.delay"]) == (0.0101, 0.0102)


def test_other_tables_are_the_lists_of_the_metrics(run: Run) -> None:
    assert [row["device"] for row in rows(run, "devices")] == ["a", "b"]
    assert [row["step"] for row in rows(run, "steps")] == [0, 1, 1, 2, 3, 4]
    assert [row["accuracy"] for row in rows(run, "evaluations")] == [0.95]
    assert [row["action"] for row in rows(run, "faults")] == ["kill"]
    assert every_table(run).keys() == TABLES.keys()
    with pytest.raises(
        InputError, match="unknown table 'event': choose one of metrics, events, "
    ):
        rows(run, "event")


def test_former_name_of_a_table_is_refused_with_the_present_one(run: Run) -> None:
    with pytest.raises(InputError, match="'figures' has been renamed: write 'metrics'"):
        rows(run, "figures")


def test_a_run_of_a_sweep_is_a_row_with_its_verdict_instead_of_whether_it_is_trusted(
    run: Run,
) -> None:
    (row,) = points([run])
    assert (row["repetition"], row["verdict"], row["accuracy"]) == (0, "trusted", 0.95)
    assert "trusted" not in row


def test_csv_has_a_column_for_every_key_and_composed_values_as_json(
    tmp_path: Path,
) -> None:
    write_csv(tmp_path / "own.csv", UNLIKE)
    with (tmp_path / "own.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["name", "peers", "size"]
    assert json.loads(found[0]["peers"]) == ["b", "c"]
    assert found[1] == {"name": "", "peers": "", "size": "4.5"}


def test_tables_without_rows_are_not_written(tmp_path: Path) -> None:
    write_tables(tmp_path, {"some": [{"a": 1}], "none": []}, "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["some.csv"]


@FRAMES
def test_what_a_row_lacks_is_missing_in_parquet_too(tmp_path: Path) -> None:
    from pyarrow import parquet

    write_parquet(tmp_path / "own.parquet", UNLIKE)
    found = parquet.read_table(tmp_path / "own.parquet").to_pylist()
    assert [row["name"] for row in found] == ["a", None, "c"]
    assert [row["peers"] for row in found] == ['["b", "c"]', None, None]
    assert [row["size"] for row in found][:2] == [3.0, 4.5]
