"""Runs side by side: their figures, ratios to the first, and in what their scenarios differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.results.run import Run
from controller.results.summary import all_figures

UNIMPORTANT = ("description", "expect", "time_limit", "repetitions", "sweep", "points", "paper", "network.subnet")
"""Keys of a scenario that change no figure."""
TWO_CLOCKS = 0.10
"""Step times of an emulated and a simulated run of one scenario should agree within this share."""


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the comparison of runs as plain JSON values.

    ``runs``: path, label, runtime, verdict, status; ``figures``: name, kind, about, values (one a run, None where
    absent) and ratios to the first run; ``devices``: per device the share of each activity in every run;
    ``differences``: dotted key of the scenario -> values; ``warnings``: differences that nobody asked for, runs not
    trusted; ``clocks``:
    what the two runtimes say of one scenario, or None.
    """
    labels = _labels(runs)
    plain = [dict(_flat(run.trial.scenario.model_dump(mode="json", by_alias=True, exclude_none=True))) for run in runs]
    differences = _differences(plain)
    swept = {key for run in runs for key in run.trial.point}
    return {
        "runs": [
            {
                "path": str(run.path),
                "label": label,
                "runtime": run.outcome.runtime,
                "status": run.outcome.status,
                "verdict": run.metrics["verdict"]["kind"],
            }
            for run, label in zip(runs, labels, strict=True)
        ],
        "figures": list(_figures(runs)),
        "devices": _devices(runs),
        "differences": differences,
        "warnings": list(_warnings(runs, labels, differences, swept)),
        "clocks": _clocks(runs, differences),
    }


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return short names that tell the runs apart: of the runs of one sweep, only where they differ."""
    names = [run.path.name for run in runs]
    while all("," in name for name in names) and len({name.partition(",")[0] for name in names}) == 1 < len(names):
        names = [name.partition(",")[2] for name in names]
    if len(set(names)) == len(names):
        return names
    return [f"{number} {name}" for number, name in enumerate(names, 1)]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))


def _differences(plain: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = list(dict.fromkeys(key for one in plain for key in one))
    return {
        key: [one.get(key) for one in plain]
        for key in keys
        if not any(key == other or key.startswith(f"{other}.") for other in UNIMPORTANT)
        and len({repr(one.get(key)) for one in plain}) > 1
    }


def _figures(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    for name, figure in all_figures(runs).items():
        values = [run.metrics.get(name) for run in runs]
        if figure.compared and any(value is not None for value in values):
            yield {
                "name": name,
                "kind": figure.kind,
                "about": figure.meaning,
                "values": values,
                "ratios": [_ratio(value, values[0]) for value in values],
            }


def _ratio(value: float | None, first: float | None) -> float | None:
    return None if value is None or not first else value / first


def _devices(runs: Sequence[Run]) -> dict[str, list[dict[str, float] | None]]:
    names = list(dict.fromkeys(name for run in runs for name in run.metrics["devices"]))
    parts = ("compute", "communicate", "down", "idle")
    return {
        name: [
            {part: run.metrics["devices"][name][f"{part}_share"] for part in parts}
            if name in run.metrics["devices"]
            else None
            for run in runs
        ]
        for name in names
    }


def _warnings(
    runs: Sequence[Run], labels: Sequence[str], differences: Mapping[str, Sequence[Any]], swept: set[str]
) -> Iterator[str]:
    # Repetitions differ in their seeds by intention, points of a sweep in what is swept.
    repeated = len({run.trial.repetition for run in runs}) > 1
    for key, values in differences.items():
        asked = any(key == other or key.startswith(f"{other}.") for other in swept) or (key == "seed" and repeated)
        if not asked:
            shown = " | ".join("–" if value is None else str(value) for value in values)
            yield f"the scenarios differ in {key}: {shown}"
    for run, label in zip(runs, labels, strict=True):
        if not run.metrics["trusted"]:
            yield f"{label} is not trusted: {run.metrics['verdict']['summary']}"
    revisions = {run.manifest.get("revision") for run in runs}
    if len(revisions) > 1:
        yield "the runs were made by different revisions of the testbed"


def _clocks(runs: Sequence[Run], differences: Mapping[str, Any]) -> dict[str, Any] | None:
    """Hold the first emulated run against the first simulated one, when they ran the same scenario."""
    found: dict[str, Run] = {}
    for run in runs:
        if run.metrics.get("step_time", run.metrics.get("latency")) is not None:
            found.setdefault(run.outcome.runtime, run)
    if len(found) < 2 or any(key != "name" for key in differences):
        return None
    figure = "step_time" if "step_time" in found["emulate"].metrics else "latency"
    emulated, simulated = found["emulate"].metrics.get(figure), found["simulate"].metrics.get(figure)
    if emulated is None or not simulated:
        return None
    ratio = emulated / simulated
    return {
        "figure": figure,
        "emulated": emulated,
        "simulated": simulated,
        "ratio": ratio,
        "agree": abs(ratio - 1) <= TWO_CLOCKS,
    }
