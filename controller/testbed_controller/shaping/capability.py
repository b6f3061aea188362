"""What links this host can carry: `python -m testbed_controller.shaping.capability [backend]` prints it as JSON.

Two processes that sleep in network namespaces of their own stand for devices; a pair of interfaces joins them. The
links between them are shaped and measured as those of a run, from the fastest down and from the shortest up.
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
"""bit/s, tried from the fastest on; with the delay below, so that the backend has to hold the packets."""
DELAY = 1e-3
DELAYS = (0.1e-3, 0.2e-3, 0.5e-3, 1e-3, 2e-3, 5e-3)
"""Seconds, tried from the shortest on."""
LOAD_RATE = 100e6
"""At which the cost of a packet is taken."""
HEADROOM = 0.8
"""Share of the processors that may be busy before devices get in each other's way."""
DEVICE_RATE = 10e6
"""bit/s that each of the devices counted sends without a pause."""
_PAIR = ("a", "b")
_TRAINS = 5


@dataclass(frozen=True)
class Capability:
    """What was measured with one backend."""

    backend: str
    rate: float | None
    """bit/s, the highest of `RATES` that was carried within the tolerance."""
    delay: float | None
    """Seconds, the lowest of `DELAYS` that was kept within the tolerance."""
    found_delay: float | None
    """Seconds that packets took with it, the median."""
    packet_cost: float | None
    """Processor seconds for a full packet from socket to socket."""
    devices: int | None
    """Devices that may each send `DEVICE_RATE` at once, by that cost: an estimate, without their own computing."""


def measure(backend: str = "auto") -> Capability:
    """Measure; takes a few seconds. Raises HostError where this kernel cannot shape links."""
    from testbed_controller.shaping.shaper import (
        Shaping,  # with pyroute2, which commands that only read this need not wait for
    )

    with _pair() as endpoints, contextlib.closing(Shaping(backend)) as shaping:
        shaping.attach(endpoints, {_PAIR: Link(delay=DELAY), _PAIR[::-1]: Link()})
        rate = next((rate for rate in RATES if _probe(shaping, Link(rate=rate, delay=DELAY)).problem is None), None)
        kept = (found for delay in DELAYS if (found := _probe(shaping, Link(delay=delay))).problem is None)
        shortest = next(kept, None)
        cost = _packet_cost(shaping, endpoints[1].pid)
        name = str(shaping.facts()["backend"])
    return Capability(
        backend=name,
        rate=rate,
        delay=None if shortest is None else shortest.requested.delay,
        found_delay=None if shortest is None else shortest.delay,
        packet_cost=cost,
        devices=None if cost is None else int(HEADROOM * (os.cpu_count() or 1) / (cost * DEVICE_RATE / 8 / FRAME)),
    )


def _probe(shaping: Shaping, link: Link) -> LinkMeasurement:
    shaping.set({_PAIR: link})
    [found] = shaping.probe([_PAIR])
    return found


def _packet_cost(shaping: Shaping, receiver: int) -> float | None:
    """Measure the processor time of the sockets' process and of the delay line while trains of packets pass.

    That of interrupts is not in it, and what else the host is busy with neither.
    """
    shaping.set({_PAIR: Link(rate=LOAD_RATE, delay=DELAY)})
    busy, packets = shaping.statistics()["processor_seconds"], _received(receiver)
    for _ in range(_TRAINS):
        shaping.probe([_PAIR])
    passed = _received(receiver) - packets
    return (shaping.statistics()["processor_seconds"] - busy) / passed if passed > 0 else None


def _received(process: int) -> int:
    """Count the packets that have reached a process's network namespace."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[1]) for line in lines if line.strip().startswith("data:"))


@contextlib.contextmanager
def _pair() -> Iterator[list[Endpoint]]:
    """Have two namespaces joined by a pair of interfaces, each with a process in it."""
    with contextlib.ExitStack() as stack:
        processes = [_sleeper(stack) for _ in _PAIR]
        namespaces = [Namespace.of_process(process.pid) for process in processes]
        for namespace in namespaces:
            stack.callback(namespace.close)
        pids = [process.pid for process in processes]
        namespaces[0].run(
            lambda: command(
                ["ip", "link", "add", "data", "type", "veth", "peer", "name", "data", "netns", str(pids[1])]
            )
        )
        addresses = [f"198.18.0.{number}" for number in (1, 2)]
        for namespace, address in zip(namespaces, addresses, strict=True):
            namespace.run(partial(_plug, address))
        yield [Endpoint(*each) for each in zip(_PAIR, pids, addresses, strict=True)]


def _plug(address: str) -> None:
    command(["ip", "link", "set", "lo", "up"])
    command(["ip", "address", "add", f"{address}/24", "broadcast", "+", "dev", "data"])
    command(["ip", "link", "set", "data", "up"])


def _sleeper(stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """Start a process in a network namespace of its own; it ends with the stack."""
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
