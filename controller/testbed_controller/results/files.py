"""Reading of results folders.

The folder of a run contains ``scenario.yaml`` (resolved), ``plan.json``, ``manifest.json``, ``events.jsonl``,
``metrics.json``, ``fidelity.json``, ``trace.json`` (for ui.perfetto.dev), and ``weights.safetensors`` after training;
also ``boxes.json`` if the network detects objects, and ``declared.json`` if the method is the user's own. `.recorder`
writes these files, and `testbed_controller.report` the pages. Reading them executes no code.
The folder of a sweep contains a folder for each run, ``summary.json`` and ``summary.csv``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from testbed.common.errors import InputError
from testbed.plan import Plan
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.events import LEADING, Event, find_invalid_field, restore_loss
from testbed.trace.log import EventLog, Form
from testbed.trace.metrics import metrics
from testbed.trace.outcome import LinkMeasurement, Outcome
from testbed_controller.results.declared import load_metrics_spec
from testbed_controller.results.recorder import RUNNING, with_local_sources
from testbed_controller.results.run import Run

_REQUIRED_METRICS = {
    "status",
    "trusted",
    "duration",
    "series",
    "devices",
    "recovery_list",
    "verdict",
}
"""Metrics required by pages of several runs; older runs may lack some."""
_KEYS_FREE_TO_CHANGE = ("description", "time_limit")
"""Scenario keys without effect on any metric, which may change before a sweep is resumed."""
_TAIL_BYTES = 1 << 18
"""Bytes read from the end of the events: some thousand lines, which contain the last step of every device."""
_LINES_AT_ONCE = 4096
"""Number of lines parsed together, which takes half the time of parsing them one by one."""
_EVENT_TYPES = {(float, str, str), (int, str, str)}
"""Possible types of an event's time, device and name."""
_EVENT_ERRORS = (ValueError, KeyError, AttributeError, TypeError)
"""Exceptions that an invalid event raises when it is parsed, or when metrics are computed from it."""


def trial_in(folder: Path) -> Trial:
    """Return the trial of a finished or unfinished run. Raises `InputError` for a folder without a run."""
    return _read_trial(folder, _read_manifest(folder))


class _ManifestTypes(TypedDict, total=False):
    """Types of the manifest's values used by other modules; readers report missing keys."""

    point: dict[str, Any]
    repetition: int
    runtime: Literal["emulate", "simulate"]
    status: str
    error: str | None
    wall_seconds: float
    date: str
    command: str
    revision: str | None
    versions: dict[str, str | None]
    host: _HostTypes


class _ProcessorTypes(TypedDict):
    processor: str
    instruction_set: str
    torch: str


class _HostTypes(TypedDict, total=False):
    # Runs without torch record no instruction set, or none as null.
    computing: list[_ProcessorTypes | None]


class _FidelityTypes(TypedDict, total=False):
    measurements: dict[str, Any]
    links: list[dict[str, Any]]


_MANIFEST = TypeAdapter(_ManifestTypes)
_FIDELITY = TypeAdapter(_FidelityTypes)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / "scenario.yaml").is_file():
        raise InputError(
            f"{folder}: has no run: name a folder written by `testbed run`, such as results/<run>"
        )
    path = folder / "manifest.json"
    manifest = _read_json(path)
    _check_types(path, _MANIFEST, manifest)
    return manifest


def _check_types(path: Path, types: TypeAdapter[Any], content: object) -> None:
    """Raise InputError for a value of another type than the testbed writes; keys without a type are not checked."""
    try:
        types.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{path}: {key}: {first['msg']}: the file is damaged, run the scenario again"
        ) from None


def _read_trial(folder: Path, manifest: Mapping[str, Any]) -> Trial:
    # The stored scenario is resolved: it has no sweep, and the swept values are in the manifest.
    trial = trials(load_scenario(folder / "scenario.yaml"))[0]
    return replace(trial, point=manifest["point"], repetition=manifest["repetition"])


def load(folder: Path) -> Run:
    """Load a run and recompute the metrics from the events. Raises `InputError` for a missing run.

    A run that crashed, with a truncated last event and no metrics, is loaded as an interrupted run.
    """
    if is_complete(folder) and not (folder / "events.jsonl").is_file():
        raise InputError(
            f"{folder}: has no events, as it was run with --no-events: run it again without this option"
        )
    return _load_run(folder, _read_events(folder / "events.jsonl"), None)


def load_metrics(folder: Path) -> Run:
    """Load a run without events, with the stored metrics, or recomputed ones if the stored ones are incomplete."""
    if not is_complete(folder):
        return load(folder).without_events()
    stored = _read_json(folder / "metrics.json")
    # `Run.expectations` evaluates them from the scenario and the metrics.
    stored.pop("expectations", None)
    if stored.keys() >= _REQUIRED_METRICS:
        return _load_run(folder, EventLog(), stored)
    return load(folder).without_events()


def load_any(folder: Path) -> Run:
    """Load a run, with events if available."""
    if (folder / "events.jsonl").is_file():
        return load(folder)
    return load_metrics(folder)


def is_complete(folder: Path) -> bool:
    """Return whether a run has ended and the metrics are stored."""
    status = _read_manifest(folder).get("status")
    return status != RUNNING and (folder / "metrics.json").is_file()


def _load_run(folder: Path, events: EventLog, stored: dict[str, Any] | None) -> Run:
    """Load a run with ``events`` and the ``stored`` metrics, computed from the events if None."""
    manifest = _read_manifest(folder)
    fidelity: dict[str, Any] = {}
    # The file is missing if the testbed was killed during the run.
    if (folder / "fidelity.json").is_file():
        fidelity = _read_json(folder / "fidelity.json")
        _check_types(folder / "fidelity.json", _FIDELITY, fidelity)
    if manifest.get("status") == RUNNING:
        manifest |= {
            "status": "interrupted",
            "error": f"cut off after {events.latest:.2f} s: testbed ended before the run did",
        }
    try:
        trial = _read_trial(folder, manifest)
        plan = Plan.model_validate(_read_json(folder / "plan.json"))
        links = [LinkMeasurement.from_json(item) for item in fidelity.get("links", [])]
        outcome = Outcome(
            runtime=manifest["runtime"],
            status=manifest["status"],
            events=events,
            error=manifest["error"],
            links=links,
            host=manifest["host"],
            fidelity=fidelity.get("measurements", {}),
            wall_seconds=manifest["wall_seconds"],
        )
    except KeyError as error:
        raise InputError(
            f"{folder}: was not written by this version of the testbed: lacks {error}"
        ) from None
    except TypeError as error:
        raise InputError(
            f"{folder}: was not written by this version of the testbed: {error}"
        ) from None
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(
            f"{folder}: was not written by this version of the testbed: plan.json: {key}"
        ) from None
    metrics_spec = load_metrics_spec(folder, trial)
    if stored is None:
        try:
            stored = metrics(outcome, trial.experiment, plan, metrics_spec)
        except _EVENT_ERRORS as error:
            # Events that a method defines may hold any value, and events of older versions may lack a field.
            raise InputError(
                f"{folder / 'events.jsonl'}: no metrics follow from these events "
                f"({type(error).__name__}: {error}): the file is damaged, or of another version of the testbed"
            ) from error
    return Run(folder, trial, plan, outcome, manifest, stored, metrics_spec)


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of all runs in the results folder of one run or of a sweep.

    The runs of a sweep are in the order of the scenario; folders that its summary lacks follow, by name. A folder
    without runs is returned unchanged, so that loading it reports the error.
    """
    if (folder / "scenario.yaml").is_file() or not folder.is_dir():
        return [folder]
    position_of = {name: i for i, name in enumerate(_names_in_summary(folder))}
    folders = [path.parent for path in folder.glob("[!.]*/scenario.yaml")]
    folders.sort(key=_natural_order)
    # The sort is stable: folders that the summary lacks stay sorted by name, behind all others.
    last = len(position_of)
    folders.sort(key=lambda path: position_of.get(path.name, last))
    return folders or [folder]


def _names_in_summary(folder: Path) -> list[str]:
    """Return the names of the runs of a sweep, in the order of the scenario; empty without a summary."""
    summary = folder / "summary.json"
    if not summary.is_file():
        return []
    names = []
    for point in _read_json(summary).get("points", ()):
        names += point["runs"]
    return names


def keep_finished_runs(
    folders: Sequence[Path], trials: Sequence[Trial]
) -> dict[int, Run]:
    """Prepare the folders of a sweep, one for each trial, to be resumed: delete the folders of unfinished runs.

    Returns the finished runs without events, by their index in ``folders``. Raises InputError if a folder contains a
    run of another scenario.
    """
    finished_runs = {}
    for index, (folder, trial) in enumerate(zip(folders, trials, strict=True)):
        if not folder.exists():
            continue
        run = load_metrics(folder)
        # Results name their Python files relative to their folder.
        wanted_scenario, _ = with_local_sources(trial.scenario)
        if _fixed_values(run.trial.scenario) != _fixed_values(wanted_scenario):
            raise InputError(
                f"{folder}: is a run of another scenario: resume with the original scenario"
            )
        if run.outcome.status == "finished":
            finished_runs[index] = run
        else:
            shutil.rmtree(folder)
    return finished_runs


def _fixed_values(scenario: Scenario) -> dict[str, Any]:
    """Return the values of a scenario required to be equal for resuming a run."""
    return scenario.model_dump(
        mode="json", by_alias=True, exclude=set(_KEYS_FREE_TO_CHANGE), exclude_none=True
    )


def _natural_order(path: Path) -> list[tuple[bool, float, str]]:
    """Return a sort key ordering numbers in a name by value: ``rate=5`` before ``rate=10``."""
    key = []
    # With a group in its pattern, `split` returns text and numbers in turns, and numbers have odd indices.
    for index, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", path.name)):
        is_text = index % 2 == 0
        key.append((is_text, 0.0 if is_text else float(part), part))
    return key


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not found: the run is incomplete") from None
    except ValueError:
        raise InputError(
            f"{path}: is not JSON: the file is damaged, run the scenario again"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: is not a JSON object: the file is damaged, run the scenario again"
        )
    return content


def _read_events(path: Path) -> EventLog:
    """Read the events of a run; empty without a file.

    A truncated last line is ignored. Raises InputError for any other damaged line.
    """
    events = EventLog()
    if not path.is_file():
        return events
    forms: dict[Form, Form] = {}
    # A write that was cut off may end within a character, which must not hide that the line is a truncated one.
    with path.open(encoding="utf-8", errors="replace") as file:
        first_number = 1
        while True:
            lines = list(islice(file, _LINES_AT_ONCE))
            if not lines:
                return events
            try:
                parsed = _parse_together(lines)
            except _EVENT_ERRORS:
                for event in _parse_one_by_one(path, lines, first_number):
                    events.append(event)
            else:
                _add_parsed(events, parsed, forms)
            first_number += len(lines)


def _parse_together(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse lines as one JSON list. Raises one of `_EVENT_ERRORS` if any line is invalid."""
    text = f"[{','.join(lines)}]"
    parsed: list[dict[str, Any]] = json.loads(text)
    # JSON lacks NaN, so a loss of NaN is stored as null.
    if '"loss": null' in text:
        for fields in parsed:
            restore_loss(fields)
    # Millions of events have few different combinations of keys and types: each combination is checked once.
    combinations = set()
    for fields in parsed:
        types = tuple(map(type, fields.values()))
        combinations.add((fields["event"], tuple(fields), types))
    # The first three keys are those of `LEADING`: time, device and event.
    for event, keys, types in combinations:
        if keys[:3] != LEADING or types[:3] not in _EVENT_TYPES:
            raise ValueError("not events")
        problem = find_invalid_field(event, keys[3:], types[3:])
        if problem is not None:
            raise ValueError(problem)
    return parsed


def _add_parsed(
    events: EventLog, parsed: Sequence[dict[str, Any]], forms: dict[Form, Form]
) -> None:
    """Add parsed lines to a log, without an `Event` for each, which would double the time.

    ``forms`` caches the `Form` of each event name and its keys, so that millions of events share few tuples.
    """
    for fields in parsed:
        keys = tuple(fields)
        time, device, name, *values = fields.values()
        form = forms.get((name, keys))
        if form is None:
            form = forms[name, keys] = (name, keys[3:])
        events.add(form, (time, device, *values))


def _parse_one_by_one(
    path: Path, lines: Sequence[str], first_number: int
) -> list[Event]:
    """Parse lines and skip a damaged one, for example the truncated last line of an interrupted run.

    ``first_number`` is the number of the first line in the file, for error messages.
    """
    events = []
    for number, line in enumerate(lines, first_number):
        try:
            event = _parse_line(line)
        except _EVENT_ERRORS:
            if line.endswith("\n"):
                raise InputError(
                    f"{path}:{number}: is not an event: the file is damaged"
                ) from None
            continue
        problem = _find_invalid_field(event)
        if problem is not None:
            raise InputError(
                f"{path}:{number}: {event.event}: {problem}: the file is damaged"
            )
        events.append(event)
    return events


def _parse_line(line: str) -> Event:
    """Parse the line of one event.

    Raises one of `_EVENT_ERRORS` if time, device or name is missing or of another type.
    """
    event = Event.from_json(line)
    types = (type(event.time), type(event.device), type(event.event))
    if types not in _EVENT_TYPES:
        raise ValueError("not an event")
    return event


def _find_invalid_field(event: Event) -> str | None:
    return find_invalid_field(
        event.event, event.fields, map(type, event.fields.values())
    )


@dataclass
class Progress:
    """Progress of a run according to the last events."""

    time: float = 0.0
    """Time of the last event in seconds of the run."""
    step: int | None = None
    """Last finished step or request."""
    loss: float | None = None
    activities: dict[str, str] = field(default_factory=dict)
    """Current or last activity by device."""

    def __str__(self) -> str:
        parts = [f"{self.time:.1f} s"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        return ", ".join(parts)


def progress(folder: Path) -> Progress:
    """Return the progress of the run in a folder; empty without events."""
    state = Progress()
    try:
        with (folder / "events.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read()
    except FileNotFoundError:
        return state
    lines = text.split(b"\n")
    # The run may be writing the last line; after a line break, the last entry is empty.
    lines.pop()
    # In a longer file, reading began within a line.
    if size > _TAIL_BYTES and lines:
        lines.pop(0)
    for line in lines:
        # `ps` shows all other runs as well, so a damaged line must not end it.
        try:
            event = _parse_line(line.decode())
        except _EVENT_ERRORS:
            continue
        if _find_invalid_field(event) is not None:
            continue
        state.time = max(state.time, event.time)
        if event.event in ("step", "request"):
            state.step = event.fields.get(event.event)
            state.loss = event.fields.get("loss", state.loss)
        elif event.event in ("begin", "compute"):
            state.activities[event.device] = str(event.fields.get("span"))
    return state
