"""The registry of metrics: those of every run, of a method, and of installed packages.

``declared`` is in all functions the `MetricsSpec` of a method and its workload.
"""

from __future__ import annotations

import logging
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
"""Entry points under which an installed package adds metrics to every run: ``name = "module:METRICS"``."""

OF_DEVICES: Mapping[str, devices.DeviceMetric] = devices.OF_DEVICES
"""The metrics of one device, named as ``devices.<device>.<metric>``."""


def metrics_of(declared: MetricsSpec) -> dict[str, Metric]:
    """Return all metrics of a run by name. Raises ValueError for a duplicate name.

    Metrics of packages come last; a name of the testbed or of the method has priority over that of a package.
    """
    metrics = by_name([*COMMON.values(), *declared.metrics])
    _check_keys(declared, metrics)
    # A package must not break a method that has a metric of the same name.
    for name, metric in _packaged_metrics().items():
        metrics.setdefault(name, metric)
    return metrics


RESERVED = {
    "runtime",
    "error",
    "weights",
    "series",
    "devices",
    "links",
    "fault_list",
    "recovery_list",
    "phase_list",
    "verdict",
}
"""Keys of ``metrics.json`` that every run has in addition to its metrics."""


def _check_keys(declared: MetricsSpec, metrics: Mapping[str, Metric]) -> None:
    """Raise ValueError for a name already used in ``metrics.json``."""
    for metric in declared.metrics:
        if metric.name in RESERVED:
            raise ValueError(
                f"the metric '{metric.name}' has the name of a part of metrics.json: rename the metric"
            )
    # The key of the metric layers.<layer>.dropped is layers.
    used_keys = RESERVED | {name.partition(".")[0] for name in metrics}
    for name in declared.lists or ():
        if name in used_keys:
            raise ValueError(
                f"the list '{name}' has the name of a metric or of a part of metrics.json: rename the list"
            )


@cache
def _packaged_metrics() -> Mapping[str, Metric]:
    """Return the metrics of installed packages; errors of a package are only logged, since every run is affected."""
    metrics: dict[str, Metric] = {}
    for point in plugins.installed(GROUP).values():
        try:
            for metric in plugins.load(point, (), _as_metrics):
                safe = replace(metric, compute=partial(_compute_safely, metric))
                metrics.setdefault(metric.name, safe)
        except InputError as error:
            _LOG.warning("%s", error)
    return metrics


def _compute_safely(metric: Metric, record: RunView) -> Any:
    """Compute a package's metric; None on failure, because the run did not choose the package."""
    try:
        return metric.compute(record)
    except Exception as error:  # noqa: BLE001 - a package may raise anything
        _LOG.warning(
            "the metric '%s' of a package is left out: %s: %s",
            metric.name,
            type(error).__name__,
            error,
        )
        return None


def _as_metrics(declared: Any) -> tuple[Metric, ...]:
    metrics = tuple(declared) if isinstance(declared, Iterable) else (declared,)
    if not all(isinstance(each, Metric) for each in metrics):
        raise TypeError(f"{declared!r} must be a Metric or a tuple of Metrics")
    return metrics


def rows_of(declared: MetricsSpec) -> tuple[Row, ...]:
    """Return the summary rows of the report."""
    # The method's rows come between those of the results and those of the run itself.
    common = (*learning.ROWS, *pace.ROWS, *requests.ROWS, *recovery.ROWS)
    return (*common, *declared.rows, *recovery.LAST_ROWS, *course.ROWS, *host.ROWS)


def tables_of(declared: MetricsSpec) -> tuple[Table, ...]:
    """Return the tables of the report, the method's last."""
    return (phases.TABLE, *declared.tables)


def metric_kind(name: str, metrics: Mapping[str, Metric]) -> MetricKind:
    """Return the kind of a metric of a run, device or layer. Raises KeyError for an unknown name.

    >>> metric_kind("devices.worker1.bytes_sent", COMMON), metric_kind("step_time", COMMON)
    ('bytes', 'seconds')
    """
    if name in metrics:
        return metrics[name].kind
    for metric in metrics.values():
        if is_member(name, metric.name):
            return metric.kind
    last = name.rpartition(".")[2]
    if is_member(name, f"devices.<device>.{last}"):
        return OF_DEVICES[last].kind
    raise KeyError(name)


def is_member(name: str, grouped: str) -> bool:
    """Return whether a name matches the name of a metric with a placeholder.

    >>> is_member("layers.2.dropped", "layers.<layer>.dropped"), is_member("metrics.f1", "metrics.<metric>")
    (True, True)
    """
    parts = name.split(".")
    pattern = grouped.split(".")
    if len(parts) != len(pattern) or "<" not in grouped:
        return False
    for part, expected in zip(parts, pattern, strict=True):
        is_placeholder = expected.startswith("<") and expected.endswith(">")
        if part != expected and not is_placeholder:
            return False
    return True
