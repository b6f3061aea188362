"""What links this host was measured to carry: measured in a container like the shaper's, and kept between runs."""

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

from testbed.common.errors import HostError, InputError
from testbed.common.quantities import format_rate
from testbed.experiment import Experiment
from testbed_controller.lab.containers import SHAPER_CAPABILITIES
from testbed_controller.lab.images import present_names
from testbed_controller.lab.removal import RUN, remove_run
from testbed_controller.shaping.backend import environment_for
from testbed_controller.shaping.capability import Capability


def measure(client: docker.DockerClient, backend: str) -> Capability:
    """Measure a backend, some seconds, and keep what was found; raises HostError when it cannot be had here."""
    image = present_names(client).shaper
    try:
        said = in_shaper(client, image, ["python3", "-m", "testbed_controller.shaping.capability", backend], [backend])
    except APIError as error:
        raise HostError(f"the engine refuses: {error.explanation}") from error
    found = Capability(**json.loads(said))
    keep(found)
    return found


def in_shaper(client: docker.DockerClient, image: str, command: list[str], backends: Iterable[str]) -> bytes:
    """Return the output of a command in a container with the shaper's rights, these link backends and no network.

    Raises HostError with the last line of its errors when it fails, APIError when the engine refuses.
    """
    run = f"doctor-{secrets.token_hex(4)}"
    try:
        said: bytes = client.containers.run(
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
            use_config_proxy=False,
        )
    except ContainerError as error:
        text = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        raise HostError((text.strip().splitlines() or [f"status {error.exit_status}"])[-1]) from None
    finally:
        remove_run(client, run, settle=False)
    return said


def keep(found: Capability) -> None:
    """Note it for later runs on this host."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({**_kept(), found.backend: asdict(found), "host": _host()}))
    draft.replace(path)


def known() -> list[Capability]:
    """Return what was measured on this host with this kernel, if anything was."""
    return [Capability(**each) for name, each in _kept().items() if name != "host"]


def check(experiment: Experiment, backend: str) -> None:
    """Refuse rates above what this host was measured to carry; ``auto`` means by any backend.

    Raises InputError naming the link and the nearest rate that works.
    """
    carried = [each.rate for each in known() if each.rate is not None and backend in ("auto", each.backend)]
    fastest = max(experiment.links, key=lambda pair: experiment.links[pair].rate or 0.0, default=None)
    if not carried or fastest is None:
        return
    asked = experiment.links[fastest].rate
    if asked is not None and asked > max(carried):
        raise InputError(
            f"the link {fastest[0]} -> {fastest[1]} asks for {format_rate(asked)}, more than this host was measured to "
            f"carry: use at most {format_rate(max(carried))} (or no rate at all, which is as fast as the host), "
            "measure again with 'testbed doctor --measure', or try all the same with --accept-links"
        )


def _path() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "testbed" / "links.json"


def _host() -> list[object]:
    """Return what the figures hold for: another kernel, or another number of processors, makes them void."""
    return [os.uname().nodename, os.uname().release, os.cpu_count()]


def _kept() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        kept = json.loads(_path().read_text())
        if kept.pop("host", None) == _host():
            return dict(kept)
    return {}
