"""Start-up: devices created, shaped and healthy, against bare containers of the same image started the same way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docker.types import IPAMConfig, IPAMPool

from controller.lab.containers import control_url
from controller.lab.engine import connect
from controller.lab.health import healthy
from controller.lab.images import ensure_images
from controller.lab.lab import WORKERS, Lab
from controller.lab.networks import free_subnets, host_routes, subnets
from controller.lab.removal import RUN, remove_run
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.wire.ports import CONTROL_PORT
from tools.bench.figure import Measurement

CURVE = (4, 8, 16, 32)
AT = 16
TARGET = 1.5


def scenario(devices: int) -> Scenario:
    """Return that of devices that only have to be there."""
    return Scenario.model_validate(
        {
            "name": "bench-startup",
            "devices": {"source": {}, "worker": {"count": devices - 1, "profile": "raspberry-pi-4b"}},
            "network": {"link": {"rate": "50mbit", "delay": "5ms"}},
            "workload": {"task": "infer", "model": {"name": "mlp"}, "method": {"name": "exchange"}},
        }
    )


def with_testbed(devices: int) -> float:
    """Return the seconds until all devices of a mesh are created, shaped and healthy."""
    trial = trials(scenario(devices))[0]
    began = time.monotonic()
    lab = Lab.create(trial)
    seconds = time.monotonic() - began
    lab.down()
    return seconds


def bare(devices: int) -> float:
    """Return the seconds until as many plain containers of the device image answer their health check.

    They are started in the same way (same parallelism, two networks, a published port), without shaper and shaping.
    """
    client = connect()
    images = ensure_images(client, lambda _text: None)
    run = f"bench-bare-{secrets.token_hex(4)}"
    networks = [f"{run}-control", f"{run}-data"]
    began = time.monotonic()

    def launch(number: int) -> str:
        name = f"{run}-{number}"
        api: Any = client.api  # the published types ask for an endpoint where it takes a mapping of them
        api.create_container(
            images.device,
            name=name,
            labels={RUN: run},
            environment={"TESTBED_RUN": run, "TESTBED_DEVICE": f"d{number}", "TESTBED_TOKEN": run},
            ports=[CONTROL_PORT],
            host_config=api.create_host_config(
                port_bindings={CONTROL_PORT: ("127.0.0.1", None)}, network_mode=networks[0]
            ),
            networking_config=api.create_networking_config({networks[0]: api.create_endpoint_config()}),
        )
        api.connect_container_to_network(name, networks[1])
        api.start(name)
        return control_url(api.inspect_container(name))

    try:
        taken = [*host_routes(), *subnets(client)]
        free = free_subnets("198.18.0.0/15", devices, taken)
        for name in networks:
            pool = IPAMConfig(pool_configs=[IPAMPool(subnet=str(next(free)))])
            client.api.create_network(name, "bridge", ipam=pool, labels={RUN: run}, internal=name == networks[1])
        with ThreadPoolExecutor(WORKERS) as pool_:
            waiting = list(pool_.map(launch, range(devices)))
        while waiting:
            waiting = [url for url in waiting if not healthy(url)]
            time.sleep(0.02)
        return time.monotonic() - began
    finally:
        remove_run(client, run, settle=False)


def measure(curve: tuple[int, ...] = CURVE) -> Iterator[Measurement]:
    """Yield the seconds for each number of devices, with and without the testbed, and their ratio."""
    for devices in curve:
        plain = bare(devices)
        whole = with_testbed(devices)
        yield Measurement(f"start-up of {devices} bare containers", plain, "s")
        yield Measurement(f"start-up of {devices} devices, shaped and healthy", whole, "s")
        target = TARGET if devices == AT else None
        yield Measurement(f"start-up of {devices} devices, ratio to bare", whole / plain, "x", target)
