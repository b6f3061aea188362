"""The devices attached to the shaper: their namespaces, interfaces and numbers, and the bridge between them."""

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
from testbed_controller.shaping.interfaces import Interface, delete, interface_of, make_bridge, plug, set_address
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import Endpoint, InterfacePlan

_LOG = logging.getLogger(__name__)

INTERFACE = "eth0"
"""The name of a device's interface on the data network, the only one it has."""
_BRIDGE = "data"


@dataclass
class Attached:
    """A device whose interface is shaped."""

    endpoint: Endpoint
    namespace: Namespace
    interface: Interface
    process: int
    """Descriptor of the process that the namespace is of; it can be read once that has ended."""
    port: str = ""
    """On the bridge, where the shaper has plugged the device in."""
    plan: InterfacePlan | None = None
    """The plan last applied and read back; None before that, or when the last attempt failed half way."""
    routes: dict[str, Route] | None = None
    """The routes through the gate, by address; None before the gate was needed here."""
    neighbours: set[str] = field(default_factory=set)
    """Addresses whose hardware address the interface was given."""

    def inherit(self, previous: Attached) -> None:
        """Take over the state of the same namespace as it was attached before."""
        self.plan, self.routes = previous.plan, previous.routes
        self.port, self.neighbours = previous.port, previous.neighbours
        previous.close()

    def close(self) -> None:
        """Release the namespace, so that it can end."""
        self.namespace.close()
        os.close(self.process)


def hardware_address(address: str) -> str:
    """Return the hardware address of the device that has an IPv4 address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *IPv4Address(address).packed))


def _any_ended(processes: Iterable[int], seconds: float) -> bool:
    """Wait up to some seconds until one of the processes with these descriptors has ended; return whether one has."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


class Registry:
    """Finds, numbers and forgets devices; ``on_removal`` is called with the name of each that has ended."""

    def __init__(self, on_removal: Callable[[str], None]) -> None:
        self.devices: dict[str, Attached] = {}
        """The devices of this host that run."""
        self.elsewhere: dict[str, Endpoint] = {}
        """The devices on other hosts, whose interfaces are shaped there."""
        self.numbers: dict[str, int] = {}
        """The number of each device that was ever attached, from 1."""
        self.bridge: Namespace | None = None
        """The namespace of the bridge that devices are plugged into; nobody has an address there."""
        self._ports = itertools.count()
        self._on_removal = on_removal

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Return every device, wherever it is."""
        return {**self.elsewhere, **{name: each.endpoint for name, each in self.devices.items()}}

    def add(self, endpoints: Iterable[Endpoint], pool: ThreadPoolExecutor) -> None:
        """Register devices, and again those that restarted; one that is registered keeps its number and state."""
        self.release_ended()  # before others have their addresses
        here = []
        for endpoint in endpoints:
            self.numbers.setdefault(endpoint.name, len(self.numbers) + 1)
            if endpoint.pid:
                here.append(endpoint)
            else:
                self.elsewhere[endpoint.name] = endpoint
        if self.bridge is None and any(each.network for each in here):
            self.bridge = Namespace.scratch()
            self.bridge.run(partial(make_bridge, _BRIDGE))
        for attached in pool.map(self._find, here):
            name = attached.endpoint.name
            previous = self.devices.get(name)
            if previous and previous.namespace.identity == attached.namespace.identity:
                attached.inherit(previous)
            elif previous:
                self._remove(name)
            self.devices[name] = attached

    def _find(self, endpoint: Endpoint) -> Attached:
        with contextlib.ExitStack() as stack:
            namespace = Namespace.of_process(endpoint.pid)
            stack.callback(namespace.close)
            port, interface = "", namespace.run(partial(interface_of, endpoint.address))
            if interface is None:
                if endpoint.network is None:
                    text = f"no interface of {endpoint.name} has the address {endpoint.address}"
                    raise HostError(f"{text}: is it attached to the data network?")
                port = f"p{next(self._ports)}"
                interface = self._plug(port, namespace, endpoint.address, IPv4Network(endpoint.network))
            process = os.pidfd_open(endpoint.pid)
            stack.pop_all()
        return Attached(endpoint, namespace, interface, process, port)

    def _plug(self, port: str, namespace: Namespace, address: str, network: IPv4Network) -> Interface:
        """Give a device its interface, of the same hardware address each time: others have been given that."""
        assert self.bridge is not None
        hardware = hardware_address(address)
        self.bridge.run(lambda: plug(port, _BRIDGE, INTERFACE, hardware, namespace.descriptor))
        namespace.run(partial(set_address, INTERFACE, address, network))
        return Interface(INTERFACE, str(network.broadcast_address))

    def _remove(self, name: str) -> None:
        _LOG.info("%s has ended: its links are released", name)
        attached = self.devices.pop(name)
        if attached.port and self.bridge is not None:
            with contextlib.suppress(HostError):  # its other end is gone, and it with that
                self.bridge.run(partial(delete, attached.port))
        self._on_removal(name)
        attached.close()

    def release_ended(self) -> None:
        """Forget every device that has ended: an open namespace would continue to answer."""
        for name, attached in list(self.devices.items()):
            if _any_ended([attached.process], 0.0):
                self._remove(name)

    def await_end(self, seconds: float) -> bool:
        """Wait until a device ends, at most so long; return whether one has."""
        return _any_ended([each.process for each in list(self.devices.values())], seconds)

    def close(self) -> None:
        """Release all namespaces."""
        for attached in self.devices.values():
            attached.close()
        self.devices.clear()
        if self.bridge is not None:
            self.bridge.close()
