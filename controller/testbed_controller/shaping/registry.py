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
    delete,
    interface_of,
    make_bridge,
    plug,
    set_address,
)
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import Endpoint, InterfacePlan

_LOG = logging.getLogger(__name__)

INTERFACE = "eth0"
"""Name of a device's only interface, on the data network."""
_BRIDGE = "data"


@dataclass
class Attached:
    """A device whose interface is shaped."""

    endpoint: Endpoint
    namespace: Namespace
    interface: Interface
    process: int
    """Process descriptor (pidfd) of the device; readable after the end of the process."""
    port: str = ""
    """Bridge port of a device plugged in by the shaper."""
    plan: InterfacePlan | None = None
    """The last verified plan; None before the first, and after a failure."""
    routes: dict[str, Route] | None = None
    """Routes through the gate by address; None before the first use of the gate."""
    neighbours: set[str] = field(default_factory=set)
    """Addresses with a permanent neighbour entry on the interface."""

    def inherit(self, previous: Attached) -> None:
        """Take over the state of an earlier attachment of the same namespace."""
        self.plan, self.routes = previous.plan, previous.routes
        self.port, self.neighbours = previous.port, previous.neighbours
        previous.close()

    def close(self) -> None:
        """Release the namespace, so that it can end."""
        self.namespace.close()
        os.close(self.process)


def hardware_address(address: str) -> str:
    """Return the hardware address derived from a device's IPv4 address."""
    return ":".join(
        f"{byte:02x}" for byte in (0x02, 0x42, *IPv4Address(address).packed)
    )


def _any_ended(processes: Iterable[int], seconds: float) -> bool:
    """Wait up to ``seconds`` for the end of one of the processes; return whether one has ended."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


class Registry:
    """The attached devices by name and number; ``on_removal`` is called with the name of each ended device."""

    def __init__(self, on_removal: Callable[[str], None]) -> None:
        self.devices: dict[str, Attached] = {}
        """Running devices of this host."""
        self.elsewhere: dict[str, Endpoint] = {}
        """Devices on other hosts, whose interfaces are shaped there."""
        self.numbers: dict[str, int] = {}
        """Number of each device ever attached, from 1."""
        self.bridge: Namespace | None = None
        """Namespace of the bridge between devices; nobody has an address there."""
        self._ports = itertools.count()
        self._on_removal = on_removal

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """All devices, on this host or others."""
        local = {name: attached.endpoint for name, attached in self.devices.items()}
        return {**self.elsewhere, **local}

    def add(self, endpoints: Iterable[Endpoint], pool: ThreadPoolExecutor) -> None:
        """Register new and restarted devices; a registered device keeps number and state."""
        # First, since new devices may have the addresses of ended ones.
        self.release_ended()
        here = []
        for endpoint in endpoints:
            self.numbers.setdefault(endpoint.name, len(self.numbers) + 1)
            if endpoint.pid:
                here.append(endpoint)
            else:
                self.elsewhere[endpoint.name] = endpoint
        if self.bridge is None and any(endpoint.network for endpoint in here):
            self.bridge = Namespace.scratch()
            self.bridge.run(partial(make_bridge, _BRIDGE))
        for attached in pool.map(self._attach_device, here):
            name = attached.endpoint.name
            previous = self.devices.get(name)
            if previous and previous.namespace.identity == attached.namespace.identity:
                attached.inherit(previous)
            elif previous:
                self._remove(name)
            self.devices[name] = attached

    def _attach_device(self, endpoint: Endpoint) -> Attached:
        with contextlib.ExitStack() as stack:
            namespace = Namespace.of_process(endpoint.pid)
            stack.callback(namespace.close)
            port, interface = "", namespace.run(partial(interface_of, endpoint.address))
            if interface is None:
                if endpoint.network is None:
                    text = f"no interface of {endpoint.name} has the address {endpoint.address}"
                    raise HostError(f"{text}: is it attached to the data network?")
                port = f"p{next(self._ports)}"
                interface = self._plug(
                    port, namespace, endpoint.address, IPv4Network(endpoint.network)
                )
            process = os.pidfd_open(endpoint.pid)
            stack.pop_all()
        return Attached(endpoint, namespace, interface, process, port)

    def _plug(
        self, port: str, namespace: Namespace, address: str, network: IPv4Network
    ) -> Interface:
        """Create a device's interface with a fixed hardware address, which other devices have been given."""
        assert self.bridge is not None
        hardware = hardware_address(address)
        self.bridge.run(
            lambda: plug(port, _BRIDGE, INTERFACE, hardware, namespace.descriptor)
        )
        namespace.run(partial(set_address, INTERFACE, address, network))
        return Interface(INTERFACE, str(network.broadcast_address))

    def _remove(self, name: str) -> None:
        _LOG.info("%s has ended: its links are released", name)
        attached = self.devices.pop(name)
        if attached.port and self.bridge is not None:
            with contextlib.suppress(HostError):  # deleted together with its other end
                self.bridge.run(partial(delete, attached.port))
        self._on_removal(name)
        attached.close()

    def release_ended(self) -> None:
        """Release every ended device, whose open namespace would otherwise still respond."""
        for name, attached in list(self.devices.items()):
            if _any_ended([attached.process], 0.0):
                self._remove(name)

    def await_end(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of a device; return whether one has ended."""
        return _any_ended(
            [attached.process for attached in list(self.devices.values())], seconds
        )

    def close(self) -> None:
        """Release all namespaces."""
        for attached in self.devices.values():
            attached.close()
        self.devices.clear()
        if self.bridge is not None:
            self.bridge.close()
