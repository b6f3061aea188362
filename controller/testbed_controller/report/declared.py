"""Rendering of the summary rows, tables and charts defined by metrics specifications."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from testbed.common import formats
from testbed.common.formats import MetricKind
from testbed.trace import metrics_spec
from testbed.trace.metrics_spec import Metric, Row
from testbed.trace.registry import metric_kind, rows_of, tables_of
from testbed_controller.report.tables import Cell, Column, Section
from testbed_controller.results.available import metric_value
from testbed_controller.results.run import Run

_NAMED = re.compile(r"\{([\w.-]+)\}")


def head(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, note) of the most important metrics."""
    for row in rows_of(run.declared):
        written = _render_row(row, run)
        if written is not None:
            yield (row.label, *written)


def _render_row(row: Row, run: Run) -> tuple[str, str] | None:
    """Return text and note of a row; None if the row does not apply."""
    if row.when is not None and not row.when(run.metrics):
        return None
    texts = []
    # In this order: the function of a note may rely on the metrics of the text.
    for template in (row.text, row.note):
        if not isinstance(template, str):
            template = template(run.metrics)
        text = fill(template, run)
        if text is None:
            return None
        texts.append(text)
    return texts[0], texts[1]


def format_metric(name: str, value: Any, metrics: Mapping[str, Metric]) -> str:
    """Format a value of metrics.json by the kind of its metric."""
    return formats.of_kind(metric_kind(name, metrics), value)


def fill(template: str, run: Run) -> str | None:
    """Fill in a template of `testbed.trace.metrics_spec.Row`; None if a metric is missing."""
    texts: dict[str, str] = {}
    for name in _NAMED.findall(template):
        value = metric_value(run.metrics, name)
        if value is None:
            return None
        texts[name] = format_metric(name, value, run.metric_definitions)
    # Not by `str.format`, which would read a name such as `layers.conv1` as an attribute.
    return _NAMED.sub(lambda match: texts[match[1]], template)


def tables(run: Run) -> Iterator[Section]:
    """Yield the non-empty defined tables; the terminal shows the first sentence of the note and the last rows."""
    for table in tables_of(run.declared):
        columns = []
        for number, each in enumerate(table.columns):
            kind = _cell_kind(each, is_first=number == 0)
            columns.append(Column(each.heading, kind, "wide" if each.wide else ""))
        rows = []
        for item in table.listed(run.metrics):
            rows.append([Cell(_cell_text(column, item)) for column in table.columns])
        brief = table.note.partition(". ")[0].rstrip(".")
        if rows:
            yield Section(
                table.title,
                table.note,
                brief,
                tuple(columns),
                rows,
                max_printed_rows=-12,
            )


def _cell_kind(
    column: metrics_spec.Column, *, is_first: bool
) -> Literal["name", "text", "number"]:
    if column.kind != "text":
        return "number"
    return "name" if is_first else "text"


@dataclass(frozen=True)
class Drawn:
    """A chart over the time of the run, ready to be drawn."""

    title: str
    note: str
    kind: MetricKind
    lines: list[tuple[str, list[tuple[float, float]]]]
    """Name and points (seconds of the run, value) of each line; a single line has an empty name."""
    stacked: bool = False
    marks: tuple[float, ...] = ()
    """Seconds of the run."""


def curves(run: Run) -> Iterator[Drawn]:
    """Yield the non-empty charts defined by the run's method."""
    for curve in run.declared.curves:
        # One line for each value of the key `by`, such as the device; without the key, a single unnamed line.
        points: dict[str, list[tuple[float, float]]] = {}
        for item in run.metrics.get(curve.items, ()):
            value = item.get(curve.value)
            if value is None:
                continue
            name = "" if curve.by is None else str(item.get(curve.by))
            points.setdefault(name, []).append((item["time"], value))
        if not points:
            continue
        marked_items = run.metrics.get(curve.marks or "", ())
        yield Drawn(
            curve.title,
            curve.note,
            curve.kind,
            list(points.items()),
            curve.stacked,
            tuple(item["time"] for item in marked_items),
        )


def _cell_text(column: metrics_spec.Column, item: Mapping[str, Any]) -> str:
    value = column.of(item)
    if column.kind == "text":
        return str(value) if value not in (None, "") else formats.NONE
    if column.kind == "moment":
        return formats.moment(value)
    return formats.of_kind(column.kind, value)
