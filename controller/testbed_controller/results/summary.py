"""Summary of sweeps and repetitions: mean and 95 % confidence interval of every metric at every point."""

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
    """Write ``summary.json`` and ``summary.csv`` of the runs in a folder; return their `summary_of`."""
    summary = summary_of(runs)
    text = json.dumps(finite(summary), indent=2, default=str)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    write_csv(folder / "summary.csv", _summary_rows(summary))
    return summary


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the summary of runs of one scenario; events are not required.

    ``metrics`` contains ``kind`` and ``brief`` of each metric by name (`testbed.trace.metrics_spec.Metric`). ``points``
    has one entry for each point of the sweep, in the order of the runs: ``point``, ``runs`` (folder names), ``trusted``
    (the number of trusted runs), ``metrics`` by name, each with ``mean``, ``ci95`` (half width) and ``n``.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.point, []).append(run)
    points = [_summarize_point(group) for group in groups.values()]
    # Only metrics with a number: a text, such as a verdict, has no mean.
    present: set[str] = set()
    for point in points:
        present |= point["metrics"].keys()
    descriptions = {}
    for name, metric in all_metrics(runs).items():
        if name in present:
            descriptions[name] = {"kind": metric.kind, "brief": metric.brief}
    return {
        "scenario": runs[0].trial.scenario.name if runs else "",
        "confidence": CONFIDENCE,
        "metrics": descriptions,
        "points": points,
    }


def _summarize_point(group: Sequence[Run]) -> dict[str, Any]:
    return {
        "point": group[0].trial.point,
        "runs": [run.path.name for run in group],
        "trusted": sum(bool(run.metrics["trusted"]) for run in group),
        "metrics": _summarize_metrics(group),
    }


def _summarize_metrics(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    table = {}
    for name in all_metrics(runs):
        numbers = []
        for run in runs:
            value = metric_value(run.metrics, name)
            if is_number(value):
                numbers.append(value)
        if numbers:
            mean, half_width = interval(numbers)
            table[name] = {"mean": mean, "ci95": half_width, "n": len(numbers)}
    return table


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number. Booleans are not, although Python counts them as integers.

    >>> is_number(0.5), is_number(True), is_number(None)
    (True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def _summary_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each point: the swept keys, then mean and half width of each metric."""
    points = summary["points"]
    keys: dict[str, None] = {}
    for point in points:
        keys |= dict.fromkeys(point["point"])
    for point in points:
        row: Row = {}
        for key in keys:
            value = point["point"].get(key)
            row[key] = value_label(value) or value
        row["runs"] = len(point["runs"])
        row["trusted"] = point["trusted"]
        for name, metric in point["metrics"].items():
            row[name] = metric["mean"]
            row[f"{name}_ci95"] = metric["ci95"]
        yield row
