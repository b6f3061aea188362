"""The link capacity of this host: measured in a container like the shaper's, and stored for later runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, ContainerError
from pydantic import TypeAdapter, ValidationError

from testbed.common.errors import HostError, InputError
from testbed.common.quantities import format_rate
from testbed.experiment import Experiment
from testbed_controller.lab.containers import SHAPER_CAPABILITIES
from testbed_controller.lab.images import find_tags
from testbed_controller.lab.removal import RUN, remove_run
from testbed_controller.shaping.backend import environment_for
from testbed_controller.shaping.capability import RATES, Capability

_CAPABILITY = TypeAdapter(Capability)


def measure(client: docker.DockerClient, backend: str) -> Capability:
    """Measure a link backend for some seconds and store the result; raises HostError if the measurement fails."""
    image = find_tags(client).shaper
    try:
        output = run_in_shaper_image(
            client,
            image,
            ["python3", "-m", "testbed_controller.shaping.capability", backend],
            [backend],
        )
    except APIError as error:
        raise HostError(f"the engine refused: {error.explanation}") from error
    measured = Capability(**json.loads(output))
    store(measured)
    return measured


def run_in_shaper_image(
    client: docker.DockerClient, image: str, command: list[str], backends: Iterable[str]
) -> bytes:
    """Return the output of a command in a container with the shaper's rights, these backends and no network.

    Raises HostError with the last line of a failed command's errors, and APIError if the engine refuses.
    """
    run = f"doctor-{secrets.token_hex(4)}"
    try:
        output: bytes = client.containers.run(
            image,
            command,
            name=f"testbed-{run}",
            labels={RUN: run},
            environment=environment_for(backends),
            cap_drop=["ALL"],
            cap_add=SHAPER_CAPABILITIES,
            pid_mode="host",
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": "size=16m", "/run": "size=16m"},
            # The proxy URLs in the user's Docker configuration often contain a password.
            use_config_proxy=False,
        )
    except ContainerError as error:
        errors = error.stderr
        text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
        lines = str(text).strip().splitlines()
        last_line = lines[-1] if lines else f"status {error.exit_status}"
        raise HostError(last_line) from None
    finally:
        remove_run(client, run, recheck=False)
    return output


def store(measured: Capability) -> None:
    """Store a measurement for later runs."""
    path = _storage_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _load()
    content[measured.backend] = asdict(measured)
    # Another command may read the file at the same time, so a draft is written and renamed.
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({**content, "host": _host_identity()}))
    draft.replace(path)


def load_measurements() -> list[Capability]:
    """Return the measurements of the host with the current kernel, possibly none."""
    measurements = []
    for name, fields in _load().items():
        # Another version of the testbed may have stored other fields.
        with contextlib.suppress(ValidationError):
            if name != "host":
                measurements.append(_CAPABILITY.validate_python(fields))
    return measurements


def check_rates(experiment: Experiment, backend: str) -> None:
    """Refuse rates above the host's measured capacity; ``auto`` allows the fastest backend.

    Raises InputError with the link and the highest possible rate.
    """
    measurements = []
    for measured in load_measurements():
        if backend in ("auto", measured.backend):
            measurements.append(measured)
    if not measurements:
        return
    # A link without a rate is as fast as the host allows, so it cannot exceed the capacity.
    fastest = max(
        experiment.links,
        key=lambda pair: experiment.links[pair].rate or 0.0,
        default=None,
    )
    if fastest is None:
        return
    requested = experiment.links[fastest].rate
    if requested is None:
        return
    capacity = max(measured.rate or 0.0 for measured in measurements)
    # Rates below the lowest tested rate were not measured, so they are not refused.
    if requested <= capacity or requested < min(RATES):
        return
    advice = f"use at most {format_rate(capacity)}"
    if not capacity:
        advice = f"use less than {format_rate(min(RATES))}"
    raise InputError(
        f"the link {fastest[0]} -> {fastest[1]} needs {format_rate(requested)}, above the measured capacity of this "
        f"host: {advice} (or omit the rate for full speed), measure again with 'testbed doctor --measure', or continue "
        "with --accept-links"
    )


def _storage_path() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "testbed" / "links.json"


def _host_identity() -> list[object]:
    """Return host name, kernel and number of processors; measurements are invalid after a change of any of them."""
    return [os.uname().nodename, os.uname().release, os.cpu_count()]


def _load() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        stored = json.loads(_storage_path().read_text())
        if isinstance(stored, dict) and stored.pop("host", None) == _host_identity():
            return stored
    return {}
