"""The registry of metrics: common ones, the method's own, and those of installed packages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from testbed.common import plugins
from testbed.common.errors import InputError
from testbed.common.formats import MetricKind
from testbed.trace import (
    course,
    devices,
    host,
    learning,
    pace,
    phases,
    recovery,
    requests,
    traffic,
)
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row, Table, by_name
from testbed.trace.record import RunView

COMMON: Mapping[str, Metric] = by_name(
    [
        *learning.METRICS,
        *pace.METRICS,
        *requests.METRICS,
        *recovery.METRICS,
        *course.METRICS,
        *traffic.METRICS,
        *devices.METRICS,
        *host.METRICS,
    ]
)
"""Metrics of every run."""

_LOG = logging.getLogger(__name__)
GROUP = "testbed.metrics"
"""Entry points under which an installed package adds figures to every run: ``name = "module:METRICS"``."""

OF_DEVICES: Mapping[str, MetricKind] = devices.OF_DEVICES
"""The figures of one device, named as ``devices.<device>.<figure>``."""


def metrics_of(declared: MetricsSpec) -> dict[str, Metric]:
    """Return the metrics of a run with the given definitions. Raises ValueError for a duplicate name.

    Figures of packages come last, without those whose name the testbed or the method uses.
    """
    figures = by_name([*COMMON.values(), *declared.metrics])
    # A package must not break a method whose metric has the same name.
    for name, figure in _packaged_metrics().items():
        figures.setdefault(name, figure)
    return figures


@cache
def _packaged_metrics() -> Mapping[str, Metric]:
    """Return the figures of installed packages; a broken package is logged, since every run asks for all figures."""
    metrics: dict[str, Metric] = {}
    for point in plugins.installed(GROUP).values():
        try:
            for figure in plugins.load(point, (), _as_metrics):
                safe = replace(figure, compute=partial(_compute_safely, figure))
                metrics.setdefault(figure.name, safe)
        except InputError as error:
            _LOG.warning("%s", error)
    return metrics


def _compute_safely(figure: Metric, record: RunView) -> Any:
    """Compute a package's metric; None on failure, because the run did not choose the package."""
    try:
        return figure.compute(record)
    except Exception as error:  # noqa: BLE001 - a package may raise anything
        _LOG.warning(
            "the metric '%s' of a package is left out: %s: %s",
            figure.name,
            type(error).__name__,
            error,
        )
        return None


def _as_metrics(declared: Any) -> tuple[Metric, ...]:
    figures = tuple(declared) if isinstance(declared, Iterable) else (declared,)
    if not all(isinstance(each, Metric) for each in figures):
        raise TypeError(f"{declared!r} must be a Metric or a tuple of Metrics")
    return figures


def rows_of(declared: MetricsSpec) -> tuple[Row, ...]:
    """Return the summary rows of the report."""
    # The method's rows come between the results and the rows about the run itself.
    common = (*learning.ROWS, *pace.ROWS, *requests.ROWS, *recovery.ROWS)
    return (*common, *declared.rows, *recovery.LAST_ROWS, *course.ROWS, *host.ROWS)


def tables_of(declared: MetricsSpec) -> tuple[Table, ...]:
    """Return the tables of the report."""
    return (phases.TABLE, *declared.tables)


def metric_kind(name: str, figures: Mapping[str, Metric]) -> MetricKind:
    """Return the kind of a metric of a run, device or layer. Raises KeyError for an unknown name.

    >>> metric_kind("devices.worker1.bytes_sent", COMMON), metric_kind("step_time", COMMON)
    ('bytes', 'seconds')
    """
    member = re.fullmatch(r"(\w+)s\.[^.<]+(\.\w+)?", name)
    if member is None:
        return figures[name].kind
    group, last = member[1], member[2] or ""
    # layers.2.dropped is a value of the metric layers.<layer>.dropped.
    declared = f"{group}s.<{group}>{last}"
    if group == "device" and declared not in figures:
        return OF_DEVICES[last.removeprefix(".")]
    return figures[declared].kind
