"""The keeper of a run on a host: the container through which the others are reached, and that removes them."""

from __future__ import annotations

from typing import Any

from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.types import HostConfig, LogConfig, Mount

from controller.hosts.contexts import Host
from controller.hosts.inside.keeper import ENGINE
from controller.lab.containers import container_name, make_container
from controller.lab.removal import ROLE, RUN
from controller.lab.runstate import RunState
from testbed.wire.lease import LEASE

KEEPER = "keeper"
LEASE_SECONDS = 15.0
"""How long a host keeps what a run has there, when it does not hear of the controller."""
_MEMORY = 256 << 20
"""Bytes."""


def make_keeper(host: Host, state: RunState, image: str) -> str:
    """Make and start the keeper; return the name of its container."""
    make_container(host.client, state.run, KEEPER, _settings(host, state, image), None, lambda _found: "")
    return container_name(state.run, KEEPER)


def _settings(host: Host, state: RunState, image: str) -> dict[str, Any]:
    lease = {} if state.lease is None else {LEASE: f"{LEASE_SECONDS:g}"}
    return {
        "image": image,
        "command": ["python3", "-m", "controller.hosts.inside.keeper"],
        "labels": {RUN: state.run, ROLE: KEEPER},
        "environment": {"TESTBED_RUN": state.run, **lease},
        "host_config": HostConfig(
            version=DEFAULT_DOCKER_API_VERSION,
            auto_remove=True,
            cap_drop=["ALL"],
            # To enter the containers' network namespaces, and to be scheduled in time.
            cap_add=["SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"],
            log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "1m"}),
            mem_limit=_MEMORY,
            mounts=[Mount(ENGINE, host.socket, type="bind")],
            network_mode="none",
            pid_mode="host",
            pids_limit=256,
            read_only=True,
            security_opt=["no-new-privileges"],
            tmpfs={"/tmp": "size=16m", "/run": "size=1m,mode=755"},
        ),
    }
