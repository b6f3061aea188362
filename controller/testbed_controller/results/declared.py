"""Storage of user-defined metric definitions with the results of a run.

Reading results from the stored definitions executes no code from their folder, which may come from somebody else.
"""

from __future__ import annotations

import json
import re
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
from testbed.trace.registry import metrics_of
from testbed.validation import find_method, metrics_spec_of

FILE = "declared.json"
_COMMON_FIELDS = {
    "struck",
    "detected",
    "resumed",
    "seconds",
    "step",
    "missing",
    "deficit",
}
"""Fields common to all entries of ``recovery_list``; methods may add more."""
_GROUPED_NAME = re.compile(r"(?P<group>[^.<]+)\.<[^.<>]+>(?:\.(?P<last>[^.]+))?")
"""Name of a metric with a value for each member of a group, such as ``layers.<layer>.age`` or ``cache.<device>``."""


def declared_by(trial: Trial) -> MetricsSpec:
    """Return the metric definitions of a trial's method, which may be imported from a user's file."""
    return metrics_spec_of(find_method(trial.scenario), trial.scenario.workload)


def keep(
    folder: Path, trial: Trial, declared: MetricsSpec, metrics: Mapping[str, Any]
) -> None:
    """Write the definitions of a user's method into the results folder; ``metrics`` are empty at the start."""
    # Other methods are found again by name when the results are read.
    if trial.scenario.workload.method.file is not None:
        text = json.dumps(finite(_as_data(declared, metrics)), indent=2, default=str)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def declared_in(folder: Path, trial: Trial) -> MetricsSpec:
    """Return the metric definitions stored in a results folder; user-defined ones have their stored values.

    Damaged files of a user's method, or files of another version, count as no definitions: a report then has the
    testbed's metrics alone.
    """
    workload = trial.scenario.workload
    if workload.method.file is None:
        try:
            return metrics_spec_of(
                methods.get(workload.method.name, workload.task), workload
            )
        except InputError:
            # The package of the method may have been removed since.
            return NOTHING
    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        file = folder / "metrics.json"
        metrics = {}
        # Missing while the run is in progress, or if it was cut off.
        if file.is_file():
            metrics = json.loads(file.read_text(encoding="utf-8"))
        restored = _restore(stored, metrics)
        # Names may collide with metrics that the testbed has had since.
        metrics_of(restored)
        return restored
    # AttributeError: a list where a mapping is expected, or the other way round.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return NOTHING


def _as_data(declared: MetricsSpec, metrics: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    tables = []
    # Rows and tables are functions of the metrics: their results are stored, as the functions cannot be.
    if metrics:
        for row in declared.rows:
            if row.when is None or row.when(metrics):
                rows.append(_row_data(row, metrics))
        tables = [_table_data(table, metrics) for table in declared.tables]
    return {
        "metrics": [_metric_data(each) for each in declared.metrics],
        "lists": list(declared.lists or ()),
        "events": [asdict(event) for event in declared.events],
        "rows": rows,
        "tables": tables,
        "curves": [asdict(curve) for curve in declared.curves],
    }


def _metric_data(metric: Metric) -> dict[str, Any]:
    """Return the definition of a metric without its function."""
    return {
        "name": metric.name,
        "kind": metric.kind,
        "meaning": metric.meaning,
        "brief": metric.brief,
        "compared": metric.compared,
    }


def _row_data(row: Row, metrics: Mapping[str, Any]) -> list[str]:
    text = row.text if isinstance(row.text, str) else row.text(metrics)
    note = row.note if isinstance(row.note, str) else row.note(metrics)
    return [row.label, text, note]


def _table_data(table: Table, metrics: Mapping[str, Any]) -> dict[str, Any]:
    columns = table.columns
    headings = [[column.heading, column.kind, column.wide] for column in columns]
    items = []
    for item in table.listed(metrics):
        items.append([column.of(item) for column in columns])
    return {
        "title": table.title,
        "note": table.note,
        "columns": headings,
        "items": items,
    }


def _restore(stored: Mapping[str, Any], metrics: Mapping[str, Any]) -> MetricsSpec:
    """Return definitions whose functions return the stored values, whatever record they are given."""
    added_fields = []
    for item in metrics.get("recovery_list", ()):
        own_fields = {}
        for name in item.keys() - _COMMON_FIELDS:
            own_fields[name] = item[name]
        added_fields.append(own_fields)

    def recovery(item: Recovery, record: RunView) -> dict[str, Any]:
        # By position: two devices may detect or end their recoveries at the same time.
        for recomputed, fields in zip(record.recoveries, added_fields, strict=False):
            if recomputed is item:
                return fields
        return {}

    definitions = []
    for each in stored["metrics"]:
        value = _metric_value(metrics, each["name"])
        definitions.append(Metric(compute=_constant_function(value), **each))
    lists = {}
    for name in stored["lists"]:
        lists[name] = _constant_function(metrics.get(name, []))
    return MetricsSpec(
        metrics=tuple(definitions),
        lists=lists,
        recovery=recovery,
        events=tuple(EventType(**each) for each in stored["events"]),
        rows=tuple(Row(*row) for row in stored["rows"]),
        tables=tuple(_restore_table(each) for each in stored["tables"]),
        curves=tuple(TimeSeries(**each) for each in stored["curves"]),
    )


def _restore_table(stored: Mapping[str, Any]) -> Table:
    """Return a table whose columns are looked up by their number."""
    columns = []
    for number, (heading, kind, wide) in enumerate(stored["columns"]):
        columns.append(Column(heading, kind, str(number), wide))
    items = []
    for item in stored["items"]:
        names = map(str, range(len(item)))
        items.append(dict(zip(names, item, strict=True)))
    return Table(
        stored["title"], stored["note"], _constant_function(items), tuple(columns)
    )


def _metric_value(metrics: Mapping[str, Any], name: str) -> Any:
    """Return a metric from ``metrics.json``; for one such as ``layers.<layer>.age``, the values by layer."""
    grouped = _GROUPED_NAME.fullmatch(name)
    if grouped is None:
        return metrics.get(name)
    members = metrics.get(grouped["group"], {})
    last = grouped["last"]
    if last is None:
        return members
    values = {}
    for member, fields in members.items():
        if last in fields:
            values[member] = fields[last]
    return values


def _constant_function(value: Any) -> Any:
    """Return a function of one argument, such as a run's record, that always returns ``value``."""
    return lambda _: value
