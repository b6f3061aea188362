"""Writing of results folders: each event of a run as it happens, so that results survive a crash, and the manifest.

The manifest, `manifest.json`, states how a run was made and how it ended: command, versions, status, and error. The
files of a results folder are described in `testbed_controller.results.files`, which reads them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TextIO

from testbed.common import usercode
from testbed.common.errors import HostError, InputError
from testbed.common.usercode import Code
from testbed.common.version import VERSION
from testbed.common.yamltext import written
from testbed.plan import Plan
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.events import Event, finite
from testbed.trace.log import EventLog
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed.work import WorkloadPart
from testbed_controller.lab.paths import ROOT
from testbed_controller.results import perfetto
from testbed_controller.results.declared import (
    metrics_spec_of_trial,
    store_metrics_spec,
)
from testbed_controller.results.run import Run

RUNNING = "running"
"""Status of a run in progress, and of a run whose process was killed."""
IGNORED_CHANGES = (
    ":!docs",
    ":!papers/*.md",
    ":!papers/*.json",
    ":!papers/*.svg",
    ":!papers/*/figures.yaml",
)
"""Files without effect on runs, as git patterns that exclude them."""
RECORDED_PACKAGES = (
    "torch",
    "numpy",
    "flask",
    "waitress",
    "requests",
    "pydantic",
    "docker",
    "pyroute2",
)
"""Packages whose versions are in the manifest."""


def initial_manifest(
    trial: Trial,
    runtime: Literal["emulate", "simulate"],
    weights: Mapping[str, Any] | str | None,
) -> dict[str, Any]:
    """Return the manifest at the start of a run, with status ``running``.

    ``weights`` describes the initial weights: a text, or properties of their file.
    """
    versions: dict[str, str | None] = {
        "testbed": VERSION,
        "python": platform.python_version(),
    }
    for name in RECORDED_PACKAGES:
        versions[name] = _package_version(name)
    return {
        "scenario": trial.scenario.name,
        "seed": trial.scenario.seed,
        "point": trial.point,
        "repetition": trial.repetition,
        "runtime": runtime,
        "status": RUNNING,
        "error": None,
        "wall_seconds": 0.0,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weights": weights,
        "command": shlex.join(["testbed", *sys.argv[1:]]),
        "revision": revision(),
        "versions": versions,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "host": {},
    }


def final_manifest(initial: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Return the manifest at the end of a run."""
    return {
        **initial,
        "status": outcome.status,
        "error": outcome.error,
        "wall_seconds": outcome.wall_seconds,
        "host": outcome.host,
    }


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision(checkout: Path = ROOT) -> str | None:
    """Return the git revision of the code, with ``-dirty`` appended if modified; None outside a checkout.

    Changes of files in ``IGNORED_CHANGES``, such as documentation, are ignored.
    """
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
        return result.stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", *IGNORED_CHANGES
        )
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


class Recorder:
    """The results folder of a run, written from its start.

    Scenario, plan and manifest are written first, each event as it happens, and derived files at the end. `files.load`
    also reads the folder of a run whose process was killed. With ``events=False``, the events and their trace, which
    take most of the space, are not written.
    """

    def __init__(
        self,
        folder: Path,
        trial: Trial,
        plan: Plan,
        runtime: Literal["emulate", "simulate"],
        weights: Mapping[str, Any] | str | None = "random, drawn from the seed",
        owned: Mapping[str, Mapping[int, int]] | None = None,
        events: bool = True,
    ) -> None:
        """Create ``folder``, which must be empty or missing.

        ``weights`` is the file of the initial weights, ``owned`` the number of training samples by device and class.
        Raises InputError for a folder with contents, HostError for a folder without write access.
        """
        self.path = folder.absolute()
        self._trial = trial
        self._plan = plan
        self._metrics_spec = metrics_spec_of_trial(trial)
        self.keeps_events = events
        self._lines_written = 0
        self._latest_time = float("-inf")
        """Time of the last event in seconds of the run."""
        self._is_ordered = True
        """Whether the times of all events so far rise."""
        self._is_finished = False
        with self._report_failures():
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise _folder_taken(folder)
            self._events = self._open_events(runtime)
            self._manifest = initial_manifest(trial, runtime, weights)
            if owned:
                self._manifest["owned"] = owned
            self._write_manifest(self._manifest)
            scenario, texts = with_local_sources(trial.scenario)
            values = scenario_values(replace(trial, scenario=scenario))
            texts = {"scenario.yaml": written(values), **texts}
            for name, text in texts.items():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_text(text, encoding="utf-8")
            store_metrics_spec(self.path, trial, self._metrics_spec, {})
            _write_json(self.path / "plan.json", plan.model_dump(mode="json"))

    def _open_events(self, runtime: Literal["emulate", "simulate"]) -> TextIO:
        if not self.keeps_events:
            return Path(os.devnull).open("w", encoding="utf-8")
        # Line by line, an emulated run loses no event whatever ends this process. A simulation has thousands of events
        # per second and can be repeated, so it is buffered.
        buffering = 1 if runtime == "emulate" else -1
        try:
            # Exclusive, as another run may have taken the folder since it was found empty.
            return (self.path / "events.jsonl").open(
                "x", encoding="utf-8", buffering=buffering
            )
        except FileExistsError:
            raise _folder_taken(self.path) from None

    def event(self, event: Event) -> None:
        """Write an event. Raises `HostError` on failure."""
        self.lines(event.to_json() + "\n")
        if event.time < self._latest_time:
            self._is_ordered = False
        self._latest_time = event.time

    def lines(self, text: str) -> None:
        """Write event lines, already in order. Raises `HostError` on failure."""
        with self._report_failures():
            self._events.write(text)
        self._lines_written += text.count("\n")

    def finish(self, outcome: Outcome) -> Run:
        """Write the outcome and everything computed from the events; return the run."""
        manifest = final_manifest(self._manifest, outcome)
        log = EventLog.made_of(outcome.events)
        # Rounded as in the file, so that metrics recomputed from the file are the same.
        stored = replace(outcome, events=log.rounded(), weights_file=None, parts={})
        spec = self._metrics_spec
        values = metrics(stored, self._trial.experiment, self._plan, spec)
        run = Run(self.path, self._trial, self._plan, stored, manifest, values, spec)
        # Events of several devices may arrive out of order, and some only with the outcome.
        must_rewrite = not self._is_ordered or self._lines_written != len(log)
        with self._report_failures():
            self._events.close()
            if self.keeps_events and must_rewrite:
                _replace_file(self.path / "events.jsonl", log.lines())
            if outcome.weights_file is not None:
                (self.path / "weights.safetensors").write_bytes(outcome.weights_file)
            for device, weights in outcome.parts.items():
                (self.path / f"weights-{device}.safetensors").write_bytes(weights)
            store_metrics_spec(self.path, self._trial, spec, values)
            _write_metrics(run)
            if self.keeps_events:
                _write_trace(run)
            self._write_manifest(manifest)
        self._is_finished = True
        return run

    def abandon(self, error: BaseException) -> None:
        """Record the error of a run without an outcome; a run without events leaves no folder.

        After `finish`, the results are complete and are not changed.
        """
        if self._is_finished:
            return
        if self._lines_written == 0:
            self._events.close()
            shutil.rmtree(self.path, ignore_errors=True)
            return
        message = str(error) or type(error).__name__
        # The error may be a full disk: the written results remain.
        with suppress(OSError):
            self._events.close()
            self._write_manifest(
                {**self._manifest, "status": "failed", "error": message}
            )

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(finite(manifest), indent=2, default=str)
        _replace_file(self.path / "manifest.json", [text + "\n"])

    @contextmanager
    def _report_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._write_error(error) from None

    def _write_error(self, error: OSError) -> HostError:
        return HostError(f"{self.path}: cannot be written: {error.strerror or error}")


def _folder_taken(folder: Path) -> InputError:
    return InputError(
        f"{folder}: already exists: name another folder, or remove this one"
    )


def rebuild(run: Run) -> None:
    """Rewrite all files computed from the events of a run: metrics, verdict and trace."""
    _write_metrics(run)
    _write_trace(run)


def _write_metrics(run: Run) -> None:
    expected = [asdict(expectation) for expectation in run.expectations]
    _write_json(run.path / "metrics.json", {**run.metrics, "expectations": expected})
    _write_json(run.path / "fidelity.json", _fidelity_values(run.outcome, run.metrics))
    if run.metrics["series"]["objects"]:
        _write_json(run.path / "boxes.json", run.metrics["series"]["objects"])


def _write_trace(run: Run) -> None:
    with (run.path / "trace.json").open("w", encoding="utf-8") as file:
        perfetto.write(file, run.outcome.events, run.end, run.trial.scenario.name)


def create_numbered_folder(folder: Path) -> Path:
    """Create and return ``folder``, with a number appended if already taken.

    Raises HostError if the folder cannot be created.
    """
    candidate = folder
    for number in count(2):
        try:
            candidate.mkdir(parents=True)
            break
        except FileExistsError:
            candidate = folder.with_name(f"{folder.name}-{number}")
        except OSError as error:
            raise HostError(
                f"{candidate}: cannot be written: {error.strerror or error}"
            ) from None
    return candidate


def scenario_values(trial: Trial) -> dict[str, Any]:
    """Return the scenario of a run as plain values by key."""
    return trial.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)


def with_local_sources(scenario: Scenario) -> tuple[Scenario, dict[str, str]]:
    """Prepare a scenario for storage together with the scenario's Python files.

    Returns the scenario with the names of its Python files relative to the results folder, and the texts of the files
    by this name. The texts include the modules that the files import from their own folder.
    """
    sources: dict[str, str] = {}
    changed_parts: dict[str, Any] = {}
    folder = scenario.source.folder
    for file in _option_files(scenario.workload):
        # Only names without a folder: a path stays valid from the results folder as well.
        if Path(file).name == file:
            code = usercode.read(folder / file, "", ("training", "file"))
            _add_sources(sources, code, "")
    for key, part in scenario.workload.sources().items():
        if part.file is not None:
            code = usercode.read(folder / part.file, part.name, (key, "file"))
            file = _add_sources(sources, code, f"{key}/")
            changed_parts[key] = part.model_copy(update={"file": file})
    workload = scenario.workload.model_copy(update=changed_parts)
    return scenario.model_copy(update={"workload": workload}), sources


def _add_sources(sources: dict[str, str], code: Code, subfolder: str) -> str:
    """Add the texts of a code object to ``sources``; return the name of the main file, which is the first one.

    If another file with one of the names has another text, all names are placed in the subfolder.
    """
    texts = usercode.texts_of(code)
    if any(sources.get(name, text) != text for name, text in texts.items()):
        texts = {subfolder + name: text for name, text in texts.items()}
    for name, text in texts.items():
        sources.setdefault(name, text)
    return next(iter(texts))


def _option_files(workload: WorkloadPart) -> Iterator[str]:
    """Yield the Python files named by workload keys, and by method options at any depth."""
    yield from workload.files()
    sections: list[Mapping[str, Any]] = [workload.method.options()]
    while sections:
        for value in sections.pop().values():
            if isinstance(value, Mapping):
                sections.append(value)
                if "file" in value:
                    yield str(value["file"])


def _replace_file(path: Path, lines: Iterable[str]) -> None:
    """Replace a file atomically, so that a reader or a crash never finds it half written."""
    draft = path.with_name(f".{path.name}")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    draft.replace(path)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(finite(value), indent=2, default=str)
    path.write_text(text + "\n", encoding="utf-8")


def _fidelity_values(outcome: Outcome, values: dict[str, Any]) -> dict[str, Any]:
    links = [item.to_json() for item in outcome.links]
    return {
        "verdict": values["verdict"],
        "measurements": outcome.fidelity,
        "links": links,
    }
