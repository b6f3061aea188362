"""Definitions of metrics, and of the rows, tables and charts that display them.

The metrics of all runs are defined in this package, those of a method beside its program. ``expect``, ``compare``,
``metrics.json``, the terminal, the report and the documentation all read these definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from testbed.common.formats import MetricKind
from testbed.trace.events import EVENTS, EventType
from testbed.trace.record import DescribeRecovery, RunView

Metrics = Mapping[str, Any]
"""Contents of ``metrics.json``: metrics and lists by name."""
Item = Mapping[str, Any]
"""An entry of a list in the metrics."""


@dataclass(frozen=True)
class Metric:
    """A named value of a run, as in ``metrics.json`` and ``expect``.

    A name with a placeholder, such as ``layers.<layer>.dropped``, defines a value for each layer (or other member),
    such as ``layers.2.dropped``.

    >>> from testbed.trace.metrics_spec import Metric
    >>> Metric("tokens_lost", "number", "tokens without a return", lambda run: len(run.of("lost"))).name
    'tokens_lost'
    """

    name: str
    kind: MetricKind
    meaning: str
    """Meaning in half a sentence, for the reference of metrics."""
    compute: Callable[[RunView], float | int | str | bool | Mapping[str, float] | None]
    """Function of a finished run; None for a run without the required events, in which case the metric is omitted.

    For a metric by layer, the function returns a mapping of layers to values.
    """
    brief: bool = False
    """Whether the one-line summary of a sweep's run includes the metric."""
    compared: bool = False
    """Whether `testbed compare` includes the metric."""


@dataclass(frozen=True)
class Row:
    """A line of the report's summary; omitted if a metric in the templates is missing.

    ``text`` and ``note`` are templates: ``{step_time}`` is replaced by the metric, formatted by its kind. Either may be
    a function of the metrics that returns the template.
    """

    label: str
    text: str | Callable[[Metrics], str]
    """Template of the value beside the label."""
    note: str | Callable[[Metrics], str] = ""
    """Template of the explanation after the value."""
    when: Callable[[Metrics], object] | None = None
    """Condition for the row; default: always."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    kind: MetricKind | Literal["moment"]
    """``moment`` is an instant of the run, in seconds."""
    value: str | Callable[[Item], Any]
    """Key of the item, or a function of the item."""
    wide: bool = False
    """Whether narrow layouts omit the column."""

    def of(self, item: Item) -> Any:
        """Return the value of the column for an item.

        >>> Column("From", "moment", "start").of({"start": 2.5})
        2.5
        """
        return item.get(self.value) if isinstance(self.value, str) else self.value(item)


@dataclass(frozen=True)
class Table:
    """A table of a report; absent without items."""

    title: str
    note: str
    items: str | Callable[[Metrics], Sequence[Item]]
    """Name of a list in the metrics, or a function of the metrics."""
    columns: tuple[Column, ...]

    def listed(self, metrics: Metrics) -> Sequence[Item]:
        """Return the items of a run, one for each row."""
        if isinstance(self.items, str):
            return metrics.get(self.items, ())  # type: ignore[no-any-return]
        return self.items(metrics)


@dataclass(frozen=True)
class TimeSeries:
    """A chart of a report over the time of the run; absent without items."""

    title: str
    note: str
    items: str
    """Name of a list in the metrics; each item has a ``time``."""
    value: str
    """Key of the plotted value."""
    kind: MetricKind
    by: str | None = None
    """Key that assigns items to lines; None for a single line."""
    stacked: bool = False
    """Whether lines are step functions stacked on top of each other."""
    marks: str | None = None
    """Name of a list of items with a ``time``, at which a stacked chart has vertical lines."""


@dataclass(frozen=True)
class MetricsSpec:
    """The metrics, events and report sections defined by a method or workload. Empty by default."""

    metrics: tuple[Metric, ...] = ()
    lists: Mapping[str, Callable[[RunView], list[dict[str, Any]]]] | None = None
    """Functions for lists of JSON values in ``metrics.json`` by name; empty lists are omitted."""
    recovery: DescribeRecovery | None = None
    """Function that extends an entry of ``recovery_list`` from the phases of ``recovery`` events."""
    events: tuple[EventType, ...] = ()
    rows: tuple[Row, ...] = ()
    tables: tuple[Table, ...] = ()
    curves: tuple[TimeSeries, ...] = ()
    former_metrics: Mapping[str, str] = field(default_factory=dict)
    """Former name -> present name of renamed metrics. The error for a former name in ``expect`` has the present one."""

    def joined(self, other: MetricsSpec) -> MetricsSpec:
        """Return these definitions followed by the other ones; at most one of both may define ``recovery``."""
        if NOTHING in (self, other):
            return other if self == NOTHING else self
        lists = {**(self.lists or {}), **(other.lists or {})}
        return MetricsSpec(
            self.metrics + other.metrics,
            lists or None,
            other.recovery or self.recovery,
            self.events + other.events,
            self.rows + other.rows,
            self.tables + other.tables,
            self.curves + other.curves,
            {**self.former_metrics, **other.former_metrics},
        )


NOTHING = MetricsSpec()
"""The definitions of a method without metrics, events and report sections of its own."""


def events_of(declared: MetricsSpec) -> dict[str, tuple[str, ...]]:
    """Return the events available to fault triggers, each with the keys available for a match.

    >>> events_of(NOTHING)["compute"]
    ('batch', 'micro')
    """
    keys = {}
    for event_type in (*EVENTS, *declared.events):
        if event_type.keys is not None:
            keys[event_type.name] = event_type.keys
    return keys


def by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Return metrics by their names. Raises ValueError for a duplicate name."""
    result: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in result:
            raise ValueError(
                f"two metrics are called '{metric.name}': rename one of them"
            )
        result[metric.name] = metric
    return result
