"""Results of a paper's scenarios in ``results.json``: missing and stale scenarios, runs, and values of metrics."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import testbed
from testbed import InputError, Result
from testbed.common.errors import DivergedError
from testbed.scenario.expand import trials
from testbed_comparison.rows import Expression, Figures, Value, terms
from testbed_comparison.words import Ours, measure

RESULTS_FILE = "results.json"
RUNS = Path("results/papers")
"""Folder of all runs, relative to the working directory."""
PLAN_PREFIX = "plan."
"""Prefix of values that come from the details of the plan instead of the metrics."""
WITHOUT_EFFECT = ("description", "time_limit", "expect")
"""Keys of a scenario without an effect on the values of its runs."""
INNERMOST_LIST = re.compile(r"\[[^\[\]{}]*\]")
"""A list in JSON text without lists or objects inside, such as the numbers of a value or the seeds."""
UNMET = 1
"""Exit status of `testbed run` if an expectation does not hold, but also after a failed run and after a crash."""
ENDED = (0, UNMET, DivergedError.exit_code)
"""Exit statuses after which runs may have values; training that diverges is a result of the method as well."""


class Results:
    """The kept results of one paper, by scenario.

    >>> results = Results(Path("papers/stahl"))
    >>> results.scenarios["stahl-example"]["date"]
    '2026-11-27'
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.scenarios: dict[str, Any] = {}
        file = folder / RESULTS_FILE
        if file.is_file():
            self.scenarios = json.loads(file.read_text(encoding="utf-8"))

    def save(self) -> None:
        """Write ``results.json``, with each innermost list on one line."""
        in_order = dict(sorted(self.scenarios.items()))
        text = json.dumps(in_order, indent=1, ensure_ascii=False)
        text = INNERMOST_LIST.sub(lambda match: " ".join(match[0].split()), text)
        (self._folder / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")

    def stale(self, figures: Figures) -> list[str]:
        """Return the scenarios to run: without results, with other conditions, or without a needed value."""
        stale = []
        for name, value_keys in _needed_values(figures).items():
            if not self._is_current(name, value_keys, figures):
                stale.append(name)
        return stale

    def _is_current(self, name: str, value_keys: set[str], figures: Figures) -> bool:
        kept = self.scenarios.get(name)
        if kept is None or not value_keys <= kept["values"].keys():
            return False
        changes = figures.changes.get(name, {})
        digest = self.digest(name, changes)
        return bool(kept["digest"] == digest)

    def digest(self, name: str, changes: Mapping[str, Any]) -> str:
        """Return a hash of all keys of a scenario with an effect on the runs."""
        scenario = testbed.load(self._file(name), changes)
        # Only keys that the file sets: a new option with a default must not make every result stale.
        content = scenario.model_dump(mode="json", by_alias=True, exclude_unset=True)
        for key in WITHOUT_EFFECT:
            content.pop(key, None)
        # The order of keys in a file means nothing.
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode())
        return digest.hexdigest()[:16]

    def _file(self, name: str) -> Path:
        return self._folder / "scenarios" / f"{name}.yaml"

    def prune(self, figures: Figures) -> None:
        """Remove scenarios and values that neither a row nor a trial of ``sensitivity`` in ``figures.yaml`` uses."""
        needed = _needed_values(figures)
        # The difference is a new set, so that entries can be removed meanwhile.
        for name in self.scenarios.keys() - needed.keys():
            del self.scenarios[name]
        for name, kept in self.scenarios.items():
            for key in kept["values"].keys() - needed[name]:
                del kept["values"][key]

    def ours(
        self, scenario: str, expressions: Sequence[Expression], unit: str
    ) -> Ours | None:
        """Return our value of one expression, or the range of the values of several; None if a run is missing.

        ``scenario`` is the scenario of all values without a scenario of their own.
        """
        used: set[str] = set()
        for expression in expressions:
            for term in terms(expression):
                used.add(term.scenario or scenario)
        if not used <= self.scenarios.keys():
            return None

        def numbers_of(value: Value) -> Sequence[float | None]:
            kept = self.scenarios[value.scenario or scenario]
            key = _value_key(value)
            numbers: Sequence[float | None] = kept["values"].get(key, ())
            return numbers

        trains = any(self.scenarios[name]["trains"] for name in used)
        # Without training, the runs compute only times and sizes, which are equal in every run.
        return measure(expressions, unit, numbers_of, is_timing=not trains)

    def failed_runs(self, name: str) -> int:
        """Return the number of kept runs of a scenario that the method ended with an error."""
        return int(self.scenarios.get(name, {}).get("failed", 0))

    def run(self, name: str, figures: Figures, *, jobs: int, again: bool) -> None:
        """Simulate a scenario and store its values.

        Runs that an interrupted command has finished are kept, unless ``again`` is set. ``jobs`` runs are simulated at
        a time. Raises `InputError` if a run is missing, did not finish or is not trusted.
        """
        changes = figures.changes.get(name, {})
        digest = self.digest(name, changes)
        # With the digest, runs under other conditions are not taken for parts of this one.
        runs = RUNS / f"{name}-{digest}"
        if again:
            shutil.rmtree(runs, ignore_errors=True)
        run_scenario(self._file(name), changes, runs, "simulate", "--jobs", str(jobs))
        expected = len(trials(testbed.load(self._file(name), changes)))
        results = testbed.open_results(runs)
        # A crash between two runs has the exit status of an unmet expectation, and leaves a part of the sweep.
        if len(results) != expected:
            raise InputError(
                f"{runs}: {len(results)} of {expected} runs exist: run the command again to resume"
            )
        wanted = []
        for scenario, value in figures.values():
            if scenario == name:
                wanted.append(value)
        record = _record_runs(results, wanted)
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
    """Run a scenario in a new process, or resume the runs in a folder.

    Raises `InputError` for an exit status outside `ENDED`. Since a crash has the status `UNMET`, the caller checks
    that all runs exist and have finished.
    """
    # By the interpreter, since the command `testbed` need not be on the path.
    start = "from testbed_controller.cli.main import main; main()"
    _, *arguments = compose_command(str(file), changes, runtime)
    place = ["--resume" if runs.exists() else "--out", str(runs)]
    command = [sys.executable, "-c", start, *arguments, *place, *options]
    # Events take most of the space, and all values come from metrics and plans.
    command.append("--no-events")
    status = subprocess.run(command, check=False).returncode
    if status not in ENDED:
        raise InputError(
            f"{file.stem}: 'testbed run' failed with exit status {status}; its output names the reason"
        )


def compose_command(
    scenario: str, changes: Mapping[str, Any], runtime: str = "simulate"
) -> list[str]:
    """Return the command for running a scenario with some keys changed.

    >>> shlex.join(compose_command("papers/stahl-table-1", {"workload.numerics": "none"}))
    'testbed run papers/stahl-table-1 --runtime simulate --set workload.numerics=none'
    """
    command = ["testbed", "run", scenario]
    # Containers are the default, so the printed command is shorter without the option.
    if runtime != "emulate":
        command += ["--runtime", runtime]
    for key, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        command += ["--set", f"{key}={text}"]
    return command


def _needed_values(figures: Figures) -> dict[str, set[str]]:
    """Return the keys of all values used by rows and by trials of ``sensitivity``, by scenario."""
    needed: dict[str, set[str]] = {}
    for scenario, value in figures.values():
        keys = needed.setdefault(scenario, set())
        keys.add(_value_key(value))
    return needed


def _value_key(value: Value) -> str:
    """Return the key of a value in ``results.json``."""
    at = json.dumps(value.at, sort_keys=True)
    key = f"{value.metric} at {at}"
    if value.key:
        return f"{value.key} of minimum {key}"
    return f"minimum {key}" if value.minimum else key


def _record_runs(results: Sequence[Result], values: Sequence[Value]) -> dict[str, Any]:
    """Return values and provenance of a scenario's runs; raises `InputError` for unfinished or untrusted runs.

    Date and revision are those of the first run, even if later runs were resumed on another day.
    """
    manifests = []
    seeds = set()
    seconds = 0.0
    trains = False
    for result in results:
        _check_run(result)
        manifest = result.run.manifest
        manifests.append(manifest)
        seeds.add(manifest["seed"])
        seconds += manifest["wall_seconds"]
        # A run that trains has an accuracy; a run that computes only times and sizes has none.
        trains = trains or result.run.metrics.get("accuracy") is not None
    kept = {}
    for value in values:
        kept[_value_key(value)] = _values_at(results, value)
    first = manifests[0]
    return {
        "date": first["date"][:10],
        "revision": first["revision"],
        "computing": _computing_of(manifests),
        "seeds": sorted(seeds),
        "runs": len(manifests),
        "failed": sum(map(_has_failed, results)),
        "seconds": round(seconds),
        "trains": trains,
        "values": kept,
    }


def _computing_of(manifests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the different entries of ``computing`` in the manifests: a processor and its version of torch."""
    # As text, since a dictionary cannot be a member of a set.
    texts: set[str] = set()
    for manifest in manifests:
        for entry in manifest["host"].get("computing") or ():
            texts.add(json.dumps(entry))
    return [json.loads(text) for text in sorted(texts)]


def _has_failed(result: Result) -> bool:
    """Return whether the method ended a run with an error, which is a result of the method."""
    return bool(result.run.outcome.status == "failed")


def _check_run(result: Result) -> None:
    run = result.run
    if _has_failed(result):
        return
    is_trusted = run.metrics["verdict"]["kind"] != "not trusted"
    if run.outcome.status != "finished" or not is_trusted:
        raise InputError(
            f"{run.path}: the run did not finish or is not trusted; its report names the reason"
        )


def _values_at(results: Sequence[Result], value: Value) -> list[float | None]:
    """Return the metric of each repetition in order; None for a run without the metric, such as a time not reached."""
    points: dict[str, list[float | None]] = {}
    for result in results:
        if not _is_at(result, value):
            continue
        point = json.dumps(result.run.trial.point, sort_keys=True)
        numbers = points.setdefault(point, [])
        # Each repetition has an entry: both values of a ratio must come from the same repetition.
        # A failed run has no value, since it ended early and is not comparable with whole runs.
        failed = _has_failed(result)
        numbers.append(None if failed else metric_of(result, value.metric))
    if not points:
        raise InputError(
            f"{value.metric} at {value.at}: 0 points of the sweep match; correct 'at'"
        )
    if value.minimum:
        return _values_at_minimum(points, value.key)
    if len(points) != 1:
        raise InputError(
            f"{value.metric} at {value.at}: {len(points)} points of the sweep match; name exactly one"
        )
    return next(iter(points.values()))


def _values_at_minimum(
    points: Mapping[str, list[float | None]], key: str
) -> list[float | None]:
    """Return the numbers of the point with the least mean; with a key, the swept value of this key at that point.

    ``points`` has the numbers of each repetition by point, as JSON. The result is empty if no run has a number.
    """
    means: dict[str, float] = {}
    for point, numbers in points.items():
        if _numbers_in(numbers):
            means[point] = fmean(_numbers_in(numbers))
    if not means:
        return []
    best = min(means, key=means.__getitem__)
    if not key:
        return points[best]
    return [float(_swept_value(json.loads(best), key))]


def _numbers_in(values: Sequence[float | None]) -> list[float]:
    """Return the values of those repetitions that have a value."""
    return [number for number in values if number is not None]


def _is_at(result: Result, value: Value) -> bool:
    """Return whether a run belongs to the point of the sweep named by a value."""
    point = result.run.trial.point
    return all(_swept_value(point, key) == wanted for key, wanted in value.at.items())


def _swept_value(point: Mapping[str, Any], key: str) -> Any:
    """Return the value of a swept key, or of a key inside a swept value."""
    for swept, value in point.items():
        # A value with a label is written as both.
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
    if name.startswith(PLAN_PREFIX):
        value = run.plan.details.model_dump(mode="json")
    for key in name.removeprefix(PLAN_PREFIX).split("."):
        value = _child(value, key)
    # In Python a boolean is an integer.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Nine digits are more than any page shows; further ones differ between builds of torch.
    return float(f"{value:.9g}")


def _child(tree: Any, key: str) -> Any:
    """Return an element of a mapping, or of a list by its index from 0 on; None for a missing element."""
    if isinstance(tree, Mapping):
        return tree.get(key)
    # A key such as -1 or a word is no index.
    if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
        return tree[int(key)]
    return None
