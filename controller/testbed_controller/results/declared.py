"""Storage of metric definitions with the results of a run, in ``declared.json``.

A method in a Python file of the user declares metrics, events, tables and curves as functions (a `MetricsSpec`). Only
their results are stored, as data: reading results must not execute code from their folder, which may come from
somebody else. Definitions of installed methods are not stored, since the methods are found by name.
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
"""Fields that every entry of the metric ``recovery_list`` has; methods may add more."""
_GROUPED_NAME = re.compile(r"(?P<group>[^.<]+)\.<[^.<>]+>(?:\.(?P<field>[^.]+))?")
"""Name of a metric with a value for each member of a group, such as ``layers.<layer>.age`` or ``cache.<device>``."""


def metrics_spec_of_trial(trial: Trial) -> MetricsSpec:
    """Return the metric definitions of a trial's method and workload; imports a user's method from a file."""
    return metrics_spec_of(find_method(trial.scenario), trial.scenario.workload)


def store_metrics_spec(
    folder: Path, trial: Trial, spec: MetricsSpec, metrics: Mapping[str, Any]
) -> None:
    """Write the definitions into the results folder, if the method is in a file of the user.

    ``metrics`` are those of the run, or empty at the start of the run, when rows and tables have no values yet.
    """
    if trial.scenario.workload.method.file is not None:
        text = json.dumps(finite(_spec_as_data(spec, metrics)), indent=2, default=str)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def load_metrics_spec(folder: Path, trial: Trial) -> MetricsSpec:
    """Return the metric definitions for the results in a folder.

    For a method in a file of the user, the functions of the definitions return the stored values. If its files are
    damaged or of another version, or if the package of another method is missing, no definitions are returned: a
    report then has the testbed's metrics alone.
    """
    workload = trial.scenario.workload
    if workload.method.file is None:
        try:
            return metrics_spec_of(
                methods.get(workload.method.name, workload.task), workload
            )
        except InputError:
            # The package of the method may have been removed since the run.
            return NOTHING
    try:
        stored = json.loads((folder / FILE).read_text(encoding="utf-8"))
        file = folder / "metrics.json"
        metrics = {}
        # The file is missing while the run is in progress, and after a crash.
        if file.is_file():
            metrics = json.loads(file.read_text(encoding="utf-8"))
        restored = _restore(stored, metrics)
        # Raises ValueError if a newer testbed has a metric of the same name.
        metrics_of(restored)
        return restored
    # AttributeError: a list where a mapping is expected, or the other way round.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return NOTHING


def _spec_as_data(spec: MetricsSpec, metrics: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    tables = []
    # Rows and tables are functions of the metrics: their results are stored, as the functions cannot be.
    if metrics:
        for row in spec.rows:
            if row.when is None or row.when(metrics):
                rows.append(_row_data(row, metrics))
        tables = [_table_data(table, metrics) for table in spec.tables]
    return {
        "metrics": [_metric_data(each) for each in spec.metrics],
        "lists": list(spec.lists or ()),
        "events": [asdict(event) for event in spec.events],
        "rows": rows,
        "tables": tables,
        "curves": [asdict(curve) for curve in spec.curves],
    }


def _metric_data(metric: Metric) -> dict[str, Any]:
    """Return the definition of a metric without the function."""
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
    """Return definitions whose functions return the stored values, independent of their argument."""
    method_fields = []
    for stored_recovery in metrics.get("recovery_list", ()):
        fields = {}
        for name in stored_recovery.keys() - _COMMON_FIELDS:
            fields[name] = stored_recovery[name]
        method_fields.append(fields)

    def recovery_fields(recovery: Recovery, run: RunView) -> dict[str, Any]:
        # Found by position, since two devices may detect or end their recoveries at the same time.
        for each, fields in zip(run.recoveries, method_fields, strict=False):
            if each is recovery:
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
        recovery=recovery_fields,
        events=tuple(EventType(**each) for each in stored["events"]),
        rows=tuple(Row(*row) for row in stored["rows"]),
        tables=tuple(_restore_table(each) for each in stored["tables"]),
        curves=tuple(TimeSeries(**each) for each in stored["curves"]),
    )


def _restore_table(stored: Mapping[str, Any]) -> Table:
    """Return a table whose columns find their values in an item by the number of the column, as text."""
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
    """Return a metric from ``metrics.json``; for a name like ``layers.<layer>.age``, the values by layer."""
    grouped = _GROUPED_NAME.fullmatch(name)
    if grouped is None:
        return metrics.get(name)
    members = metrics.get(grouped["group"], {})
    field = grouped["field"]
    if field is None:
        return members
    values = {}
    for member, fields in members.items():
        if field in fields:
            values[member] = fields[field]
    return values


def _constant_function(value: Any) -> Any:
    """Return a function of one argument, for example a run's record, with the constant result ``value``."""
    return lambda _: value
