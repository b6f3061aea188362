"""Tables of a run: their rows and columns, as CSV and Parquet."""

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
    all_tables,
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
MIXED_ROWS = [
    {"name": "a", "peers": ["b", "c"], "size": 3},
    {"name": None, "size": 4.5},
    {"name": "c", "peers": None},
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "run"
    trial = recorded.make_trial()
    plan = recorded.make_plan()
    return files.load(recorded.write_run(folder, trial, plan, recorded.make_outcome()))


def test_events_are_rows_in_order_with_their_fields(run: Run) -> None:
    events = recorded.make_events()
    table = rows(run, "events")
    assert table[0] == {
        "time": 0.0,
        "device": "a",
        "event": "state",
        "state": "started",
    }
    assert [row["time"] for row in table] == [event.time for event in events]


def test_metrics_of_scenario_are_rows_and_columns(run: Run) -> None:
    run = replace(run, metrics={**run.metrics, "metrics": {"f1": 0.9}})
    values = {row["metric"]: row["value"] for row in rows(run, "metrics")}
    assert values["metrics.f1"] == 0.9
    (point,) = points([run])
    assert point["metrics.f1"] == 0.9


def test_timeline_of_interrupted_run_is_exported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trial = recorded.make_trial()
    recorder = Recorder(folder, trial, recorded.make_plan(), "emulate")
    for event in recorded.make_events()[:20]:
        recorder.event(event)
    recorder.abandon(KeyboardInterrupt())
    # The trace of a complete run is written with its results.
    result = CliRunner().invoke(export, [str(folder), "--perfetto"])
    assert result.exit_code == 0, result.output
    trace = json.loads((folder / "export" / "trace.json").read_text())
    assert trace["traceEvents"]


def test_export_lists_files_that_it_wrote(tmp_path: Path, run: Run) -> None:
    runner = CliRunner()
    tables = runner.invoke(export, [str(run.path), "--csv", "--out", str(tmp_path)])
    assert "metrics.csv" in tables.output
    timeline = ["--perfetto", "--out", str(tmp_path)]
    result = runner.invoke(export, [str(run.path), *timeline])
    assert result.output == f"written to {tmp_path}: trace.json\n"


def test_metrics_with_single_value_are_rows_with_meaning(run: Run) -> None:
    by_name = {row["metric"]: row for row in rows(run, "metrics")}
    assert by_name["accuracy"]["value"] == 0.95
    assert by_name["duration"] == {
        "metric": "duration",
        "value": 8.6,
        "kind": "seconds",
        "meaning": "time from the start of the workload to the end of the coordinator's program",
    }
    # A metric of casts, which the recorded run has not.
    assert "reception" not in by_name


def test_requested_and_measured_link_properties_are_columns(run: Run) -> None:
    forward, backward = rows(run, "links")
    assert forward["source"] == "a"
    assert forward["destination"] == "b"
    assert forward["requested.rate"] == 8e6
    assert forward["measured.delay"] == 0.0101
    assert backward["measured.delay"] == 0.0102


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("devices", "device", ["a", "b"]),
        # Step 1 is repeated after the fault.
        ("steps", "step", [0, 1, 1, 2, 3, 4]),
        ("evaluations", "accuracy", [0.95]),
        ("faults", "action", ["kill"]),
    ],
)
def test_lists_of_metrics_are_tables(
    table: str, column: str, values: list[object], run: Run
) -> None:
    assert [row[column] for row in rows(run, table)] == values


def test_unknown_table_is_refused_with_known_tables(run: Run) -> None:
    assert all_tables(run).keys() == TABLES.keys()
    message = "unknown table 'event': choose one of metrics, events, "
    with pytest.raises(InputError, match=message):
        rows(run, "event")


def test_former_name_of_table_is_refused_with_present_name(run: Run) -> None:
    with pytest.raises(InputError, match="'figures' has been renamed: write 'metrics'"):
        rows(run, "figures")


def test_run_of_sweep_is_row_with_verdict(run: Run) -> None:
    (row,) = points([run])
    assert row["repetition"] == 0
    assert row["verdict"] == "trusted"
    assert row["accuracy"] == 0.95
    # The verdict has this information already.
    assert "trusted" not in row


def test_csv_has_column_for_every_key_and_json_for_lists(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    write_csv(path, MIXED_ROWS)
    with path.open(newline="") as file:
        first, second, _ = csv.DictReader(file)
    assert list(first) == ["name", "peers", "size"]
    assert json.loads(first["peers"]) == ["b", "c"]
    assert second == {"name": "", "peers": "", "size": "4.5"}


def test_tables_without_rows_are_not_written(tmp_path: Path) -> None:
    write_tables(tmp_path, {"some": [{"a": 1}], "none": []}, "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["some.csv"]


@FRAMES
def test_missing_values_of_row_are_null_in_parquet(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "own.parquet"
    write_parquet(path, MIXED_ROWS)
    columns = parquet.read_table(path).to_pydict()
    assert columns["name"] == ["a", None, "c"]
    assert columns["peers"] == ['["b", "c"]', None, None]
    # A column of whole and other numbers has floats.
    assert columns["size"][:2] == [3.0, 4.5]
