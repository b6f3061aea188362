"""What a run must remember outside the engine: its token and scenario, in a file for its owner only."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
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
    """One run, as `testbed down`, `fault`, `link`, `ps` and `logs` find it from another process."""

    run: str
    token: str
    scenario: dict[str, Any] = field(default_factory=dict)
    point: dict[str, Any] = field(default_factory=dict)
    repetition: int = 0
    results: str | None = None
    """The folder that the run is written to; None of a lab that stands without a run."""
    lease: float | None = None
    """Seconds after which its containers end when nobody renews that; None of a lab that outlives its controller."""
    engine: EngineAddress | None = None
    """The engine that the run was made on; None of a run over several hosts."""
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """The devices on each of several hosts, by the docker context of its engine; empty of a lab on one engine."""
    ways: list[tuple[str, str, float]] = field(default_factory=list)
    """From which host to which by how many seconds the way between them delays."""

    def token_of(self, name: str) -> str:
        """Return what the control API of a device, or of the shaper, asks for: none of them knows another's."""
        return derived(self.token, "control", name)


def new_id(scenario: str) -> str:
    """Return an id that no other run has."""
    return f"{scenario}-{secrets.token_hex(4)}"


def path_of(run: str) -> Path:
    """Return where a run's state file is, whether or not it exists."""
    return state_folder() / f"{run}.json"


def write(state: RunState) -> None:
    """Write or replace the state file in one step; nobody else may read it."""
    _write(path_of(state.run), asdict(state))


def write_targets(state: RunState, urls: Mapping[str, str]) -> None:
    """Say to Prometheus where the devices of a run (name -> control URL) are, and with which tokens.

    A file of targets as its ``file_sd_configs`` reads and follows them; JSON is YAML, too.
    """
    _write(
        state_folder() / f"{state.run}.targets.yml",
        [
            {
                "targets": [urlsplit(url).netloc],
                "labels": {
                    "run": state.run,
                    "device": name,
                    "__metrics_path__": f"{urlsplit(url).path}/metrics",
                    "__param_token": state.token_of(name),
                },
            }
            for name, url in urls.items()
        ],
    )


def _write(target: Path, content: object) -> None:
    draft = target.with_suffix(f".{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    draft.replace(target)


def read(run: str) -> RunState:
    """Return what was written.

    Raises InputError where there is no such run of this user.
    """
    try:
        found = json.loads(path_of(run).read_text())
    except FileNotFoundError:
        known = ", ".join(runs()) or "there is none"
        raise InputError(f"there is no run '{run}' here (runs: {known})") from None
    engine = found.get("engine")
    return RunState(**{**found, "engine": None if engine is None else EngineAddress(**engine)})


def hosts_of(run: str) -> dict[str, list[str]]:
    """Return the devices on each of the hosts that a run is spread over; empty of others, and of unknown ones."""
    return read(run).hosts if run in runs() else {}


def runs() -> list[str]:
    """Return the ids of all runs with a state file, in the order of their making."""
    files = sorted(state_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [path.stem for path in files]


def choose(run: str | None) -> str:
    """Return the run meant where a command may leave it out: the one there is.

    Raises InputError where there is none, or there are several.
    """
    known = runs()
    if run is not None:
        return run
    if not known:
        raise InputError("no run is up: start one with 'testbed up SCENARIO' or 'testbed run SCENARIO'")
    if len(known) > 1:
        raise InputError(f"several runs are up, say which of {', '.join(known)}")
    return known[0]


def forget(run: str) -> None:
    """Remove the state file and what lies beside it, as far as they are still there."""
    for path in state_folder().glob(f"{run}.*"):
        path.unlink(missing_ok=True)


def writing(results: Path) -> str:
    """Return the run that is written to a folder; raise InputError where there is none, or no longer."""
    for run in runs():
        if read(run).results == str(results):
            return run
    raise InputError(f"{results}: no run that is up is written there")


def results_of(run: str) -> Path | None:
    """Return the folder that a run is written to; None of a lab without a run, or one of another user."""
    results = read(run).results if run in runs() else None
    return None if results is None else Path(results)
