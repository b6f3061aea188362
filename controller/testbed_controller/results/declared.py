"""Storage of user-defined metric definitions with the results of a run.

So reading results executes nothing that lies in their folder, which may have come from somebody else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed import methods
from testbed.common.errors import InputError
from testbed.scenario.schema import Trial
from testbed.trace.disturbances import Recovery
from testbed.trace.events import EventType, finite
from testbed.trace.metrics_spec import (
    NOTHING,
    Column,
    Metric,
    MetricsSpec,
    Row,
    Table,
    TimeSeries,
)
from testbed.trace.record import RunView
from testbed.validation import find_method, metrics_spec_of

FILE = "declared.json"
_OF_ANY = {"struck", "detected", "resumed", "seconds", "step", "missing", "deficit"}
"""Fields common to all entries of ``recovery_list``; methods may add more."""


def declared_by(trial: Trial) -> MetricsSpec:
    """Return the metric definitions of a trial's method, which may be imported from a user's file."""
    return metrics_spec_of(find_method(trial.scenario), trial.scenario.workload)


def keep(
    folder: Path, trial: Trial, declared: MetricsSpec, metrics: Mapping[str, Any]
) -> None:
    """Write the definitions of a user's method into the results folder; ``metrics`` are empty at the start."""
    if trial.scenario.workload.method.file is not None:
        kept = finite(_as_data(declared, metrics))
        (folder / FILE).write_text(
            json.dumps(kept, indent=2, default=str) + "\n", encoding="utf-8"
        )


def declared_in(folder: Path, trial: Trial) -> MetricsSpec:
    """Return the definitions stored in a results folder, with the metrics' values at that time for
    user-defined ones."""
    workload = trial.scenario.workload
    if workload.method.file is None:
        try:
            return metrics_spec_of(
                methods.get(workload.method.name, workload.task), workload
            )
        except InputError:  # of a package that is no longer installed
            return NOTHING
    try:
        kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
        figures = folder / "metrics.json"  # not there yet, or the run was cut off
        return _of_data(
            kept,
            json.loads(figures.read_text(encoding="utf-8"))
            if figures.is_file()
            else {},
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # written by an earlier version, or damaged
        return NOTHING


def _as_data(declared: MetricsSpec, metrics: Mapping[str, Any]) -> dict[str, Any]:
    figures = ("name", "kind", "meaning", "brief", "compared")
    rows = [
        row
        for row in declared.rows
        if metrics and (row.when is None or row.when(metrics))
    ]
    return {
        "figures": [
            {name: getattr(figure, name) for name in figures}
            for figure in declared.figures
        ],
        "lists": list(declared.lists or ()),
        "events": [asdict(event) for event in declared.events],
        "rows": [
            [
                row.label,
                *(
                    each if isinstance(each, str) else each(metrics)
                    for each in (row.text, row.note)
                ),
            ]
            for row in rows
        ],
        "tables": [_table_data(table, metrics) for table in declared.tables if metrics],
        "curves": [asdict(curve) for curve in declared.curves],
    }


def _table_data(table: Table, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": table.title,
        "note": table.note,
        "columns": [
            [column.heading, column.kind, column.wide] for column in table.columns
        ],
        "items": [
            [column.of(item) for column in table.columns]
            for item in table.listed(metrics)
        ],
    }


def _of_data(kept: Mapping[str, Any], metrics: Mapping[str, Any]) -> MetricsSpec:
    added = {
        item["detected"]: {key: item[key] for key in item.keys() - _OF_ANY}
        for item in metrics.get("recovery_list", ())
    }

    def recovered(item: Recovery, record: RunView) -> dict[str, Any]:
        return added.get(item.detected, {})

    return MetricsSpec(
        figures=tuple(
            Metric(
                compute=_constant_function(_metric_value(metrics, each["name"])), **each
            )
            for each in kept["figures"]
        ),
        lists={
            name: _constant_function(metrics.get(name, [])) for name in kept["lists"]
        },
        recovery=recovered,
        events=tuple(EventType(**each) for each in kept["events"]),
        rows=tuple(Row(*row) for row in kept["rows"]),
        tables=tuple(_kept_table(each) for each in kept["tables"]),
        curves=tuple(TimeSeries(**each) for each in kept["curves"]),
    )


def _kept_table(kept: Mapping[str, Any]) -> Table:
    columns = tuple(
        Column(heading, kind, str(place), wide)
        for place, (heading, kind, wide) in enumerate(kept["columns"])
    )
    items = [
        {str(place): value for place, value in enumerate(item)}
        for item in kept["items"]
    ]
    return Table(kept["title"], kept["note"], _constant_function(items), columns)


def _metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Return a figure from ``metrics.json``, of one for each layer or the like the values by layer."""
    if "<" not in name:
        return metrics.get(name)
    group, _, last = name.split(".")
    return {
        member: each[last]
        for member, each in metrics.get(group, {}).items()
        if last in each
    }


def _constant_function(value: Any) -> Any:
    return lambda _: value
