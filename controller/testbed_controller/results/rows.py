"""The tables of a run as rows of plain values, and their CSV and Parquet files, for other programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError
from testbed.common.lazy import require_extra
from testbed.scenario.points import value_label
from testbed_controller.results.available import all_metrics, metric_value
from testbed_controller.results.run import Run

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
"""Values of one row of a table by column."""


def _metric_rows(run: Run) -> list[Row]:
    """Return a row for each metric with a single value; values by device or layer are omitted."""
    table = []
    for name, metric in all_metrics([run]).items():
        value = metric_value(run.metrics, name)
        if isinstance(value, int | float | str | bool):
            table.append(
                {
                    "metric": name,
                    "value": value,
                    "kind": metric.kind,
                    "meaning": metric.meaning,
                }
            )
    return table


def _event_rows(run: Run) -> list[Row]:
    table = []
    for event in run.outcome.events:
        row = {"time": event.time, "device": event.device, "event": event.event}
        table.append({**row, **event.fields})
    return table


def _device_rows(run: Run) -> list[Row]:
    devices = run.metrics["devices"]
    return [{"device": name, **metrics} for name, metrics in devices.items()]


def _link_rows(run: Run) -> list[Row]:
    """Return a row for each direction of each link, with nested properties as columns like ``requested.rate``."""
    table = []
    for link in run.metrics["links"]:
        row: Row = {}
        for key, value in link.items():
            if isinstance(value, dict):
                for name, nested_value in value.items():
                    row[f"{key}.{name}"] = nested_value
            else:
                row[key] = value
        table.append(row)
    return table


def _series_rows(name: str) -> Callable[[Run], list[Row]]:
    """Return a function returning one series of a run, for example the steps, as rows."""
    return lambda run: _copy_rows(run.metrics["series"][name])


def _fault_rows(run: Run) -> list[Row]:
    return _copy_rows(run.metrics["fault_list"])


def _copy_rows(rows: Iterable[Row]) -> list[Row]:
    """Return copies, which a caller may change without changing the metrics of the run."""
    return [dict(row) for row in rows]


TABLES: Mapping[str, Callable[[Run], list[Row]]] = {
    "metrics": _metric_rows,
    "events": _event_rows,
    "devices": _device_rows,
    "links": _link_rows,
    "steps": _series_rows("steps"),
    "evaluations": _series_rows("evaluations"),
    "requests": _series_rows("requests"),
    "faults": _fault_rows,
}
"""Tables of a run, with functions that compute them. Times and durations are in seconds."""
_FORMER_TABLES = {"figures": "metrics"}
"""Former names of tables, with the present names."""


def rows(run: Run, table: str) -> list[Row]:
    """Return the rows of a table of `TABLES`. Raises `InputError` for an unknown table."""
    if table in _FORMER_TABLES:
        present = _FORMER_TABLES[table]
        raise InputError(f"the table '{table}' has been renamed: write '{present}'")
    if table not in TABLES:
        raise InputError(f"unknown table '{table}': choose one of {', '.join(TABLES)}")
    return TABLES[table](run)


def all_tables(run: Run) -> dict[str, list[Row]]:
    """Return all tables of a run by name."""
    return {name: table(run) for name, table in TABLES.items()}


def write_tables(
    folder: Path, tables: Mapping[str, Sequence[Row]], file_format: str
) -> None:
    """Write all non-empty tables as files; ``file_format`` is ``csv`` or ``parquet``, and the suffix of the files."""
    write_file = write_parquet if file_format == "parquet" else write_csv
    for name, table_rows in tables.items():
        if table_rows:
            write_file(folder / f"{name}.{file_format}", table_rows)


def points(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each run of a sweep: swept values, verdict, and scalar metrics."""
    table = []
    for run in runs:
        row: Row = {}
        for key, value in run.trial.point.items():
            # A labelled value becomes its label; other values keep their type.
            row[key] = value_label(value) or value
        row["repetition"] = run.trial.repetition
        row["verdict"] = run.metrics["verdict"]["kind"]
        for metric in _metric_rows(run):
            row[metric["metric"]] = metric["value"]
        # The verdict says more: a simulation is neither trusted nor untrusted.
        row.pop("trusted", None)
        table.append(row)
    return table


def frame(table_rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a pandas frame. Raises `InputError` if pandas is not installed."""
    pandas = require_extra("pandas", "frames", "a frame or Parquet file")
    table: pd.DataFrame = pandas.DataFrame(table_rows)
    return table


def write_parquet(path: Path, table_rows: Sequence[Row]) -> None:
    """Write rows as Parquet, which requires pandas and pyarrow.

    A column of mixed or composite values is written as JSON. Values that are None or absent from a row are missing.
    """
    table = frame(table_rows)
    for name, kind in table.dtypes.items():
        # A column of Parquet has one type, and `object` stands for mixed ones.
        if str(kind) == "object":
            texts = []
            missing = table[name].isna()
            for value, is_missing in zip(table[name], missing, strict=True):
                texts.append(None if is_missing else _json_text(value))
            table[name] = texts
    table.to_parquet(path)


def _json_text(value: object) -> str:
    # A text is kept, since JSON would add quotes.
    return value if isinstance(value, str) else json.dumps(value, default=str)


def write_csv(path: Path, table_rows: Iterable[Row]) -> None:
    """Write rows as CSV with a column for each key; composite values are written as JSON."""
    table_rows = list(table_rows)
    # Rows may have different keys: events of other kinds have other fields.
    columns: dict[str, None] = {}
    for row in table_rows:
        columns |= dict.fromkeys(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        for row in table_rows:
            cells = map(_csv_cell, row.values())
            writer.writerow(dict(zip(row, cells, strict=True)))


def _csv_cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value
