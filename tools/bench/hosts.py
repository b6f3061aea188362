"""Several hosts, those of ``TESTBED_HOSTS``: what they cost against one, and what one costs without devices."""

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
from tools.bench.figure import Measurement
from tools.bench.startup import scenario

DEVICES = 64
RATIO = 1.2
EMPTY = 60e6
"""Bytes that the testbed may take on a host without devices."""


def measure(devices: int = DEVICES) -> Iterator[Measurement]:
    """Yield seconds until devices are shaped and healthy, on one host and on all, and the bytes of an empty host.

    Nothing where no hosts are named.
    """
    hosts = [
        each.strip()
        for each in os.environ.get("TESTBED_HOSTS", "").split(",")
        if each.strip()
    ]
    if not hosts:
        return
    names = f"of {devices} devices"
    one = _start_up(devices, hosts[:1])
    yield Measurement(f"start-up {names} on {hosts[0]}", one, "s")
    several = _start_up(devices, hosts)
    yield Measurement(f"start-up {names} on {len(hosts)} hosts", several, "s")
    yield Measurement(
        "start-up on several hosts, ratio to one", several / one, "x", RATIO
    )
    if len(hosts) > 1:
        yield Measurement(
            "memory on a host without devices", _empty(hosts) / 1e6, "MB", EMPTY / 1e6
        )


def _start_up(devices: int, hosts: Sequence[str]) -> float:
    trial = trials(scenario(devices))[0]
    began = time.monotonic()
    lab = HostsLab.create(trial, hosts, {})
    seconds = time.monotonic() - began
    lab.down()
    return seconds


def _empty(hosts: Sequence[str]) -> float:
    """Return the bytes that containers have on a host on which no device is."""
    trial = trials(scenario(2))[0]
    lab = HostsLab.create(
        trial, hosts[:2], {each.name: hosts[0] for each in trial.experiment.devices}
    )
    try:
        return _used(reach(hosts[1]).client, lab.run_id)
    finally:
        lab.down()


def _used(client: docker.DockerClient, run: str) -> float:
    found = client.containers.list(filters={"label": f"{RUN}={run}"})
    looked: list[Any] = [each.stats(stream=False) for each in found]
    usages = [each["memory_stats"] for each in looked]
    # As `docker stats` has it: files that can be read again are not taken.
    files = [
        each["stats"].get("total_inactive_file", each["stats"].get("inactive_file", 0))
        for each in usages
    ]
    return float(sum(each["usage"] for each in usages) - sum(files))
