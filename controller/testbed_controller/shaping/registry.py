"""The devices attached to the shaper: namespaces, interfaces, numbers, and the bridge between them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv4Network

from testbed.common.errors import HostError
from testbed_controller.shaping.interfaces import (
    Interface,
    delete_interface,
    interface_of,
    make_bridge,
    plug_port,
    set_address,
)
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import Endpoint, InterfacePlan

_LOG = logging.getLogger(__name__)

INTERFACE = "eth0"
"""Name of a device's only interface, on the data network."""
_BRIDGE = "data"
"""Name of the bridge that connects the devices."""


@dataclass
class AttachedDevice:
    """A device whose interface is shaped."""

    endpoint: Endpoint
    namespace: Namespace
    interface: Interface
    pidfd: int
    """Process descriptor of the device; readable after the end of the process."""
    port: str = ""
    """Name of the bridge port; empty if the interface was not created by the shaper."""
    plan: InterfacePlan | None = None
    """The last verified plan; None before the first, and after a failure."""
    routes: dict[str, Route] | None = None
    """Routes through the gate by address; None before the first use of the gate."""
    neighbours: set[str] = field(default_factory=set)
    """Addresses with a permanent neighbour entry on the interface."""

    def inherit(self, previous: AttachedDevice) -> None:
        """Adopt the state of an earlier attachment of the same namespace, which is then closed."""
        self.plan = previous.plan
        self.routes = previous.routes
        self.port = previous.port
        self.neighbours = previous.neighbours
        previous.close()

    def close(self) -> None:
        """Close the file descriptors, which keep the namespace alive."""
        self.namespace.close()
        os.close(self.pidfd)


def hardware_address(address: str) -> str:
    """Return the hardware address derived from a device's IPv4 address.

    A device that restarts gets the same address, so the permanent neighbour entries of its peers stay valid.

    >>> hardware_address("10.0.0.2")
    '02:42:0a:00:00:02'
    """
    # 02 marks a locally administered address.
    octets = (0x02, 0x42, *IPv4Address(address).packed)
    return ":".join(f"{octet:02x}" for octet in octets)


def _any_ended(pidfds: Iterable[int], seconds: float) -> bool:
    """Wait up to ``seconds`` for the end of one of the processes; return whether one has ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


class Registry:
    """The attached devices by name and number; ``on_removal`` is called with the name of each ended device."""

    def __init__(self, on_removal: Callable[[str], None]) -> None:
        self.devices: dict[str, AttachedDevice] = {}
        """Running devices of this host."""
        self.remote_endpoints: dict[str, Endpoint] = {}
        """Devices on other hosts, whose interfaces are shaped there."""
        self.numbers: dict[str, int] = {}
        """Number of each device ever attached, from 1; it never changes, since queues and classes have this number."""
        self.bridge: Namespace | None = None
        """Namespace of the bridge between devices, in which no interface has an address; None without a bridge."""
        self._port_numbers = itertools.count()
        self._on_removal = on_removal

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints of all devices, on this host and on others, by name."""
        endpoints = dict(self.remote_endpoints)
        for name, device in self.devices.items():
            endpoints[name] = device.endpoint
        return endpoints

    def add(self, endpoints: Iterable[Endpoint], pool: ThreadPoolExecutor) -> None:
        """Register devices, also restarted ones; a device that is still running keeps its number and its state."""
        # Ended devices are released first, since new devices may have their addresses.
        self.release_ended()
        local_endpoints = []
        for endpoint in endpoints:
            self.numbers.setdefault(endpoint.name, len(self.numbers) + 1)
            if endpoint.pid:
                local_endpoints.append(endpoint)
            else:
                self.remote_endpoints[endpoint.name] = endpoint
        needs_bridge = any(endpoint.network for endpoint in local_endpoints)
        if self.bridge is None and needs_bridge:
            self.bridge = Namespace.scratch()
            self.bridge.run(partial(make_bridge, _BRIDGE))
        for device in pool.map(self._attach_device, local_endpoints):
            name = device.endpoint.name
            previous = self.devices.get(name)
            if previous and previous.namespace.identity == device.namespace.identity:
                device.inherit(previous)
            elif previous:
                # A restarted container has a new namespace, in which nothing is configured yet.
                self._remove(name)
            self.devices[name] = device

    def _attach_device(self, endpoint: Endpoint) -> AttachedDevice:
        with contextlib.ExitStack() as stack:
            namespace = Namespace.of_process(endpoint.pid)
            stack.callback(namespace.close)
            port = ""
            interface = namespace.run(partial(interface_of, endpoint.address))
            if interface is None:
                if endpoint.network is None:
                    raise HostError(
                        f"no interface of {endpoint.name} has the address {endpoint.address}: "
                        "attach the device to the data network"
                    )
                port = f"p{next(self._port_numbers)}"
                network = IPv4Network(endpoint.network)
                interface = self._plug_device(
                    port, namespace, endpoint.address, network
                )
            # A process ID may be reused, whereas a descriptor always refers to this process.
            pidfd = os.pidfd_open(endpoint.pid)
            # The attached device keeps the namespace open; only an error before this line closes it.
            stack.pop_all()
        return AttachedDevice(endpoint, namespace, interface, pidfd, port)

    def _plug_device(
        self, port: str, namespace: Namespace, address: str, network: IPv4Network
    ) -> Interface:
        """Create a device's interface, with the hardware address that other devices have in their neighbour tables."""
        assert self.bridge is not None
        hardware = hardware_address(address)
        self.bridge.run(
            lambda: plug_port(port, _BRIDGE, INTERFACE, hardware, namespace.descriptor)
        )
        namespace.run(partial(set_address, INTERFACE, address, network))
        return Interface(INTERFACE, str(network.broadcast_address))

    def _remove(self, name: str) -> None:
        _LOG.info("%s has ended: its links are released", name)
        device = self.devices.pop(name)
        if device.port and self.bridge is not None:
            # The kernel may have deleted the port together with its other end.
            with contextlib.suppress(HostError):
                self.bridge.run(partial(delete_interface, device.port))
        self._on_removal(name)
        device.close()

    def release_ended(self) -> None:
        """Release every ended device, whose open namespace would otherwise still respond."""
        for name, device in list(self.devices.items()):
            if _any_ended([device.pidfd], 0.0):
                self._remove(name)

    def await_end(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of a device; return whether one has ended."""
        # Without a lock, requests may attach devices during the wait, so a copy is used.
        devices = list(self.devices.values())
        return _any_ended([device.pidfd for device in devices], seconds)

    def close(self) -> None:
        """Release all namespaces."""
        for device in self.devices.values():
            device.close()
        self.devices.clear()
        if self.bridge is not None:
            self.bridge.close()
