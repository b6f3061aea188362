"""Sweeps and repetitions: mean and 95 % confidence interval of every figure at every point."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from controller.results.run import Run
from testbed.trace.figures import Figure
from testbed.trace.metrics import finite

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half width of its confidence interval after Student.

    The half width is None for a single value, which says nothing of its spread. Raises ValueError for none.
    """
    if not values:
        raise ValueError("no values to take a mean of")
    if len(values) == 1:
        return values[0], None
    # Here, not above: a single run has no need of it, and it takes a second to import.
    from scipy import stats

    return fmean(values), float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))


def summarize(folder: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Write ``summary.json`` and ``summary.csv`` over the runs in a folder; return `summary_of` them."""
    summary = summary_of(runs)
    (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2, default=str) + "\n", encoding="utf-8")
    _write_csv(folder / "summary.csv", summary)
    return summary


def summary_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the summary of runs of one scenario, whose events are not needed.

    ``figures`` says of each by name its ``kind`` and whether it is ``brief`` (`testbed.trace.figures.Figure`).
    ``points`` has one entry a point of the sweep, in the order of the runs: ``point``, ``runs`` (folder names),
    ``trusted`` (how many of them), ``figures`` by name, each with ``mean``, ``ci95`` (half width) and ``n``.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.point, []).append(run)
    points: list[dict[str, Any]] = [
        {
            "point": group[0].trial.point,
            "runs": [run.path.name for run in group],
            "trusted": sum(bool(run.metrics["trusted"]) for run in group),
            "figures": _figures(group),
        }
        for group in groups.values()
    ]
    name = runs[0].trial.scenario.name if runs else ""
    about = {
        name: {"kind": figure.kind, "brief": figure.brief}
        for name, figure in all_figures(runs).items()
        if any(name in point["figures"] for point in points)
    }
    return {"scenario": name, "confidence": CONFIDENCE, "figures": about, "points": points}


def _figures(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    table = {}
    for name in all_figures(runs):
        values = [run.metrics[name] for run in runs if _is_number(run.metrics.get(name))]
        if values:
            mean, half = interval(values)
            table[name] = {"mean": mean, "ci95": half, "n": len(values)}
    return table


def all_figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return the figures that any of these runs may have, by name."""
    return {name: figure for run in runs for name, figure in run.figures.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write_csv(path: Path, summary: Mapping[str, Any]) -> None:
    """Write one line a point: the swept keys, then mean and half width of each figure."""
    points = summary["points"]
    keys = list(dict.fromkeys(key for point in points for key in point["point"]))
    names = list(dict.fromkeys(name for point in points for name in point["figures"]))
    heads = [head for name in names for head in (name, f"{name}_ci95")]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([*keys, "runs", "trusted", *heads])
        for point in points:
            row = [point["point"].get(key, "") for key in keys]
            row += [len(point["runs"]), point["trusted"]]
            for name in names:
                figure = point["figures"].get(name, {})
                row += ["" if figure.get(part) is None else figure[part] for part in ("mean", "ci95")]
            table.writerow(row)
