"""Reading of results folders.

One folder a run: ``scenario.yaml`` (resolved), ``plan.json``, ``manifest.json``, ``events.jsonl``, ``metrics.json``,
``fidelity.json``, ``trace.json`` (for ui.perfetto.dev), ``weights.safetensors`` where there are any; of a network
that finds objects ``boxes.json``, of a method of one's own ``declared.json``. `.recorder` writes them,
`testbed_controller.report` the pages. Reading them executes nothing.
A sweep or repeated run is a folder of such folders with ``summary.json`` and ``summary.csv``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from testbed.common.errors import InputError
from testbed.plan import Plan
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.events import LEADING, Event, restore_loss
from testbed.trace.log import EventLog, Form
from testbed.trace.metrics import metrics
from testbed.trace.outcome import LinkMeasurement, Outcome
from testbed_controller.results.declared import declared_in
from testbed_controller.results.recorder import RUNNING, with_local_sources
from testbed_controller.results.run import Run

ALWAYS = {
    "status",
    "trusted",
    "duration",
    "series",
    "devices",
    "recovery_list",
    "verdict",
}
"""Metrics required by pages of several runs; older runs may lack some."""
UNSHOWN = ("description", "time_limit")
"""Scenario keys without effect on any metric."""
READ = 1 << 18
"""Bytes read from the end of the events."""
_AT_ONCE = 4096
"""Number of lines parsed together, which takes half the time."""
_DAMAGED = (ValueError, KeyError, AttributeError, TypeError)
"""Exceptions raised by an invalid event line."""


def begun(folder: Path) -> Trial:
    """Return the trial in a results folder, finished or not. Raises `InputError` for a folder without a run."""
    return _read_trial(folder, _read_manifest(folder))


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / "scenario.yaml").is_file():
        raise InputError(
            f"{folder}: has no run: name a folder written by `testbed run`, such as results/<run>"
        )
    return _read_json(folder / "manifest.json")


def _read_trial(folder: Path, facts: Mapping[str, Any]) -> Trial:
    trial = trials(load_scenario(folder / "scenario.yaml"))[0]
    return replace(trial, point=facts["point"], repetition=facts["repetition"])


def load(folder: Path) -> Run:
    """Load a run and recompute its metrics from the events. Raises `InputError` for a missing run.

    Survives what a crash leaves: a last line of events that was cut off, no figures. Such a run counts as interrupted.
    """
    if is_written(folder) and not (folder / "events.jsonl").is_file():
        raise InputError(
            f"{folder}: has no events, being run with --no-events: run it again without"
        )
    return _load_run(folder, _read_events(folder / "events.jsonl"), None)


def load_figures(folder: Path) -> Run:
    """Load a run without events, with its stored metrics; missing ones are recomputed."""
    if not is_written(folder):
        return load(folder).alone()
    figures = _read_json(folder / "metrics.json")
    figures.pop("expectations", None)
    return (
        _load_run(folder, EventLog(), figures)
        if figures.keys() >= ALWAYS
        else load(folder).alone()
    )


def load_any(folder: Path) -> Run:
    """Load a run with its events if available."""
    return load(folder) if (folder / "events.jsonl").is_file() else load_figures(folder)


def is_written(folder: Path) -> bool:
    """Return whether a run is complete, including metrics."""
    return (
        _read_manifest(folder).get("status") != RUNNING
        and (folder / "metrics.json").is_file()
    )


def _load_run(folder: Path, events: EventLog, figures: dict[str, Any] | None) -> Run:
    """Load everything except the events; without ``figures``, recompute the metrics."""
    facts = _read_manifest(folder)
    fidelity = (
        _read_json(folder / "fidelity.json")
        if (folder / "fidelity.json").is_file()
        else {}
    )
    if facts.get("status") == RUNNING:
        last = events.latest
        facts |= {
            "status": "interrupted",
            "error": f"cut off after {last:.2f} s: testbed ended before the run did",
        }
    try:
        trial = _read_trial(folder, facts)
        plan = Plan.model_validate(_read_json(folder / "plan.json"))
        outcome = Outcome(
            runtime=facts["runtime"],
            status=facts["status"],
            events=events,
            error=facts["error"],
            links=[
                LinkMeasurement.from_json(item) for item in fidelity.get("links", [])
            ],
            host=facts["host"],
            fidelity=fidelity.get("figures", {}),
            wall_seconds=facts["wall_seconds"],
        )
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{folder}: was not written by this version of the testbed: lacks {error}"
        ) from None
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(
            f"{folder}: was not written by this version of the testbed: plan.json: {key}"
        ) from None
    declared = declared_in(folder, trial)
    if figures is None:
        figures = metrics(outcome, trial.experiment, plan, declared)
    return Run(folder, trial, plan, outcome, facts, figures, declared)


def places(folder: Path) -> list[Path]:
    """Return the folders of a run, sweep or repetitions: in the order of the scenario, others by name."""
    if (folder / "scenario.yaml").is_file() or not folder.is_dir():
        return [folder]
    summary = folder / "summary.json"
    points = _read_json(summary).get("points", ()) if summary.is_file() else ()
    order = {
        name: number
        for number, name in enumerate(
            name for point in points for name in point["runs"]
        )
    }
    folders = sorted(
        (path.parent for path in folder.glob("[!.]*/scenario.yaml")), key=_natural_order
    )
    return sorted(folders, key=lambda path: order.get(path.name, len(order))) or [
        folder
    ]


def finished_among(folders: Sequence[Path], wanted: Sequence[Trial]) -> dict[int, Run]:
    """Return the finished runs of the given trials by number; delete the remains of the others.

    The runs are without their events. Raises InputError where a folder holds a run of another trial.
    """
    finished_runs = {}
    for number, (place, trial) in enumerate(zip(folders, wanted, strict=True)):
        if not place.exists():
            continue
        run = load_figures(place)
        if _scenario_facts(run.trial.scenario) != _scenario_facts(
            with_local_sources(trial.scenario)[0]
        ):
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
        mode="json", by_alias=True, exclude=set(UNSHOWN), exclude_none=True
    )


def _natural_order(path: Path) -> list[tuple[bool, float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [
        (index % 2 == 0, float(part) if index % 2 else 0.0, part)
        for index, part in enumerate(parts)
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: is missing: the run was not written to its end"
        ) from None
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
    """Read events up to the first damaged line."""
    events, forms = EventLog(), dict[Form, Form]()
    add = events.add
    if not path.is_file():
        return events
    with path.open(encoding="utf-8", errors="replace") as file:
        first = 1
        while lines := list(islice(file, _AT_ONCE)):
            try:
                parsed = _read_lines(lines)
                begun = {keys[:3] for keys in set(map(tuple, parsed))}
                if begun != {LEADING} or {
                    type(fields["event"]) for fields in parsed
                } != {str}:
                    raise ValueError
            except _DAMAGED:
                for event in _one_by_one(path, lines, first):
                    events.append(event)
            else:
                for (
                    fields
                ) in parsed:  # no `Event` of each, which takes as long as all else
                    keys, values = tuple(fields), tuple(fields.values())
                    if (form := forms.get((values[2], keys))) is None:
                        form = forms[values[2], keys] = (values[2], keys[3:])
                    add(form, values[:2] + values[3:])
            first += len(lines)
    return events


def _read_lines(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Read lines of events together."""
    text = f"[{','.join(lines)}]"
    parsed: list[dict[str, Any]] = json.loads(text)
    if '"loss": null' in text:
        for fields in parsed:
            restore_loss(fields)
    return parsed


def _one_by_one(path: Path, lines: Sequence[str], first: int) -> list[Event]:
    """Parse lines individually, because one is damaged: the last line of an interrupted run, for example."""
    events = []
    for number, line in enumerate(lines, first):
        try:
            events.append(Event.from_json(line))
        except _DAMAGED:
            if line.endswith("\n"):
                raise InputError(
                    f"{path}:{number}: is not an event: the file is damaged"
                ) from None
    return events


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
        parts += [] if self.step is None else [f"step {self.step}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        return ", ".join(parts)


def progress(folder: Path) -> Progress:
    """Return the progress of the run in a folder; empty without events."""
    state = Progress()
    try:
        with (folder / "events.jsonl").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - READ))
            text = file.read()
    except FileNotFoundError:
        return state
    # Neither the first nor the last line need be whole.
    first = 0 if size <= READ else text.find(b"\n") + 1
    for line in text[first : text.rfind(b"\n") + 1].splitlines():
        event = Event.from_json(line.decode())
        state.time = max(state.time, event.time)
        if event.event in ("step", "request"):
            state.step = event.fields.get(event.event)
            state.loss = event.fields.get("loss", state.loss)
        elif event.event in ("begin", "compute"):
            state.doing[event.device] = str(event.fields.get("span"))
    return state
