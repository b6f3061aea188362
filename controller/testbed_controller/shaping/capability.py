"""Measurement of this host's link capacity; `python -m testbed_controller.shaping.capability [backend]` prints JSON.

Two sleeping processes in separate network namespaces, joined by a pair of interfaces, act as devices. Links between
them are shaped and measured as in a run, from the fastest rate down and from the shortest delay up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.common.errors import TestbedError
from testbed.network.link import Link
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.shaping.backend import adopt
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.plan import FRAME, Endpoint

if TYPE_CHECKING:
    from testbed_controller.shaping.shaper import Shaping

RATES = (10e9, 5e9, 4e9, 3e9, 2e9, 1.5e9, 1e9, 500e6, 200e6, 100e6, 10e6)
"""Rates in bit/s, tried from the fastest with the delay below, so that the backend has to hold packets."""
DELAY = 1e-3
DELAYS = (0.1e-3, 0.2e-3, 0.5e-3, 1e-3, 2e-3, 5e-3)
"""Delays in seconds, tried from the shortest."""
LOAD_RATE = 100e6
"""Rate of the measurement of the cost per packet, in bit/s."""
HEADROOM = 0.8
"""Maximum share of busy processors without interference between devices."""
DEVICE_RATE = 10e6
"""Continuous rate of each device in the estimate of the number of devices, in bit/s."""
_PAIR = ("a", "b")
_TRAINS = 5


@dataclass(frozen=True)
class Capability:
    """The measured link capacity of one backend."""

    backend: str
    rate: float | None
    """Highest of `RATES` within tolerance, in bit/s."""
    delay: float | None
    """Lowest of `DELAYS` within tolerance, in seconds."""
    found_delay: float | None
    """Median delay measured for it, in seconds."""
    packet_cost: float | None
    """Processor time of a full packet from socket to socket, in seconds."""
    devices: int | None
    """Estimated number of devices that can each send `DEVICE_RATE`, without their own computation."""


def measure(backend: str = "auto") -> Capability:
    """Measure the link capacity in a few seconds. Raises HostError without kernel support."""
    from testbed_controller.shaping.shaper import (
        Shaping,  # late: imports pyroute2, which readers of stored results do not need
    )

    with (
        _joined_namespaces() as endpoints,
        contextlib.closing(Shaping(backend)) as shaping,
    ):
        shaping.attach(endpoints, {_PAIR: Link(delay=DELAY), _PAIR[::-1]: Link()})
        rate = next(
            (
                rate
                for rate in RATES
                if _measure_link(shaping, Link(rate=rate, delay=DELAY)).problem is None
            ),
            None,
        )
        shortest = None
        for delay in DELAYS:
            measurement = _measure_link(shaping, Link(delay=delay))
            if measurement.problem is None:
                shortest = measurement
                break
        cost = _packet_cost(shaping, endpoints[1].pid)
        name = str(shaping.facts()["backend"])
    return Capability(
        backend=name,
        rate=rate,
        delay=None if shortest is None else shortest.requested.delay,
        found_delay=None if shortest is None else shortest.delay,
        packet_cost=cost,
        devices=None
        if cost is None
        else int(HEADROOM * (os.cpu_count() or 1) / (cost * DEVICE_RATE / 8 / FRAME)),
    )


def _measure_link(shaping: Shaping, link: Link) -> LinkMeasurement:
    shaping.set({_PAIR: link})
    [measurement] = shaping.probe([_PAIR])
    return measurement


def _packet_cost(shaping: Shaping, receiver: int) -> float | None:
    """Measure the processor time of sockets and delay line per packet, while trains of packets pass.

    The result excludes interrupts and other load of the host.
    """
    shaping.set({_PAIR: Link(rate=LOAD_RATE, delay=DELAY)})
    busy, packets = shaping.statistics()["processor_seconds"], _count_received(receiver)
    for _ in range(_TRAINS):
        shaping.probe([_PAIR])
    passed = _count_received(receiver) - packets
    return (
        (shaping.statistics()["processor_seconds"] - busy) / passed
        if passed > 0
        else None
    )


def _count_received(process: int) -> int:
    """Return the number of packets received in a process's network namespace."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[1])
        for line in lines
        if line.strip().startswith("data:")
    )


@contextlib.contextmanager
def _joined_namespaces() -> Iterator[list[Endpoint]]:
    """Yield two namespaces joined by a pair of interfaces, each with a process."""
    with contextlib.ExitStack() as stack:
        processes = [_start_sleeper(stack) for _ in _PAIR]
        namespaces = [Namespace.of_process(process.pid) for process in processes]
        for namespace in namespaces:
            stack.callback(namespace.close)
        pids = [process.pid for process in processes]
        namespaces[0].run(
            lambda: command(
                [
                    "ip",
                    "link",
                    "add",
                    "data",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "data",
                    "netns",
                    str(pids[1]),
                ]
            )
        )
        addresses = [f"198.18.0.{number}" for number in (1, 2)]
        for namespace, address in zip(namespaces, addresses, strict=True):
            namespace.run(partial(_configure_interface, address))
        yield [
            Endpoint(*endpoint) for endpoint in zip(_PAIR, pids, addresses, strict=True)
        ]


def _configure_interface(address: str) -> None:
    command(["ip", "link", "set", "lo", "up"])
    command(["ip", "address", "add", f"{address}/24", "broadcast", "+", "dev", "data"])
    command(["ip", "link", "set", "data", "up"])


def _start_sleeper(stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """Start a process in a new network namespace; the stack ends it."""
    scratch = Namespace.scratch()
    stack.callback(scratch.close)
    process = scratch.run(lambda: subprocess.Popen(["sleep", "600"]))
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


if __name__ == "__main__":
    try:
        adopt(os.environ)
        print(json.dumps(asdict(measure(*sys.argv[1:2]))))
    except TestbedError as error:
        sys.exit(f"capability: {error}")
