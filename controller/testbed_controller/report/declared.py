"""Summary rows, tables and charts that methods and workloads declare in a `MetricsSpec`, ready to be shown."""

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

_METRIC_REFERENCE = re.compile(r"\{([\w.-]+)\}")
"""A metric in a template: ``{step_time}``."""


def summary_rows(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, note) of the most important metrics."""
    for row in rows_of(run.declared):
        text_and_note = _render_row(row, run)
        if text_and_note is not None:
            yield (row.label, *text_and_note)


def _render_row(row: Row, run: Run) -> tuple[str, str] | None:
    """Return text and note of a row; None if the row does not apply."""
    if row.when is not None and not row.when(run.metrics):
        return None
    texts = []
    # The text comes first: without its metrics, the function of the note, which may rely on them, is not called.
    for template in (row.text, row.note):
        if not isinstance(template, str):
            template = template(run.metrics)
        text = fill_template(template, run)
        if text is None:
            return None
        texts.append(text)
    return texts[0], texts[1]


def format_metric(name: str, value: Any, metrics: Mapping[str, Metric]) -> str:
    """Format a value of metrics.json by the kind of the metric."""
    return formats.of_kind(metric_kind(name, metrics), value)


def fill_template(template: str, run: Run) -> str | None:
    """Return a template of `testbed.trace.metrics_spec.Row` filled with metric values; None if one is missing."""
    texts: dict[str, str] = {}
    for name in _METRIC_REFERENCE.findall(template):
        value = metric_value(run.metrics, name)
        if value is None:
            return None
        texts[name] = format_metric(name, value, run.metric_definitions)
    # Not by `str.format`, which would read a name such as `layers.conv1` as an attribute.
    return _METRIC_REFERENCE.sub(lambda match: texts[match[1]], template)


def tables(run: Run) -> Iterator[Section]:
    """Yield the declared tables with rows.

    The terminal shows the first sentence of the note, and the last 12 rows: these tables usually list events over time.
    """
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
class MethodChart:
    """A chart of declared values over the time of the run."""

    title: str
    note: str
    kind: MetricKind
    lines: list[tuple[str, list[tuple[float, float]]]]
    """Name and points (seconds of the run, value) of each line; a single line has an empty name."""
    stacked: bool = False
    """Whether the lines are shares of a whole, drawn on top of each other."""
    marks: tuple[float, ...] = ()
    """Times of vertical marks, in seconds of the run."""


def curves(run: Run) -> Iterator[MethodChart]:
    """Yield the declared charts with points."""
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
        yield MethodChart(
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
