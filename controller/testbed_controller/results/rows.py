"""The tables of a run as rows of plain values for other programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.common.errors import InputError
from testbed.common.lazy import require_extra
from testbed.scenario.points import value_label, value_text
from testbed_controller.results.run import Run

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


def _metric_rows(run: Run) -> list[Row]:
    plain = (int, float, str, bool)
    return [
        {"figure": name, "value": value, "kind": figure.kind, "meaning": figure.meaning}
        for name, figure in run.figures.items()
        if isinstance(value := run.metrics.get(name), plain)
    ]


def _event_rows(run: Run) -> list[Row]:
    return [
        {
            "time": event.time,
            "device": event.device,
            "event": event.event,
            **event.fields,
        }
        for event in run.outcome.events
    ]


def _device_rows(run: Run) -> list[Row]:
    return [
        {"device": name, **figures} for name, figures in run.metrics["devices"].items()
    ]


def _link_rows(run: Run) -> list[Row]:
    """Return each direction of each link, a link's properties as columns: ``requested.rate``."""
    link_rows = []
    for row in run.metrics["links"]:
        columns: Row = {}
        for key, value in row.items():
            columns |= (
                {f"{key}.{name}": each for name, each in value.items()}
                if isinstance(value, dict)
                else {key: value}
            )
        link_rows.append(columns)
    return link_rows


def _series_rows(name: str) -> Callable[[Run], list[Row]]:
    return lambda run: [dict(row) for row in run.metrics["series"][name]]


TABLES: Mapping[str, Callable[[Run], list[Row]]] = {
    "figures": _metric_rows,
    "events": _event_rows,
    "devices": _device_rows,
    "links": _link_rows,
    "steps": _series_rows("steps"),
    "evaluations": _series_rows("evaluations"),
    "requests": _series_rows("requests"),
    "faults": lambda run: [dict(row) for row in run.metrics["fault_list"]],
}
"""Tables of a run, with functions that compute them. Times and durations are in seconds."""


def rows(run: Run, table: str) -> list[Row]:
    """Return a table of a run, a mapping per row. Raises `InputError` for an unknown table."""
    if table not in TABLES:
        raise InputError(f"unknown table '{table}': choose one of {', '.join(TABLES)}")
    return TABLES[table](run)


def every_table(run: Run) -> dict[str, list[Row]]:
    """Return all tables of a run by name."""
    return {name: table(run) for name, table in TABLES.items()}


def write_tables(folder: Path, tables: Mapping[str, Sequence[Row]], kind: str) -> None:
    """Write all non-empty tables as ``csv`` or ``parquet`` files."""
    for name, table_rows in tables.items():
        if table_rows:
            (write_parquet if kind == "parquet" else write_csv)(
                folder / f"{name}.{kind}", table_rows
            )


def points(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each run of a sweep: swept values, verdict, and scalar metrics."""
    return [
        {
            **{
                key: value_text(value) if value_label(value) else value
                for key, value in run.trial.point.items()
            },
            "repetition": run.trial.repetition,
            "verdict": run.metrics["verdict"]["kind"],
            # A simulation is neither trusted nor not: the verdict says so.
            **{
                row["figure"]: row["value"]
                for row in _metric_rows(run)
                if row["figure"] != "trusted"
            },
        }
        for run in runs
    ]


def frame(table_rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a pandas frame; raises `InputError` where pandas is not installed."""
    made: pd.DataFrame = require_extra(
        "pandas", "frames", "a frame or Parquet file"
    ).DataFrame(table_rows)
    return made


def write_parquet(path: Path, table_rows: Sequence[Row]) -> None:
    """Write rows as Parquet; a column of unlike or composed values becomes one of JSON. Needs pandas and pyarrow.

    What a row lacks, or has as None, is missing there.
    """
    table = frame(table_rows)
    for name, kind in table.dtypes.items():
        if str(kind) == "object":
            lacking = table[name].isna()
            table[name] = [
                None
                if none
                else each
                if isinstance(each, str)
                else json.dumps(each, default=str)
                for each, none in zip(table[name], lacking, strict=True)
            ]
    table.to_parquet(path)


def write_csv(path: Path, table_rows: Iterable[Row]) -> None:
    """Write rows as CSV with a column for each key; composite values are written as JSON."""
    table_rows = list(table_rows)
    columns = dict.fromkeys(key for row in table_rows for key in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(
            {key: _csv_cell(value) for key, value in row.items()} for row in table_rows
        )


def _csv_cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value
