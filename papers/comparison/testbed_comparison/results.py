"""Runs of a paper's scenarios: which are missing or stale, and their values, kept in ``results.json``."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import testbed
from testbed import InputError, Result
from testbed_comparison.rows import Expression, Figures, Value, terms
from testbed_comparison.words import Ours, measure

FILE = "results.json"
RUNS = Path("results/papers")
PLAN = "plan."
WITHOUT_EFFECT = ("description", "time_limit", "expect")
"""Keys of a scenario that change no run."""
UNMET = 1
"""Exit status of `testbed run` where a condition of the scenario does not hold."""


class Results:
    """The kept results of one system, by scenario.

    >>> results = Results(Path("papers/stahl"))
    >>> results.scenarios["stahl-example"]["date"]
    '2026-11-27'
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / FILE
        self.scenarios: dict[str, Any] = (
            json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        )

    def save(self) -> None:
        """Write ``results.json``."""
        text = json.dumps(
            dict(sorted(self.scenarios.items())), indent=1, ensure_ascii=False
        )
        one_line = re.sub(
            r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text
        )
        (self._folder / FILE).write_text(one_line + "\n", encoding="utf-8")

    def stale(self, figures: Figures) -> list[str]:
        """Return the scenarios that were not run as they are now, or without a value that a row needs."""
        needed: dict[str, set[str]] = {}
        for scenario, value in figures.values():
            needed.setdefault(scenario, set()).add(_key(value))
        return [
            name
            for name, keys in needed.items()
            if not self._is_current(name, keys, figures)
        ]

    def _is_current(self, name: str, keys: set[str], figures: Figures) -> bool:
        found = self.scenarios.get(name)
        if found is None or not keys <= found["values"].keys():
            return False
        return bool(found["digest"] == self.digest(name, figures.changes.get(name, {})))

    def digest(self, name: str, changes: Mapping[str, Any]) -> str:
        """Return a hash of all keys of a scenario that have an effect on its runs."""
        # Only keys that the file sets: a new option with a default must not make every result stale.
        keys = testbed.load(self._file(name), changes).model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
        relevant = {
            key: value for key, value in keys.items() if key not in WITHOUT_EFFECT
        }
        return hashlib.sha256(
            json.dumps(relevant, sort_keys=True).encode()
        ).hexdigest()[:16]

    def _file(self, name: str) -> Path:
        return self._folder / "scenarios" / f"{name}.yaml"

    def prune(self, figures: Figures) -> None:
        """Remove scenarios and values that no row needs any more."""
        needed = {(scenario, _key(value)) for scenario, value in figures.values()}
        names = {scenario for scenario, _ in needed}
        self.scenarios = {
            name: found for name, found in self.scenarios.items() if name in names
        }
        for name, found in self.scenarios.items():
            found["values"] = {
                key: each
                for key, each in found["values"].items()
                if (name, key) in needed
            }

    def ours(
        self, scenario: str, expressions: Sequence[Expression], unit: str
    ) -> Ours | None:
        """Return our value of expressions in a unit; None where a run is missing."""
        used = {
            term.scenario or scenario
            for expression in expressions
            for term in terms(expression)
        }
        if not used <= self.scenarios.keys():
            return None
        is_timing = not any(self.scenarios[name]["trains"] for name in used)
        return measure(
            expressions, unit, self._values_of(scenario), is_timing=is_timing
        )

    def _values_of(self, scenario: str) -> Callable[[Value], Sequence[float | None]]:
        def values(value: Value) -> Sequence[float | None]:
            found: Mapping[str, list[float | None]] = self.scenarios[
                value.scenario or scenario
            ]["values"]
            return found.get(_key(value), ())

        return values

    def run(self, name: str, figures: Figures, *, jobs: int, again: bool) -> None:
        """Simulate a scenario, or resume its runs, and keep its values."""
        changes = figures.changes.get(name, {})
        digest = self.digest(name, changes)
        runs = RUNS / f"{name}-{digest}"
        if again:
            shutil.rmtree(runs, ignore_errors=True)
        run_scenario(self._file(name), changes, runs, "simulate", "--jobs", str(jobs))
        wanted = [value for scenario, value in figures.values() if scenario == name]
        self.scenarios[name] = _record(testbed.open_results(runs), wanted) | {
            "command": shlex.join(compose_command(f"papers/{name}", changes)),
            "digest": digest,
        }


def run_scenario(
    file: Path,
    changes: Mapping[str, Any],
    runs: Path,
    runtime: str,
    *options: str,
) -> None:
    """Run a scenario in a process of its own, or resume its runs in a folder; raises `InputError` if that fails."""
    program = [
        sys.executable,
        "-c",
        "from testbed_controller.cli.main import main; main()",
    ]
    _, *arguments = compose_command(str(file), changes, runtime)
    place = ["--resume" if runs.exists() else "--out", str(runs)]
    command = [*program, *arguments, *place, *options, "--no-events"]
    status = subprocess.run(command, check=False).returncode
    if status not in (0, UNMET):
        raise InputError(
            f"{file.stem}: 'testbed run' failed with exit status {status}; its output names the reason"
        )


def compose_command(
    scenario: str, changes: Mapping[str, Any], runtime: str = "simulate"
) -> list[str]:
    """Return the command that runs a scenario with some keys changed."""
    command = ["testbed", "run", scenario]
    # Containers are the default, which the printed command leaves out.
    if runtime != "emulate":
        command += ["--runtime", runtime]
    for key, value in changes.items():
        command += [
            "--set",
            f"{key}={value if isinstance(value, str) else json.dumps(value)}",
        ]
    return command


def _key(value: Value) -> str:
    at = json.dumps(value.at, sort_keys=True)
    return f"{'least ' if value.least else ''}{value.metric} at {at}"


def _record(results: Sequence[Result], values: Sequence[Value]) -> dict[str, Any]:
    """Return the values and the provenance of a scenario's runs; raises `InputError` for runs that do not count."""
    runs = [result.run for result in results]
    _check(results)
    manifests = [run.manifest for run in runs]
    computing = {
        json.dumps(each)
        for one in manifests
        for each in one["host"].get("computing") or ()
    }
    return {
        "date": manifests[0]["date"][:10],
        "revision": manifests[0]["revision"],
        "computing": [json.loads(each) for each in sorted(computing)],
        "seeds": sorted({each["seed"] for each in manifests}),
        "runs": len(runs),
        "seconds": round(sum(each["wall_seconds"] for each in manifests)),
        "trains": any(run.metrics.get("accuracy") is not None for run in runs),
        "values": {_key(value): _values(results, value) for value in values},
    }


def _check(results: Sequence[Result]) -> None:
    for run in (result.run for result in results):
        if (
            run.outcome.status != "finished"
            or run.metrics["verdict"]["kind"] == "not trusted"
        ):
            raise InputError(
                f"{run.path}: the run did not finish or is not trusted; its report names the reason"
            )


def _values(results: Sequence[Result], value: Value) -> list[float | None]:
    """Return a value for each repetition, in their order; None for a run without it, such as a time never reached."""
    points: dict[str, list[float | None]] = {}
    for result in results:
        if _is_at(result, value):
            numbers = points.setdefault(
                json.dumps(result.run.trial.point, sort_keys=True), []
            )
            # A place for each repetition: pairs of two points must come from the same one.
            numbers.append(metric_of(result, value.metric))
    if value.least:
        return min(filter(_numbers, points.values()), key=_mean, default=[])
    if len(points) != 1:
        raise InputError(
            f"{value.metric} at {value.at}: {len(points)} points of the sweep match; name exactly one"
        )
    return next(iter(points.values()))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [number for number in values if number is not None]


def _mean(values: Sequence[float | None]) -> float:
    return fmean(_numbers(values))


def _is_at(result: Result, value: Value) -> bool:
    return all(
        _swept(result.run.trial.point, key) == wanted
        for key, wanted in value.at.items()
    )


def _swept(point: Mapping[str, Any], key: str) -> Any:
    """Return the value of a swept key, or of a key inside a swept value."""
    for swept, value in point.items():
        if isinstance(value, Mapping) and value.keys() == {"label", "value"}:
            value = value["value"]
        if key == swept:
            return value
        if key.startswith(f"{swept}.") and isinstance(value, Mapping):
            return _swept(value, key.removeprefix(f"{swept}."))
    return None


def metric_of(result: Result, name: str) -> float | None:
    """Return a metric of a run by its name as in `expect`, or ``plan.`` and a dotted key of the plan's details."""
    run = result.run
    tree: Any = (
        run.plan.details.model_dump(mode="json")
        if name.startswith(PLAN)
        else run.metrics
    )
    for key in name.removeprefix(PLAN).split("."):
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        else:
            tree = (
                tree[int(key)]
                if isinstance(tree, list) and int(key) < len(tree)
                else None
            )
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return None
    return float(f"{tree:.9g}")
