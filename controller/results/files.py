"""What a run leaves on disk, and reading it back.

One folder a run: ``scenario.yaml`` (resolved), ``plan.json``, ``manifest.json``, ``events.jsonl``, ``metrics.json``,
``fidelity.json``, ``trace.json`` (for ui.perfetto.dev), ``weights.safetensors`` where there are any; of a network
that finds objects ``boxes.json``. The pages that show a run are `controller.report`'s.
A sweep or repeated run is a folder of such folders with ``summary.json`` and ``summary.csv``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from controller.results.manifest import manifest
from controller.results.publishing import publish
from controller.results.run import Run, declared_by
from testbed.errors import InputError
from testbed.methods import external
from testbed.plan import Plan
from testbed.prepare import find_method
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.scenario.schema import Scenario
from testbed.scenario.trial import Trial
from testbed.trace.events import Event
from testbed.trace.gantt import run_end
from testbed.trace.metrics import finite, metrics
from testbed.trace.outcome import LinkMeasurement, Outcome
from testbed.trace.perfetto import trace


def write(
    folder: Path,
    trial: Trial,
    plan: Plan,
    outcome: Outcome,
    *,
    command: str | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run to ``folder``, or beside it with a number when that exists, and return where it is.

    Nothing is to be seen at the final place until all of it is there. ``command`` is what reproduces the run; the
    command line of this process unless given. ``weights`` says which file they were read from, if any.
    Raises OSError where the place cannot be written.
    """
    facts = manifest(trial, outcome, command, weights)
    scenario, sources = _beside_its_method(trial.scenario)
    run = Run(folder, trial, plan, outcome, facts, metrics(outcome, trial.experiment, plan, declared_by(trial)))

    def fill(draft: Path) -> None:
        (draft / "scenario.yaml").write_text(scenario_yaml(scenario), encoding="utf-8")
        for name, text in sources.items():
            (draft / name).write_text(text, encoding="utf-8")
        _write_json(draft / "plan.json", plan.model_dump(mode="json"))
        _write_json(draft / "manifest.json", facts)
        with (draft / "events.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(event.to_json() + "\n" for event in outcome.events)
        if outcome.weights:
            _write_weights(draft / "weights.safetensors", outcome.weights)
        _write_computed(draft, run)

    return publish(folder, fill)


def load(folder: Path) -> Run:
    """Read a run back, its figures computed again from its events; raise `InputError` where there is none.

    Survives what a crash leaves: a last line of events that was cut off, no fidelity.
    """
    if not (folder / "scenario.yaml").is_file():
        raise InputError(f"{folder}: holds no run: name a folder that `testbed run` wrote, such as results/<run>")
    trial = trials(load_scenario(folder / "scenario.yaml"))[0]
    facts = _read_json(folder / "manifest.json")
    fidelity = _read_json(folder / "fidelity.json") if (folder / "fidelity.json").is_file() else {}
    try:
        plan = Plan.model_validate(_read_json(folder / "plan.json"))
        outcome = Outcome(
            runtime=facts["runtime"],
            status=facts["status"],
            events=_read_events(folder / "events.jsonl"),
            error=facts["error"],
            links=[LinkMeasurement.from_json(item) for item in fidelity.get("links", [])],
            host=facts["host"],
            fidelity=fidelity.get("figures", {}),
            wall_seconds=facts["wall_seconds"],
        )
        trial = replace(trial, point=facts["point"], repetition=facts["repetition"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: was not written by this version of the testbed: lacks {error}") from None
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(f"{folder}: was not written by this version of the testbed: plan.json: {key}") from None
    return Run(folder, trial, plan, outcome, facts, metrics(outcome, trial.experiment, plan, declared_by(trial)))


def load_all(folder: Path) -> list[Run]:
    """Read a run, or every run of a sweep or of repetitions in the order of their names, numbers by their size."""
    if (folder / "scenario.yaml").is_file() or not folder.is_dir():
        return [load(folder)]
    places = sorted((path.parent for path in folder.glob("[!.]*/scenario.yaml")), key=_natural)
    return [load(place) for place in places] or [load(folder)]


def rebuild(run: Run) -> None:
    """Write again everything in a run's folder that is computed: figures, verdict and trace."""
    _write_computed(run.path, run)


def _natural(path: Path) -> list[tuple[bool, float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(index % 2 == 0, float(part) if index % 2 else 0.0, part) for index, part in enumerate(parts)]


def _beside_its_method(scenario: Scenario) -> tuple[Scenario, dict[str, str]]:
    """Return the scenario as it can lie beside the file of its method, and the text of that file by name, if any."""
    part = scenario.workload.method
    code = external.code_of(find_method(scenario)) if part.file is not None else None
    if part.file is None or code is None:
        return scenario, {}
    name = Path(part.file).name
    workload = scenario.workload.model_copy(update={"method": part.model_copy(update={"file": name})})
    return scenario.model_copy(update={"workload": workload}), {name: code.sources[code.module]}


def scenario_yaml(scenario: Scenario) -> str:
    """Return the scenario as YAML with every default spelled out; it loads back equal."""
    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 110
    yaml.dump(scenario.model_dump(mode="json", by_alias=True, exclude_none=True), text)
    return text.getvalue()


def _write_computed(folder: Path, run: Run) -> None:
    end = run_end(run.outcome.events, run.plan.lead)
    expected = [asdict(expectation) for expectation in run.expectations]
    _write_json(folder / "metrics.json", {**run.metrics, "expectations": expected})
    _write_json(folder / "fidelity.json", _fidelity(run.outcome, run.metrics))
    if run.metrics["series"]["objects"]:
        _write_json(folder / "boxes.json", run.metrics["series"]["objects"])
    content = trace(run.outcome.events, end, run.trial.scenario.name)
    (folder / "trace.json").write_text(json.dumps(content), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(finite(value), indent=2, default=str) + "\n", encoding="utf-8")


def _write_weights(path: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save

    # safetensors refuses tensors that share memory or are not contiguous; a file it makes is its owner's alone.
    path.write_bytes(save({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}))


def _fidelity(outcome: Outcome, figures: dict[str, Any]) -> dict[str, Any]:
    links = [item.to_json() for item in outcome.links]
    return {"verdict": figures["verdict"], "figures": outcome.fidelity, "links": links}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: is missing: the run was not written to its end") from None
    except ValueError:
        raise InputError(f"{path}: is not JSON: the file is damaged, run the scenario again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a JSON object: the file is damaged, run the scenario again")
    return content


def _read_events(path: Path) -> list[Event]:
    """Read events as far as they are whole."""
    events: list[Event] = []
    if not path.is_file():
        return events
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                events.append(Event.from_json(line))
            except (ValueError, KeyError, AttributeError):
                if line.endswith("\n"):
                    raise InputError(f"{path}:{number}: is not an event: the file is damaged") from None
    return events
