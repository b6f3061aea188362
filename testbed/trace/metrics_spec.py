"""What can be said of a run: figures by name, and the rows, tables and curves that show them.

The figures that every run may have are declared in this room, those of one method in its own folder. ``expect``,
``compare``, ``metrics.json``, the terminal, the report and the documentation all read these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from testbed.common.formats import MetricKind
from testbed.trace.events import EVENTS, EventType
from testbed.trace.record import RunView, Tell

Metrics = Mapping[str, Any]
"""What ``metrics.json`` holds: figures and lists by name."""
Item = Mapping[str, Any]
"""One of such a list."""


@dataclass(frozen=True)
class Metric:
    """One value of a run, by the name that ``metrics.json`` and ``expect`` give it.

    A name such as ``layers.<layer>.dropped`` is that of one value for each layer, or whatever stands in brackets:
    ``layers.2.dropped`` is one of them.
    """

    name: str
    kind: MetricKind
    meaning: str
    """Half a sentence for the table of figures; what it is of, not how it is written."""
    compute: Callable[[RunView], float | int | str | bool | Mapping[str, float] | None]
    """From the record of a finished run; None where the run gives no ground for it: the figure is absent then.

    Of one for each layer, the values by layer.
    """
    brief: bool = False
    """Whether it stands in the one line that a run of a sweep gets."""
    compared: bool = False
    """Whether `testbed compare` puts it side by side."""


@dataclass(frozen=True)
class Row:
    """A line among the figures at the head of a report; absent where a figure that it names is absent.

    ``text`` and ``note`` are templates: ``{step_time}`` stands for that figure, written as its kind asks for. Either
    may be a function of the metrics that returns the template.
    """

    label: str
    text: str | Callable[[Metrics], str]
    note: str | Callable[[Metrics], str] = ""
    when: Callable[[Metrics], object] | None = None
    """Whether there is anything to say; default: always."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    kind: MetricKind | Literal["moment"]
    """``moment`` is an instant of the run, in seconds."""
    value: str | Callable[[Item], Any]
    """Key of the listed item, or a function of it."""
    wide: bool = False
    """Whether it is left out where there is little room."""

    def of(self, item: Item) -> Any:
        """Return what the column has of a listed item."""
        return item.get(self.value) if isinstance(self.value, str) else self.value(item)


@dataclass(frozen=True)
class Table:
    """A table of a report; absent where nothing is listed."""

    title: str
    note: str
    items: str | Callable[[Metrics], Sequence[Item]]
    """Name of a list in the metrics, or a function of the metrics."""
    columns: tuple[Column, ...]

    def listed(self, metrics: Metrics) -> Sequence[Item]:
        """Return the items of a run, a row each."""
        return metrics.get(self.items, ()) if isinstance(self.items, str) else self.items(metrics)


@dataclass(frozen=True)
class TimeSeries:
    """A chart of a report over the time of the run; absent where nothing is listed."""

    title: str
    note: str
    items: str
    """Name of a list in the metrics; each item has a ``time``."""
    value: str
    """Key of what is drawn."""
    kind: MetricKind
    by: str | None = None
    """Key that says which line an item belongs to; None: there is one line."""
    stacked: bool = False
    """Whether values hold until the next, and those of all lines are drawn on top of each other."""
    marks: str | None = None
    """Name of a list at whose times a stacked chart has a vertical line."""


@dataclass(frozen=True)
class MetricsSpec:
    """What a method says of its runs beside what can be said of every run. Empty is a good beginning."""

    figures: tuple[Metric, ...] = ()
    lists: Mapping[str, Callable[[RunView], list[dict[str, Any]]]] | None = None
    """Lists of JSON values that ``metrics.json`` holds under these names; one that is empty is left out."""
    recovery: Tell | None = None
    """What it adds to an item of ``recovery_list``, from the phases that its ``recovery`` events name."""
    events: tuple[EventType, ...] = ()
    rows: tuple[Row, ...] = ()
    tables: tuple[Table, ...] = ()
    curves: tuple[TimeSeries, ...] = ()

    def joined(self, other: MetricsSpec) -> MetricsSpec:
        """Return these declarations and others after them; of recoveries only one of both may tell."""
        if NOTHING in (self, other):
            return other if self == NOTHING else self
        return MetricsSpec(
            self.figures + other.figures,
            {**(self.lists or {}), **(other.lists or {})} or None,
            other.recovery or self.recovery,
            self.events + other.events,
            self.rows + other.rows,
            self.tables + other.tables,
            self.curves + other.curves,
        )


NOTHING = MetricsSpec()


def events_of(declared: MetricsSpec) -> dict[str, tuple[str, ...]]:
    """Return the events that a fault may wait for in such a run, each with the keys that can be matched."""
    return {each.name: each.keys for each in (*EVENTS, *declared.events) if each.keys is not None}


def by_name(figures: Iterable[Metric]) -> dict[str, Metric]:
    """Return figures by their names; raises ValueError where two have the same."""
    found: dict[str, Metric] = {}
    for figure in figures:
        if figure.name in found:
            raise ValueError(f"two figures are called '{figure.name}': rename one of them")
        found[figure.name] = figure
    return found
