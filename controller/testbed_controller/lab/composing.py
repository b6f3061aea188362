"""A lab as a docker compose project: the settings of its containers, in compose's words. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from testbed.common.yamltext import written
from testbed.network.checks import SHAPER
from testbed.scenario.schema import Trial
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.lab.clients import attachment
from testbed_controller.lab.containers import device_settings, shaper_settings
from testbed_controller.lab.networks import CLOSED, data_subnet, device_addresses
from testbed_controller.lab.runstate import RunState
from testbed_controller.shaping.plan import Endpoint

PORT = 8710
"""Port of the host for the shaper, and through it for the devices."""
IMAGE = "${{TESTBED_{}_IMAGE:?run 'testbed setup images --env > .env' first}}"
TOKEN = "${TESTBED_TOKEN:?}"

_OF_HOST: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "CapAdd": ("cap_add", list),
    "CapDrop": ("cap_drop", list),
    "DeviceRequests": ("gpus", lambda _: "all"),
    "ExtraHosts": ("extra_hosts", list),
    "LogConfig": ("logging", lambda found: {"driver": found["Type"], "options": dict(found["Config"])}),
    "Memory": ("mem_limit", int),
    "MemorySwap": ("memswap_limit", int),
    "Mounts": ("volumes", lambda found: [each["Target"] for each in found]),
    "NanoCpus": ("cpus", lambda found: found / 1e9),
    "PidMode": ("pid", str),
    "PidsLimit": ("pids_limit", int),
    "ReadonlyRootfs": ("read_only", bool),
    "SecurityOpt": ("security_opt", list),
    "Sysctls": ("sysctls", dict),
    "Tmpfs": ("tmpfs", lambda found: [f"{path}:{options}" for path, options in found.items()]),
}
"""Each setting of the engine's that the lab uses: what compose calls it, and how it writes it."""
_ELSEWHERE = ("NetworkMode", "PortBindings")

_HEAD = """\
# Made by 'testbed export compose': the devices, links and hardening of the scenario {name}, without the controller.
#   testbed setup images --env > .env     # builds the images; their tags, and a new random token
#   docker compose up -d && ./shape # containers, then their links; ./shape again after a device has restarted
"""

_SHAPE = """\
#!/bin/sh
# Give the standing devices their links, as links.json has them; again after one has restarted.
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


def project(trial: Trial, images: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the project by name; ``images`` are the tags of devices with one of their own."""
    name, specs = trial.scenario.name, trial.experiment.devices
    subnet = data_subnet(trial.scenario.network.subnet, len(specs))
    addresses = {name: str(each) for name, each in device_addresses(subnet, [spec.name for spec in specs]).items()}
    state = RunState(run=name, token=TOKEN)
    services = {}
    for spec in specs:
        settings = device_settings(state, images.get(spec.name, IMAGE.format("DEVICE")), spec, addresses)
        services[spec.name] = {**service(settings), "network_mode": "none"}
    services[SHAPER] = {
        **service(shaper_settings(state, IMAGE.format("SHAPER"), "auto")),
        "networks": ["control"],
        "ports": [f"127.0.0.1:{PORT}:{CONTROL_PORT}"],
    }
    networks = {"control": {"driver_opts": dict(CLOSED)}}
    endpoints = [
        Endpoint(spec.name, 0, addresses[spec.name], spec.uplink, spec.downlink, str(subnet)) for spec in specs
    ]
    attached = attachment(endpoints, trial.experiment.links, trial.experiment.seed, trial.experiment.cells)
    for endpoint in attached["endpoints"]:
        endpoint["pid"] = f"pid of {endpoint['name']}"
    return {
        "docker-compose.yml": _HEAD.format(name=name) + written({"services": services, "networks": networks}, 140),
        "links.json": json.dumps(attached, indent=1) + "\n",
        "shape": _SHAPE.format(devices=" ".join(addresses), port=PORT),
    }


def service(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container as a service of compose, but for its networks and ports.

    Raises KeyError for a setting that has no word here.
    """
    rest = {key: value for key, value in settings.items() if key not in ("host_config", "ports", "labels")}
    # Compose has the runs' label for its own: what bears it would be removed as what a run has left.
    # Nobody is there to make a token for each: all have the one of the project.
    rest["environment"] = {**rest["environment"], "TESTBED_TOKEN": TOKEN}
    found = {**rest, "labels": {key: value for key, value in settings["labels"].items() if key != "testbed.run"}}
    for key, value in settings["host_config"].items():
        if key not in _ELSEWHERE:
            word, write = _OF_HOST[key]
            found[word] = write(value)
    return found
