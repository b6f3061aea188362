"""Start-up time of devices until shaped and healthy, compared with bare containers of the same image."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from testbed.hardware import DeviceSpec
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.lab.containers import device_settings, inspect, make_container
from testbed_controller.lab.engine import connect
from testbed_controller.lab.health import is_healthy
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.lab import CREATION_WORKERS, Lab
from testbed_controller.lab.removal import remove_run
from testbed_controller.lab.runstate import RunState
from testbed_controller.shaping.namespaces import Namespace
from tools.bench.measurement import Measurement

DEVICE_COUNTS = (4, 16, 64)
"""Numbers of devices that are started."""
RATIO_AT = 16
"""Number of devices with a target."""
TARGET = 1.5
"""Maximum ratio of the testbed's start-up time to the start-up time of bare containers."""


def make_scenario(devices: int) -> Scenario:
    """Return a scenario of devices without work."""
    return Scenario.model_validate(
        {
            "name": "bench-startup",
            "devices": {
                "source": {},
                "worker": {"count": devices - 1, "profile": "raspberry-pi-4b"},
            },
            "network": {"link": {"rate": "50mbit", "delay": "5ms"}},
            "workload": {
                "task": "infer",
                "model": {"name": "mlp"},
                "method": {"name": "exchange"},
            },
        }
    )


def time_testbed(devices: int) -> tuple[float, float]:
    """Return the seconds to create a mesh of shaped, healthy devices, and the seconds to remove the mesh."""
    trial = trials(make_scenario(devices))[0]
    began = time.monotonic()
    lab = Lab.create(trial)
    created = time.monotonic()
    lab.down()
    return created - began, time.monotonic() - created


def time_bare_containers(devices: int) -> float:
    """Return the seconds until ``devices`` containers, created as by the testbed, answer their health check.

    The containers have no shaper and no network, so the check runs inside their namespaces, which needs root.
    """
    client = connect()
    image = ensure_images(client, lambda _text: None).device
    specs = trials(make_scenario(devices))[0].experiment.devices
    state = RunState(f"bench-bare-{secrets.token_hex(4)}", "token")
    addresses = {}
    for number, spec in enumerate(specs, 2):
        addresses[spec.name] = f"198.18.0.{number}"
    began = time.monotonic()

    def launch(spec: DeviceSpec) -> Namespace:
        settings = device_settings(state, image, spec, addresses)
        make_container(client, state.run, spec.name, settings)
        container = inspect(client, state.run, spec.name, "", lambda _name, _found: "")
        return Namespace.of_process(container.pid)

    def is_ready(namespace: Namespace) -> bool:
        url = f"http://127.0.0.1:{CONTROL_PORT}"
        return namespace.run(lambda: is_healthy(url))

    try:
        # The testbed starts the same number of containers at once.
        with ThreadPoolExecutor(CREATION_WORKERS) as pool:
            waiting = list(pool.map(launch, specs))
        while waiting:
            waiting = [namespace for namespace in waiting if not is_ready(namespace)]
            time.sleep(0.02)
        return time.monotonic() - began
    finally:
        remove_run(client, state.run, recheck=False)


def measure(counts: tuple[int, ...] = DEVICE_COUNTS) -> Iterator[Measurement]:
    """Yield the seconds for each number of devices, with and without the testbed, and their ratio."""
    for devices in counts:
        bare_seconds = time_bare_containers(devices)
        creation_seconds, removal_seconds = time_testbed(devices)
        yield Measurement(f"start-up of {devices} bare containers", bare_seconds, "s")
        yield Measurement(
            f"start-up of {devices} devices, shaped and healthy", creation_seconds, "s"
        )
        yield Measurement(f"removal of {devices} devices", removal_seconds, "s")
        target = TARGET if devices == RATIO_AT else None
        ratio = creation_seconds / bare_seconds
        name = f"start-up of {devices} devices, ratio to bare"
        yield Measurement(name, ratio, "x", target)
