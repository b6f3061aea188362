"""The persistent state of a run: token and scenario, in a file readable by its owner only."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from testbed.common.errors import InputError
from testbed.wire.token import derived
from testbed_controller.lab.engineaddress import EngineAddress
from testbed_controller.lab.paths import state_folder


@dataclass(frozen=True)
class RunState:
    """The state of one run, for `testbed down`, `fault`, `link`, `ps` and `logs` in other processes."""

    run: str
    """ID of the run."""
    token: str
    """Secret from which the tokens of all containers are derived."""
    scenario: dict[str, Any] = field(default_factory=dict)
    """The scenario of the trial, as the tree of values in its file."""
    point: dict[str, Any] = field(default_factory=dict)
    """Values of the sweep in this trial, by key."""
    repetition: int = 0
    """Number of the repetition, counted from 0."""
    results: str | None = None
    """Results folder of the run; None for a lab without a run."""
    lease: float | None = None
    """Lease of the containers in seconds; None for a lab that outlives its controller."""
    engine: EngineAddress | None = None
    """Engine of the run; None for a run on several hosts."""
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """Devices on each of several hosts, by docker context; empty for a lab on one engine."""
    ways: list[tuple[str, str, float]] = field(default_factory=list)
    """Measured delays between hosts: (source host, destination host, seconds)."""

    def token_of(self, name: str) -> str:
        """Return the token of the control API of a device or of the shaper.

        A container knows only its own token, so a program cannot control other devices.
        """
        return derived(self.token, "control", name)


def new_id(scenario: str) -> str:
    """Return a unique run ID: the scenario's name and eight random hexadecimal digits.

    >>> new_id("quickstart").startswith("quickstart-")
    True
    """
    return f"{scenario}-{secrets.token_hex(4)}"


def path_of(run: str) -> Path:
    """Return the path of a run's state file, existing or not."""
    return state_folder() / f"{run}.json"


def write(state: RunState) -> None:
    """Write or replace the state file atomically, readable by the owner only."""
    _write_private(path_of(state.run), asdict(state))


def write_targets(state: RunState, urls: Mapping[str, str]) -> None:
    """Write a Prometheus target file for the devices of a run (name -> control URL), with their tokens.

    The format is that of ``file_sd_configs``; JSON is valid YAML.
    """
    targets = []
    for name, url in urls.items():
        parts = urlsplit(url)
        labels = {
            "run": state.run,
            "device": name,
            "__metrics_path__": f"{parts.path}/metrics",
            "__param_token": state.token_of(name),
        }
        targets.append({"targets": [parts.netloc], "labels": labels})
    _write_private(state_folder() / f"{state.run}.targets.yml", targets)


def _write_private(target: Path, content: object) -> None:
    # Created with its final permissions: the content has the run's tokens.
    draft = target.with_suffix(f".{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    draft.replace(target)


def read(run: str) -> RunState:
    """Return the state of a run.

    Raises InputError for an unknown run of this user, and for a state that this version cannot read.
    """
    path = path_of(run)
    try:
        document = json.loads(path.read_text())
        if document.get("engine") is not None:
            document["engine"] = EngineAddress(**document["engine"])
        return RunState(**document)
    except FileNotFoundError:
        existing = ", ".join(runs()) or "none"
        raise InputError(f"unknown run '{run}' (runs: {existing})") from None
    # AttributeError: a list instead of a mapping.
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path}: was written by another version of the testbed, or is damaged: remove the run with "
            f"'testbed down {run}'"
        ) from None


def readable() -> list[RunState]:
    """Return the states of all runs that this version can read, oldest first.

    A damaged file must not hinder commands about all other runs.
    """
    states = []
    for run in runs():
        with suppress(InputError):
            states.append(read(run))
    return states


def _find(run: str) -> RunState | None:
    return next((state for state in readable() if state.run == run), None)


def hosts_of(run: str) -> dict[str, list[str]]:
    """Return the devices on each host of a distributed run; empty for other, unknown and unreadable runs."""
    state = _find(run)
    return {} if state is None else state.hosts


def engine_of(run: str) -> EngineAddress | None:
    """Return the engine of a run; None for runs on several hosts, and for unknown and unreadable runs."""
    state = _find(run)
    return None if state is None else state.engine


def runs() -> list[str]:
    """Return the IDs of all runs with a state file, oldest first."""
    ages = []
    for path in state_folder().glob("*.json"):
        # Another command may remove a run meanwhile.
        with suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime, path.stem))
    return [run for _, run in sorted(ages)]


def choose(run: str | None) -> str:
    """Return ``run`` or, if None, the only existing run.

    Raises InputError if no run or several runs exist.
    """
    # The run need not have a state file: `testbed down` also removes runs without one.
    if run is not None:
        return run
    existing = runs()
    if not existing:
        raise InputError(
            "no run is up: start one with 'testbed up SCENARIO' or 'testbed run SCENARIO'"
        )
    if len(existing) > 1:
        raise InputError(f"several runs are up: choose one of {', '.join(existing)}")
    return existing[0]


def forget(run: str) -> None:
    """Delete the state file and the companion files, if present."""
    for path in state_folder().glob(f"{run}.*"):
        path.unlink(missing_ok=True)


def writing(results: Path) -> str:
    """Return the run writing to a results folder; raises InputError if none does."""
    for state in readable():
        if state.results == str(results):
            return state.run
    raise InputError(f"{results}: no active run writes to this folder")


def results_of(run: str) -> Path | None:
    """Return the results folder of a run; None for a lab without a run, or a run of another user."""
    state = _find(run)
    return None if state is None or state.results is None else Path(state.results)
