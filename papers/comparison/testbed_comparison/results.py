"""Results of a paper's scenarios, kept in ``results.json``: values of metrics, and the provenance of the runs.

A scenario is stale if its file or its changes for the comparison differ from those of the kept results.
"""

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
from testbed_comparison.words import OurValue, compute_our_value

RESULTS_FILE = "results.json"
RUNS = Path("results/papers")
"""Folder of all runs, relative to the working directory."""
PLAN_PREFIX = "plan."
"""Prefix of values that come from the details of the plan instead of the metrics."""
IGNORED_KEYS = ("description", "time_limit", "expect")
"""Keys of a scenario without an effect on the values of its runs."""
INNERMOST_LIST = re.compile(r"\[[^\[\]{}]*\]")
"""A list in JSON text without lists or objects inside, such as the numbers of a value or the seeds."""
FAILED_STATUS = 1
"""Exit status of `testbed run` if an expectation does not hold, but also after a failed run and after a crash."""
STATUSES_WITH_VALUES = (0, FAILED_STATUS, DivergedError.exit_code)
"""Exit statuses after which runs may have values; training that diverges is a result of the method as well."""


class Results:
    """The kept results of the scenarios of one paper. A record is the entry of one scenario in ``results.json``.

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

    def scenarios_to_run(self, figures: Figures) -> list[str]:
        """Return the scenarios without results, with stale results, or without the result of a needed value."""
        names = []
        for name, value_keys in _needed_values(figures).items():
            if not self._is_current(name, value_keys, figures):
                names.append(name)
        return names

    def _is_current(self, name: str, value_keys: set[str], figures: Figures) -> bool:
        record = self.scenarios.get(name)
        if record is None or not value_keys <= record["values"].keys():
            return False
        changes = figures.changes.get(name, {})
        digest = self.digest(name, changes)
        return bool(record["digest"] == digest)

    def digest(self, name: str, changes: Mapping[str, Any]) -> str:
        """Return a hash of all keys of a scenario with an effect on the runs."""
        scenario = testbed.load(self._file(name), changes)
        # Only keys that the file sets: a new option of the testbed must not make all results stale.
        content = scenario.model_dump(mode="json", by_alias=True, exclude_unset=True)
        for key in IGNORED_KEYS:
            content.pop(key, None)
        # Sorted, since the order of keys in a file has no meaning.
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode())
        return digest.hexdigest()[:16]

    def _file(self, name: str) -> Path:
        return self._folder / "scenarios" / f"{name}.yaml"

    def prune(self, figures: Figures) -> None:
        """Remove scenarios and values that neither rows nor ``sensitivity`` in ``figures.yaml`` use."""
        needed = _needed_values(figures)
        # The difference is a new set, so entries can be removed during the loop.
        for name in self.scenarios.keys() - needed.keys():
            del self.scenarios[name]
        for name, record in self.scenarios.items():
            for key in record["values"].keys() - needed[name]:
                del record["values"][key]

    def ours(
        self, scenario: str, expressions: Sequence[Expression], unit: str
    ) -> OurValue | None:
        """Return our value of one expression, or the range of the values of several; None if a run is missing.

        ``scenario`` is the scenario of all values that name none.
        """
        names: set[str] = set()
        for expression in expressions:
            for term in terms(expression):
                names.add(term.scenario or scenario)
        if not names <= self.scenarios.keys():
            return None

        def numbers_of(value: Value) -> Sequence[float | None]:
            record = self.scenarios[value.scenario or scenario]
            key = _value_key(value)
            numbers: Sequence[float | None] = record["values"].get(key, ())
            return numbers

        trains = any(self.scenarios[name]["trains"] for name in names)
        # Without training, the runs compute only times and sizes, which are equal in every run.
        return compute_our_value(expressions, unit, numbers_of, is_timing=not trains)

    def failed_runs(self, name: str) -> int:
        """Return the number of a scenario's kept runs ended by the method with an error."""
        return int(self.scenarios.get(name, {}).get("failed", 0))

    def run(self, name: str, figures: Figures, *, jobs: int, again: bool) -> None:
        """Simulate a scenario and store the values.

        Runs that an interrupted command has finished are kept, unless ``again`` is set. ``jobs`` runs are simulated at
        a time. Raises `InputError` if a run is missing, did not finish or is not trusted.
        """
        changes = figures.changes.get(name, {})
        digest = self.digest(name, changes)
        # The digest in the name keeps runs of another version of the scenario apart.
        folder = RUNS / f"{name}-{digest}"
        if again:
            shutil.rmtree(folder, ignore_errors=True)
        run_scenario(self._file(name), changes, folder, "simulate", "--jobs", str(jobs))
        expected = len(trials(testbed.load(self._file(name), changes)))
        results = testbed.open_results(folder)
        # A crash between two runs has the exit status of an unmet expectation, and leaves a part of the sweep.
        if len(results) != expected:
            raise InputError(
                f"{folder}: {len(results)} of {expected} runs exist: run the command again to resume"
            )
        values = []
        for scenario, value in figures.values():
            if scenario == name:
                values.append(value)
        record = _record_runs(results, values)
        record["command"] = shlex.join(compose_command(f"papers/{name}", changes))
        record["digest"] = digest
        self.scenarios[name] = record


def run_scenario(
    file: Path,
    changes: Mapping[str, Any],
    folder: Path,
    runtime: str,
    *options: str,
) -> None:
    """Run a scenario in a new process with results in a folder; if the folder exists, resume its runs.

    Raises `InputError` for an exit status outside `STATUSES_WITH_VALUES`. Since a crash has the status
    `FAILED_STATUS`, the caller checks that all runs exist and have finished.
    """
    # By the interpreter, since the command `testbed` may not be on the path.
    code = "from testbed_controller.cli.main import main; main()"
    _, *arguments = compose_command(str(file), changes, runtime)
    folder_option = "--resume" if folder.exists() else "--out"
    arguments += [folder_option, str(folder), *options]
    command = [sys.executable, "-c", code, *arguments]
    # Events take most of the space, and all values come from metrics and plans.
    command.append("--no-events")
    status = subprocess.run(command, check=False).returncode
    if status not in STATUSES_WITH_VALUES:
        raise InputError(
            f"{file.stem}: 'testbed run' failed with exit status {status}; the output above has the reason"
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
    """Return the keys of all values in rows and ``sensitivity``, by scenario."""
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
        # A run that trains has an accuracy, unlike a run that computes only times and sizes.
        trains = trains or result.run.metrics.get("accuracy") is not None
    numbers = {}
    for value in values:
        numbers[_value_key(value)] = _values_at(results, value)
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
        "values": numbers,
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
    """Return the metric of each repetition in order; None for a run without the metric.

    A time until a certain accuracy, for example, is missing if a run did not reach the accuracy.
    """
    points: dict[str, list[float | None]] = {}
    for result in results:
        if not _is_at(result, value):
            continue
        point = json.dumps(result.run.trial.point, sort_keys=True)
        numbers = points.setdefault(point, [])
        # A failed run ended early, so that its metrics are not comparable. It has an entry nevertheless, since the two
        # values of a ratio are paired by repetition.
        number = None
        if not _has_failed(result):
            number = metric_of(result, value.metric)
        numbers.append(number)
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
    """Return the numbers of the point with the smallest mean; with a key, its swept value at this point.

    ``points`` has the numbers of all repetitions by point, as JSON. The result is empty if no run has a number.
    """
    means: dict[str, float] = {}
    for point, numbers in points.items():
        present = [number for number in numbers if number is not None]
        if present:
            means[point] = fmean(present)
    if not means:
        return []
    point_of_minimum = min(means, key=means.__getitem__)
    if not key:
        return points[point_of_minimum]
    return [float(_swept_value(json.loads(point_of_minimum), key))]


def _is_at(result: Result, value: Value) -> bool:
    """Return whether a run belongs to the point of the sweep named by a value."""
    point = result.run.trial.point
    return all(_swept_value(point, key) == item for key, item in value.at.items())


def _swept_value(point: Mapping[str, Any], key: str) -> Any:
    """Return the value of a swept key, or of a key inside a swept value."""
    for swept_key, value in point.items():
        # A labelled value is a mapping of label and value.
        if isinstance(value, Mapping) and value.keys() == {"label", "value"}:
            value = value["value"]
        if key == swept_key:
            return value
        if key.startswith(f"{swept_key}.") and isinstance(value, Mapping):
            return _swept_value(value, key.removeprefix(f"{swept_key}."))
    return None


def metric_of(result: Result, name: str) -> float | None:
    """Return a metric of a run by name as in `expect`, or ``plan.`` and a dotted key of the plan's details."""
    run = result.run
    value: Any = run.metrics
    if name.startswith(PLAN_PREFIX):
        value = run.plan.details.model_dump(mode="json")
    for key in name.removeprefix(PLAN_PREFIX).split("."):
        value = _child(value, key)
    # Booleans are integers in Python, but no numbers here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Nine digits are more than any page shows; further digits differ between builds of torch.
    return float(f"{value:.9g}")


def _child(tree: Any, key: str) -> Any:
    """Return an element of a mapping, or of a list by index from 0 on; None for a missing element."""
    if isinstance(tree, Mapping):
        return tree.get(key)
    # Only digits are an index: a key may be a word, or a number such as -1.
    if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
        return tree[int(key)]
    return None
