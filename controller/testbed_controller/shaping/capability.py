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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.common.errors import HostError, TestbedError
from testbed.network.link import Link
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.shaping.backend import adopt_backends
from testbed_controller.shaping.namespaces import Namespace, command
from testbed_controller.shaping.plan import FRAME, Endpoint

if TYPE_CHECKING:
    from testbed_controller.shaping.shaper import Shaping

RATES = (10e9, 5e9, 4e9, 3e9, 2e9, 1.5e9, 1e9, 500e6, 200e6, 100e6, 10e6)
"""Rates in bit/s, measured from the fastest."""
BASE_DELAY = 1e-3
"""Delay of the link in measurements of rates, in seconds: without a delay, the backend would hold no packets."""
DELAYS = (0.1e-3, 0.2e-3, 0.5e-3, 1e-3, 2e-3, 5e-3)
"""Delays in seconds, measured from the shortest."""
LOAD_RATE = 100e6
"""Rate of the measurement of the cost per packet, in bit/s."""
BUSY_LIMIT = 0.8
"""Share of busy processors up to which devices do not disturb each other."""
DEVICE_RATE = 10e6
"""Continuous rate of each device in the estimate of the number of devices, in bit/s."""
_LINK = ("a", "b")
"""The measured link: sender and receiver."""
_INTERFACE = "data"
"""Name of the interface in both namespaces."""
_TRAINS = 5
"""Number of packet trains (`trains.py`) in the measurement of the cost per packet."""


@dataclass(frozen=True)
class Capability:
    """The measured link capacity of one backend."""

    backend: str
    rate: float | None
    """Highest of `RATES` within tolerance, in bit/s; None if all of them were outside."""
    delay: float | None
    """Shortest of `DELAYS` within tolerance, in seconds; None if all of them were outside."""
    found_delay: float | None
    """Measured median of `delay`, in seconds."""
    packet_cost: float | None
    """Processor time of a full packet from socket to socket, in seconds; None if the clock was too coarse for it."""
    devices: int | None
    """Estimated number of devices that can each send `DEVICE_RATE`, without their own computation; None without
    ``packet_cost``."""


def measure_capability(backend: str = "auto") -> Capability:
    """Measure the link capacity in a few seconds. Raises HostError without kernel support."""
    # Imported here: Shaping needs pyroute2, which programs that only read stored results need not have.
    from testbed_controller.shaping.shaper import Shaping

    with (
        _joined_namespaces() as endpoints,
        contextlib.closing(Shaping(backend)) as shaping,
    ):
        shaping.attach(endpoints, {_LINK: Link(delay=BASE_DELAY), _LINK[::-1]: Link()})
        by_rate = [Link(rate=rate, delay=BASE_DELAY) for rate in RATES]
        fastest = _first_within_tolerance(shaping, by_rate)
        by_delay = [Link(delay=delay) for delay in DELAYS]
        shortest = _first_within_tolerance(shaping, by_delay)
        cost = _measure_packet_cost(shaping, endpoints[1].pid)
        name = str(shaping.facts()["backend"])
    return Capability(
        backend=name,
        rate=None if fastest is None else fastest.requested.rate,
        delay=None if shortest is None else shortest.requested.delay,
        found_delay=None if shortest is None else shortest.delay,
        packet_cost=cost,
        devices=None if cost is None else _count_devices(cost),
    )


def _first_within_tolerance(
    shaping: Shaping, links: Sequence[Link]
) -> LinkMeasurement | None:
    """Measure links one after the other; return the first measurement within tolerance."""
    for link in links:
        measurement = _measure_link(shaping, link)
        if measurement.problem is None:
            return measurement
    return None


def _count_devices(packet_cost: float) -> int:
    processors = BUSY_LIMIT * (os.cpu_count() or 1)
    packets_per_second = DEVICE_RATE / 8 / FRAME
    return int(processors / (packet_cost * packets_per_second))


def _measure_link(shaping: Shaping, link: Link) -> LinkMeasurement:
    shaping.set({_LINK: link})
    [measurement] = shaping.probe([_LINK])
    return measurement


def _measure_packet_cost(shaping: Shaping, receiver: int) -> float | None:
    """Measure the processor time of sockets and delay line per packet in seconds, while trains of packets pass.

    ``receiver`` is the process of the receiving device. The result excludes interrupts and other load of the host, and
    is None if the clock was too coarse.
    """
    shaping.set({_LINK: Link(rate=LOAD_RATE, delay=BASE_DELAY)})
    # The shaper runs in this process, so its processor time includes the sockets that send and receive.
    busy_before = shaping.statistics()["processor_seconds"]
    packets_before = _count_received(receiver)
    for _ in range(_TRAINS):
        shaping.probe([_LINK])
    packets = _count_received(receiver) - packets_before
    busy: float = shaping.statistics()["processor_seconds"] - busy_before
    # The kernel may count processor time in ticks of 10 ms, and packets that pass within a tick appear to cost nothing.
    if packets <= 0 or busy <= 0:
        return None
    return busy / packets


def _count_received(process: int) -> int:
    """Return the number of packets received in a process's network namespace."""
    # /proc/net/dev: "name: bytes packets ...", first of received and then of sent data.
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counters.split()[1])
    raise HostError(f"process {process} has no interface named {_INTERFACE}")


@contextlib.contextmanager
def _joined_namespaces() -> Iterator[list[Endpoint]]:
    """Yield two namespaces joined by a pair of interfaces, each with a process."""
    with contextlib.ExitStack() as stack:
        pids = []
        namespaces = []
        for _ in _LINK:
            pid = _start_sleeper(stack).pid
            namespace = Namespace.of_process(pid)
            stack.callback(namespace.close)
            pids.append(pid)
            namespaces.append(namespace)
        peer = f"peer name {_INTERFACE} netns {pids[1]}"
        namespaces[0].run(partial(_run_ip, f"link add {_INTERFACE} type veth {peer}"))
        endpoints = []
        for number, (name, pid) in enumerate(zip(_LINK, pids, strict=True)):
            # RFC 2544 reserves 198.18.0.0/15 for measurements, so no route of the host is hidden.
            address = f"198.18.0.{number + 1}"
            namespaces[number].run(partial(_configure_interface, address))
            endpoints.append(Endpoint(name, pid, address))
        yield endpoints


def _configure_interface(address: str) -> None:
    _run_ip("link set lo up")
    _run_ip(f"address add {address}/24 broadcast + dev {_INTERFACE}")
    _run_ip(f"link set {_INTERFACE} up")


def _run_ip(arguments: str) -> None:
    command(["ip", *arguments.split()])


def _start_sleeper(stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """Start a process in a new network namespace; the stack ends the process."""
    scratch = Namespace.scratch()
    stack.callback(scratch.close)
    # After 600 s the process ends by itself, in case this process is killed before.
    process = scratch.run(lambda: subprocess.Popen(["sleep", "600"]))
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


if __name__ == "__main__":
    try:
        adopt_backends(os.environ)
        print(json.dumps(asdict(measure_capability(*sys.argv[1:2]))))
    except TestbedError as error:
        sys.exit(f"capability: {error}")
