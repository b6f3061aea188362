"""Summary of a sweep or of repetitions: mean and 95 % confidence interval of every metric at every point.

A point is one combination of the swept values; its repetitions differ in the seed. A run without a sweep has one point,
an empty mapping.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from testbed.common.intervals import CONFIDENCE, interval
from testbed.scenario.points import value_label
from testbed.trace.events import finite
from testbed_controller.results.available import all_metrics, metric_value
from testbed_controller.results.rows import Row, write_csv
from testbed_controller.results.run import Run


def summarize(folder: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Write ``summary.json`` and ``summary.csv`` into the folder of the runs; return the result of `summary_of`."""
    summary = summary_of(runs)
    text = json.dumps(finite(summary), indent=2, default=str)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    write_csv(folder / "summary.csv", _csv_rows(summary))
    return summary


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the content of ``summary.json`` for the runs of one scenario, which need no events.

    ``scenario``: name of the scenario. ``confidence``: level of the intervals, as a share. ``metrics``: ``kind`` and
    ``brief`` of each metric by name (`testbed.trace.metrics_spec.Metric`).

    ``points``: one entry for each point, in the order of the runs, with its swept values (``point``), the folder names
    of its ``runs``, the number of ``trusted`` runs, and ``metrics`` by name, each with ``mean``, ``ci95`` (the half
    width of the interval; None for a single run) and ``n`` (the number of runs that have the metric).
    """
    runs_at_point: dict[str, list[Run]] = {}
    for run in runs:
        runs_at_point.setdefault(run.point, []).append(run)
    points = [_summarize_point(group) for group in runs_at_point.values()]
    # Only metrics whose values are numbers have a mean; the verdict, for example, is a text.
    numeric_names: set[str] = set()
    for point in points:
        numeric_names |= point["metrics"].keys()
    descriptions = {}
    for name, metric in all_metrics(runs).items():
        if name in numeric_names:
            descriptions[name] = {"kind": metric.kind, "brief": metric.brief}
    return {
        "scenario": runs[0].trial.scenario.name if runs else "",
        "confidence": CONFIDENCE,
        "metrics": descriptions,
        "points": points,
    }


def _summarize_point(repetitions: Sequence[Run]) -> dict[str, Any]:
    return {
        "point": repetitions[0].trial.point,
        "runs": [run.path.name for run in repetitions],
        "trusted": sum(bool(run.metrics["trusted"]) for run in repetitions),
        "metrics": _summarize_metrics(repetitions),
    }


def _summarize_metrics(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    statistics = {}
    for name in all_metrics(runs):
        numbers = []
        for run in runs:
            value = metric_value(run.metrics, name)
            if is_number(value):
                numbers.append(value)
        if numbers:
            mean, half_width = interval(numbers)
            statistics[name] = {"mean": mean, "ci95": half_width, "n": len(numbers)}
    return statistics


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number other than a boolean, which Python counts as an integer.

    >>> is_number(0.5), is_number(True), is_number(None)
    (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def _csv_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each point: swept values, numbers of runs, then mean and half width of each metric."""
    points = summary["points"]
    # A dictionary rather than a set, to keep the order of the keys. Points may have different keys.
    swept_keys: dict[str, None] = {}
    for point in points:
        swept_keys |= dict.fromkeys(point["point"])
    for point in points:
        row: Row = {}
        for key in swept_keys:
            value = point["point"].get(key)
            row[key] = value_label(value) or value
        row["runs"] = len(point["runs"])
        row["trusted"] = point["trusted"]
        for name, statistics in point["metrics"].items():
            row[name] = statistics["mean"]
            row[f"{name}_ci95"] = statistics["ci95"]
        yield row
