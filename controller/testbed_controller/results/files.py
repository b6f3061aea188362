"""Reading of results folders.

The folder of a run contains ``scenario.yaml`` (resolved), ``plan.json``, ``manifest.json``, ``events.jsonl``,
``metrics.json``, ``fidelity.json``, ``trace.json`` (for ui.perfetto.dev), and ``weights.safetensors`` after training;
also ``boxes.json`` if the network detects objects, and ``declared.json`` if the method is the user's own. `.recorder`
writes these files, and `testbed_controller.report` the pages. Reading them executes no code.
The folder of a sweep contains a folder for each run, ``summary.json`` and ``summary.csv``.
"""

from __future__ import annotations

import json
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
from testbed_controller.results.declared import declared_in
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
_WITHOUT_EFFECT = ("description", "time_limit")
"""Scenario keys without effect on any metric."""
_TAIL_BYTES = 1 << 18
"""Bytes read from the end of the events: some thousand lines, which contain the last step of every device."""
_AT_ONCE = 4096
"""Number of lines parsed together, which takes half the time of parsing them one by one."""
_EVENT_TYPES = {(float, str, str), (int, str, str)}
"""Types of time, device and name of an event."""
_DAMAGED = (ValueError, KeyError, AttributeError, TypeError)
"""Exceptions raised by an invalid event line."""


def trial_in(folder: Path) -> Trial:
    """Return the trial in a results folder, finished or not. Raises `InputError` for a folder without a run."""
    return _read_trial(folder, _read_manifest(folder))


class _ManifestTypes(TypedDict, total=False):
    """Types of the facts of a manifest that other modules rely on; missing ones are reported by their readers."""

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
    facts = _read_json(path)
    _check_types(path, _MANIFEST, facts)
    return facts


def _check_types(path: Path, types: TypeAdapter[Any], content: object) -> None:
    """Raise InputError for a value of another type than the testbed writes; further keys are not checked."""
    try:
        types.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{path}: {key}: {first['msg']}: the file is damaged, run the scenario again"
        ) from None


def _read_trial(folder: Path, facts: Mapping[str, Any]) -> Trial:
    trial = trials(load_scenario(folder / "scenario.yaml"))[0]
    return replace(trial, point=facts["point"], repetition=facts["repetition"])


def load(folder: Path) -> Run:
    """Load a run and recompute its metrics from the events. Raises `InputError` for a missing run.

    A run that crashed, with a truncated last event and no metrics, is loaded as an interrupted run.
    """
    if is_written(folder) and not (folder / "events.jsonl").is_file():
        raise InputError(
            f"{folder}: has no events, as it was run with --no-events: run it again without this option"
        )
    return _load_run(folder, _read_events(folder / "events.jsonl"), None)


def load_metrics(folder: Path) -> Run:
    """Load a run without events, with its stored metrics; missing ones are recomputed."""
    if not is_written(folder):
        return load(folder).alone()
    stored = _read_json(folder / "metrics.json")
    # Evaluated from the scenario and the metrics when needed.
    stored.pop("expectations", None)
    if stored.keys() >= _REQUIRED_METRICS:
        return _load_run(folder, EventLog(), stored)
    return load(folder).alone()


def load_any(folder: Path) -> Run:
    """Load a run with its events if available."""
    if (folder / "events.jsonl").is_file():
        return load(folder)
    return load_metrics(folder)


def is_written(folder: Path) -> bool:
    """Return whether a run is complete, including metrics."""
    status = _read_manifest(folder).get("status")
    return status != RUNNING and (folder / "metrics.json").is_file()


def _load_run(folder: Path, events: EventLog, stored: dict[str, Any] | None) -> Run:
    """Load everything except the events; ``stored`` are its metrics, None to compute them."""
    facts = _read_manifest(folder)
    fidelity: dict[str, Any] = {}
    # Missing if the run was cut off.
    if (folder / "fidelity.json").is_file():
        fidelity = _read_json(folder / "fidelity.json")
        _check_types(folder / "fidelity.json", _FIDELITY, fidelity)
    if facts.get("status") == RUNNING:
        last = events.latest
        facts |= {
            "status": "interrupted",
            "error": f"cut off after {last:.2f} s: testbed ended before the run did",
        }
    try:
        trial = _read_trial(folder, facts)
        plan = Plan.model_validate(_read_json(folder / "plan.json"))
        links = [LinkMeasurement.from_json(item) for item in fidelity.get("links", [])]
        outcome = Outcome(
            runtime=facts["runtime"],
            status=facts["status"],
            events=events,
            error=facts["error"],
            links=links,
            host=facts["host"],
            fidelity=fidelity.get("measurements", {}),
            wall_seconds=facts["wall_seconds"],
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
    declared = declared_in(folder, trial)
    if stored is None:
        try:
            stored = metrics(outcome, trial.experiment, plan, declared)
        except _DAMAGED as error:
            # A method's own events hold any value, and older ones may lack a field.
            raise InputError(
                f"{folder / 'events.jsonl'}: no metrics follow from these events "
                f"({type(error).__name__}: {error}): the file is damaged, or of another version of the testbed"
            ) from error
    return Run(folder, trial, plan, outcome, facts, stored, declared)


def places(folder: Path) -> list[Path]:
    """Return the folders of a run, sweep or repetitions: in the order of the scenario, others by name."""
    if (folder / "scenario.yaml").is_file() or not folder.is_dir():
        return [folder]
    names = _names_in_summary(folder)
    order = {name: number for number, name in enumerate(names)}
    folders = [path.parent for path in folder.glob("[!.]*/scenario.yaml")]
    folders.sort(key=_natural_order)
    # Stable: folders that the summary lacks stay sorted by name, behind all others.
    folders.sort(key=lambda path: order.get(path.name, len(order)))
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
    """Delete the folders of unfinished runs; return the finished runs of the given trials, without events.

    The keys are the positions of the folders.

    Raises InputError if a folder contains a run of another trial.
    """
    finished_runs = {}
    for number, (place, trial) in enumerate(zip(folders, trials, strict=True)):
        if not place.exists():
            continue
        run = load_metrics(place)
        # Results name their Python files relative to their folder.
        wanted_scenario, _ = with_local_sources(trial.scenario)
        if _scenario_facts(run.trial.scenario) != _scenario_facts(wanted_scenario):
            raise InputError(
                f"{place}: is a run of another scenario: resume with the original scenario"
            )
        if run.outcome.status == "finished":
            finished_runs[number] = run
        else:
            shutil.rmtree(place)
    return finished_runs


def _scenario_facts(scenario: Scenario) -> dict[str, Any]:
    return scenario.model_dump(
        mode="json", by_alias=True, exclude=set(_WITHOUT_EFFECT), exclude_none=True
    )


def _natural_order(path: Path) -> list[tuple[bool, float, str]]:
    """Return a sort key that orders numbers in a name by value: ``rate=5`` before ``rate=10``."""
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
        first = 1
        while True:
            lines = list(islice(file, _AT_ONCE))
            if not lines:
                return events
            try:
                parsed = _parse_together(lines)
            except _DAMAGED:
                for event in _parse_one_by_one(path, lines, first):
                    events.append(event)
            else:
                _add_parsed(events, parsed, forms)
            first += len(lines)


def _parse_together(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Parse lines as one JSON list. Raises one of `_DAMAGED` if any line is invalid."""
    text = f"[{','.join(lines)}]"
    parsed: list[dict[str, Any]] = json.loads(text)
    # JSON has no nan: a loss of null is one.
    if '"loss": null' in text:
        for fields in parsed:
            restore_loss(fields)
    # All events have few different forms, so the check of the forms is fast.
    forms = set()
    for fields in parsed:
        types = tuple(map(type, fields.values()))
        forms.add((fields["event"], tuple(fields), types))
    for event, keys, types in forms:
        if keys[:3] != LEADING or types[:3] not in _EVENT_TYPES:
            raise ValueError("not events")
        problem = find_invalid_field(event, keys[3:], types[3:])
        if problem is not None:
            raise ValueError(problem)
    return parsed


def _add_parsed(
    events: EventLog, parsed: Sequence[dict[str, Any]], forms: dict[Form, Form]
) -> None:
    """Add parsed lines to a log, without an `Event` for each, which would double the time."""
    add = events.add
    for fields in parsed:
        keys = tuple(fields)
        values = tuple(fields.values())
        kind = values[2]
        # One tuple for all events of a form, of which a log keeps millions.
        form = forms.get((kind, keys))
        if form is None:
            form = forms[kind, keys] = (kind, keys[3:])
        add(form, values[:2] + values[3:])


def _parse_one_by_one(path: Path, lines: Sequence[str], first: int) -> list[Event]:
    """Parse lines individually, because one is damaged: the last line of an interrupted run, for example."""
    events = []
    for number, line in enumerate(lines, first):
        try:
            event = _parse_line(line)
        except _DAMAGED:
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
    """Parse the line of one event. Raises one of `_DAMAGED` if time, device or name is missing or of another type."""
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
    """Progress of a run according to its last events."""

    time: float = 0.0
    """Time of the last event in seconds of the run."""
    step: int | None = None
    """Last finished step or request."""
    loss: float | None = None
    doing: dict[str, str] = field(default_factory=dict)
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
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read()
    except FileNotFoundError:
        return state
    # Reading begins within a line, and the run may be writing the last one.
    first = 0 if size <= _TAIL_BYTES else text.find(b"\n") + 1
    for line in text[first : text.rfind(b"\n") + 1].splitlines():
        # `ps` shows all other runs as well, so a damaged line must not end it.
        try:
            event = _parse_line(line.decode())
        except _DAMAGED:
            continue
        if _find_invalid_field(event) is not None:
            continue
        state.time = max(state.time, event.time)
        if event.event in ("step", "request"):
            state.step = event.fields.get(event.event)
            state.loss = event.fields.get("loss", state.loss)
        elif event.event in ("begin", "compute"):
            state.doing[event.device] = str(event.fields.get("span"))
    return state
