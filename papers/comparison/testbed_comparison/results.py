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
            needed.setdefault(scenario, set()).add(_value_key(value))
        stale = []
        for name, keys in needed.items():
            if not self._is_current(name, keys, figures):
                stale.append(name)
        return stale

    def _is_current(self, name: str, keys: set[str], figures: Figures) -> bool:
        kept = self.scenarios.get(name)
        if kept is None or not keys <= kept["values"].keys():
            return False
        return bool(kept["digest"] == self.digest(name, figures.changes.get(name, {})))

    def digest(self, name: str, changes: Mapping[str, Any]) -> str:
        """Return a hash of all keys of a scenario that have an effect on its runs."""
        # Only keys that the file sets: a new option with a default must not make every result stale.
        keys = testbed.load(self._file(name), changes).model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
        for key in WITHOUT_EFFECT:
            keys.pop(key, None)
        text = json.dumps(keys, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _file(self, name: str) -> Path:
        return self._folder / "scenarios" / f"{name}.yaml"

    def prune(self, figures: Figures) -> None:
        """Remove scenarios and values that no row needs any more."""
        needed: dict[str, set[str]] = {}
        for scenario, value in figures.values():
            needed.setdefault(scenario, set()).add(_value_key(value))
        for name in self.scenarios.keys() - needed.keys():
            del self.scenarios[name]
        for name, kept in self.scenarios.items():
            for key in kept["values"].keys() - needed[name]:
                del kept["values"][key]

    def ours(
        self, scenario: str, expressions: Sequence[Expression], unit: str
    ) -> Ours | None:
        """Return our value of expressions in a unit; None where a run is missing."""
        used: set[str] = set()
        for expression in expressions:
            used.update(term.scenario or scenario for term in terms(expression))
        if not used <= self.scenarios.keys():
            return None
        is_timing = not any(self.scenarios[name]["trains"] for name in used)
        return measure(
            expressions, unit, self._values_of(scenario), is_timing=is_timing
        )

    def _values_of(self, scenario: str) -> Callable[[Value], Sequence[float | None]]:
        def values(value: Value) -> Sequence[float | None]:
            kept = self.scenarios[value.scenario or scenario]
            numbers: Sequence[float | None] = kept["values"].get(_value_key(value), ())
            return numbers

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
        record = _record_runs(testbed.open_results(runs), wanted)
        record["command"] = shlex.join(compose_command(f"papers/{name}", changes))
        record["digest"] = digest
        self.scenarios[name] = record


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
    """Return the command that runs a scenario with some keys changed.

    >>> shlex.join(compose_command("papers/stahl-table-1", {"workload.numerics": "none"}))
    'testbed run papers/stahl-table-1 --runtime simulate --set workload.numerics=none'
    """
    command = ["testbed", "run", scenario]
    # Containers are the default, which the printed command leaves out.
    if runtime != "emulate":
        command += ["--runtime", runtime]
    for key, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        command += ["--set", f"{key}={text}"]
    return command


def _value_key(value: Value) -> str:
    at = json.dumps(value.at, sort_keys=True)
    return f"{'minimum ' if value.minimum else ''}{value.metric} at {at}"


def _record_runs(results: Sequence[Result], values: Sequence[Value]) -> dict[str, Any]:
    """Return the values and the provenance of a scenario's runs; raises `InputError` for runs that do not count."""
    for result in results:
        _check_run(result)
    runs = [result.run for result in results]
    manifests = [run.manifest for run in runs]
    computing: set[str] = set()
    for manifest in manifests:
        processors = manifest["host"].get("computing") or ()
        computing.update(json.dumps(processor) for processor in processors)
    return {
        "date": manifests[0]["date"][:10],
        "revision": manifests[0]["revision"],
        "computing": [json.loads(each) for each in sorted(computing)],
        "seeds": sorted({each["seed"] for each in manifests}),
        "runs": len(runs),
        "seconds": round(sum(each["wall_seconds"] for each in manifests)),
        "trains": any(run.metrics.get("accuracy") is not None for run in runs),
        "values": {_value_key(value): _values_at(results, value) for value in values},
    }


def _check_run(result: Result) -> None:
    run = result.run
    is_trusted = run.metrics["verdict"]["kind"] != "not trusted"
    if run.outcome.status != "finished" or not is_trusted:
        raise InputError(
            f"{run.path}: the run did not finish or is not trusted; its report names the reason"
        )


def _values_at(results: Sequence[Result], value: Value) -> list[float | None]:
    """Return a value for each repetition, in their order; None for a run without it, such as a time never reached."""
    points: dict[str, list[float | None]] = {}
    for result in results:
        if _is_at(result, value):
            point = json.dumps(result.run.trial.point, sort_keys=True)
            numbers = points.setdefault(point, [])
            # A place for each repetition: pairs of two points must come from the same one.
            numbers.append(metric_of(result, value.metric))
    if value.minimum:
        return min(filter(_numbers_in, points.values()), key=_mean_of, default=[])
    if len(points) != 1:
        raise InputError(
            f"{value.metric} at {value.at}: {len(points)} points of the sweep match; name exactly one"
        )
    return next(iter(points.values()))


def _numbers_in(values: Sequence[float | None]) -> list[float]:
    return [number for number in values if number is not None]


def _mean_of(values: Sequence[float | None]) -> float:
    return fmean(_numbers_in(values))


def _is_at(result: Result, value: Value) -> bool:
    return all(
        _swept_value(result.run.trial.point, key) == wanted
        for key, wanted in value.at.items()
    )


def _swept_value(point: Mapping[str, Any], key: str) -> Any:
    """Return the value of a swept key, or of a key inside a swept value."""
    for swept, value in point.items():
        if isinstance(value, Mapping) and value.keys() == {"label", "value"}:
            value = value["value"]
        if key == swept:
            return value
        if key.startswith(f"{swept}.") and isinstance(value, Mapping):
            return _swept_value(value, key.removeprefix(f"{swept}."))
    return None


def metric_of(result: Result, name: str) -> float | None:
    """Return a metric of a run by its name as in `expect`, or ``plan.`` and a dotted key of the plan's details."""
    run = result.run
    value: Any = run.metrics
    if name.startswith(PLAN):
        value = run.plan.details.model_dump(mode="json")
    for key in name.removeprefix(PLAN).split("."):
        value = _child(value, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Nine digits are more than any page shows; further ones differ between builds of torch.
    return float(f"{value:.9g}")


def _child(tree: Any, key: str) -> Any:
    """Return an element of a mapping or a list; None where it is missing."""
    if isinstance(tree, Mapping):
        return tree.get(key)
    if isinstance(tree, list) and int(key) < len(tree):
        return tree[int(key)]
    return None
