"""Conversion of a lab, the containers and links of a run, into a docker compose project. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from testbed.common import yamltext
from testbed.network.checks import SHAPER
from testbed.scenario.schema import Trial
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.lab.clients import make_attachment
from testbed_controller.lab.containers import device_settings, shaper_settings
from testbed_controller.lab.networks import (
    CONTROL_OPTIONS,
    data_subnet,
    device_addresses,
)
from testbed_controller.lab.removal import RUN
from testbed_controller.lab.runstate import RunState
from testbed_controller.shaping.backend import AUTO
from testbed_controller.shaping.plan import Endpoint

HOST_PORT = 8710
"""Port of the host that leads to the shaper and, through the shaper, to the devices."""
IMAGE_VARIABLE = "${{TESTBED_{}_IMAGE:?run 'testbed setup images --env > .env' first}}"
"""Reference to the image of a ``DEVICE`` or the ``SHAPER``, for `str.format`.

Compose prints the text after the question mark if the variable has no value."""
TOKEN_VARIABLE = "${TESTBED_TOKEN:?}"
"""Reference to the token of all containers of the project."""


def _log_driver(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"driver": config["Type"], "options": dict(config["Config"])}


def _anonymous_volumes(mounts: Iterable[Mapping[str, Any]]) -> list[str]:
    # The mounts have no names. Their labels are left out, because 'testbed down' would remove volumes with the label of
    # a run.
    return [mount["Target"] for mount in mounts]


def _tmpfs(mounts: Mapping[str, str]) -> list[str]:
    return [f"{path}:{options}" for path, options in mounts.items()]


_COMPOSE_SETTINGS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "CapAdd": ("cap_add", list),
    "CapDrop": ("cap_drop", list),
    # The only request of a device is for all GPUs of the host.
    "DeviceRequests": ("gpus", lambda _: "all"),
    "ExtraHosts": ("extra_hosts", list),
    "LogConfig": ("logging", _log_driver),
    "Memory": ("mem_limit", int),
    "MemorySwap": ("memswap_limit", int),
    "Mounts": ("volumes", _anonymous_volumes),
    "NanoCpus": ("cpus", lambda nano_cpus: nano_cpus / 1e9),
    "PidMode": ("pid", str),
    "PidsLimit": ("pids_limit", int),
    "ReadonlyRootfs": ("read_only", bool),
    "SecurityOpt": ("security_opt", list),
    "Sysctls": ("sysctls", dict),
    "Tmpfs": ("tmpfs", _tmpfs),
}
"""Settings of the engine API used by the lab, with the name and the conversion for compose."""
_SET_BY_PROJECT = ("NetworkMode", "PortBindings")
"""Settings without a conversion: `compose_project` gives each service its network and ports."""

_FILE_HEAD = """\
# Made by 'testbed export compose': the devices, links and hardening of the scenario {name}, without the controller.
#   testbed setup images --env > .env     # builds the images; their tags, and a new random token
#   docker compose up -d && ./shape # containers, then their links; ./shape again after a device has restarted
"""

# links.json has a text such as "pid of source" in place of each process ID. For each device, the script adds an edit of
# sed that replaces this text, quotes included, by the number; `edits` then begins with a semicolon, which is removed.
_SHAPE_SCRIPT = """\
#!/bin/sh
# Give the running devices the links of links.json. Run this again after a device has restarted.
set -eu
cd "$(dirname "$0")"
. ./.env
compose=$(docker compose version >/dev/null 2>&1 && echo "docker compose" || echo "docker-compose")
edits=''
for device in {devices}; do
    pid=$(docker inspect --format '{{{{.State.Pid}}}}' "$($compose ps -q "$device")")
    edits="$edits;s/\\"pid of $device\\"/$pid/"
done
sed "${{edits#;}}" links.json | curl --silent --show-error --fail-with-body -H "Authorization: Bearer $TESTBED_TOKEN" \\
    -H 'Content-Type: application/json' --data @- http://127.0.0.1:{port}/attach
"""


def compose_project(trial: Trial, images: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the compose project by name; ``images`` are the tags of devices with their own image."""
    name = trial.scenario.name
    experiment = trial.experiment
    specs = experiment.devices
    subnet = data_subnet(trial.scenario.network.subnet, len(specs))
    ips = device_addresses(subnet, [spec.name for spec in specs])
    addresses = {device: str(address) for device, address in ips.items()}
    state = RunState(run=name, token=TOKEN_VARIABLE)
    services = {}
    endpoints = []
    for spec in specs:
        image = images.get(spec.name, IMAGE_VARIABLE.format("DEVICE"))
        settings = device_settings(state, image, spec, addresses)
        services[spec.name] = {**compose_service(settings), "network_mode": "none"}
        address = addresses[spec.name]
        endpoints.append(
            Endpoint(
                spec.name,
                pid=0,
                address=address,
                uplink=spec.uplink,
                downlink=spec.downlink,
                network=str(subnet),
            )
        )
    # With AUTO, the shaper chooses a backend that its kernel supports.
    shaper = shaper_settings(state, IMAGE_VARIABLE.format("SHAPER"), AUTO)
    services[SHAPER] = {
        **compose_service(shaper),
        "networks": ["control"],
        "ports": [f"127.0.0.1:{HOST_PORT}:{CONTROL_PORT}"],
    }
    networks = {"control": {"driver_opts": dict(CONTROL_OPTIONS)}}
    body = make_attachment(
        endpoints, experiment.links, experiment.seed, experiment.cells
    )
    # Process IDs are known only while the containers run, so the script `shape` inserts them.
    for endpoint in body["endpoints"]:
        endpoint["pid"] = f"pid of {endpoint['name']}"
    project = yamltext.written({"services": services, "networks": networks}, width=140)
    return {
        "docker-compose.yml": _FILE_HEAD.format(name=name) + project,
        "links.json": json.dumps(body, indent=1) + "\n",
        "shape": _SHAPE_SCRIPT.format(devices=" ".join(addresses), port=HOST_PORT),
    }


def compose_service(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's settings as a compose service, without networks and ports.

    Raises KeyError for a setting without an equivalent.
    """
    converted = {}
    for key, value in settings.items():
        if key not in ("host_config", "ports", "labels"):
            converted[key] = value
    # All containers share the project's token, since no controller derives one for each.
    converted["environment"] = {
        **converted["environment"],
        "TESTBED_TOKEN": TOKEN_VARIABLE,
    }
    # The label of runs is left out, because 'testbed down' would remove containers with it.
    labels = dict(settings["labels"])
    labels.pop(RUN, None)
    converted["labels"] = labels
    for key, value in settings["host_config"].items():
        if key not in _SET_BY_PROJECT:
            compose_key, convert = _COMPOSE_SETTINGS[key]
            converted[compose_key] = convert(value)
    return converted
