"""Costs of runs on several hosts (``TESTBED_HOSTS``), compared with one host, and of a host without devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import docker

from testbed.scenario.expand import trials
from testbed_controller.hosts.contexts import reach
from testbed_controller.hosts.lab import HostsLab
from testbed_controller.lab.removal import RUN
from tools.bench.measurement import Measurement
from tools.bench.startup import make_scenario

DEVICES = 64
"""Number of devices that are started."""
MOST_RATIO = 1.2
"""Maximum ratio of the start-up on several hosts to the start-up on one."""
MOST_MEMORY = 60e6
"""Maximum memory of the testbed on a host without devices, in bytes."""


def measure(devices: int = DEVICES) -> Iterator[Measurement]:
    """Yield the seconds until devices are shaped and healthy, on one host and on all, and the memory of an empty host.

    Without ``TESTBED_HOSTS``, nothing is measured.
    """
    hosts = []
    for name in os.environ.get("TESTBED_HOSTS", "").split(","):
        if name.strip():
            hosts.append(name.strip())
    if not hosts:
        return
    names = f"of {devices} devices"
    seconds_on_one = _time_start_up(devices, hosts[:1])
    yield Measurement(f"start-up {names} on {hosts[0]}", seconds_on_one, "s")
    seconds_on_all = _time_start_up(devices, hosts)
    yield Measurement(f"start-up {names} on {len(hosts)} hosts", seconds_on_all, "s")
    ratio = seconds_on_all / seconds_on_one
    name = "start-up on several hosts, ratio to one"
    yield Measurement(name, ratio, "x", MOST_RATIO)
    if len(hosts) > 1:
        yield Measurement(
            "memory on a host without devices",
            _empty_host_bytes(hosts) / 1e6,
            "MB",
            MOST_MEMORY / 1e6,
        )


def _time_start_up(devices: int, hosts: Sequence[str]) -> float:
    trial = trials(make_scenario(devices))[0]
    began = time.monotonic()
    lab = HostsLab.create(trial, hosts, {})
    # Without the removal of the devices.
    seconds = time.monotonic() - began
    lab.down()
    return seconds


def _empty_host_bytes(hosts: Sequence[str]) -> float:
    """Return the memory in bytes of the containers on a host without devices."""
    trial = trials(make_scenario(2))[0]
    # All devices on the first host, so that the second has only the testbed's own containers.
    place = {device.name: hosts[0] for device in trial.experiment.devices}
    lab = HostsLab.create(trial, hosts[:2], place)
    try:
        return _containers_bytes(reach(hosts[1]).client, lab.run_id)
    finally:
        lab.down()


def _containers_bytes(client: docker.DockerClient, run: str) -> float:
    total = 0
    for container in client.containers.list(filters={"label": f"{RUN}={run}"}):
        report: Any = container.stats(stream=False)
        usage = report["memory_stats"]
        statistics = usage["stats"]
        # As in `docker stats`: cached files, which the kernel can drop, do not count. The key differs between versions
        # of control groups.
        cached = statistics.get("total_inactive_file")
        if cached is None:
            cached = statistics.get("inactive_file", 0)
        total += usage["usage"] - cached
    return float(total)
