"""Namespaces and sockets for measurements on this host or together with other hosts.

Each end of a link is a device: on this host with two open sockets (`ProbeSockets`), on another host only with the
address of its receiving socket (`RemoteReceiver`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from testbed.network.link import Pair
from testbed_controller.shaping.registry import Registry
from testbed_controller.shaping.trains import (
    ProbedDevice,
    ProbeSockets,
    RemoteReceiver,
    open_sockets,
)


class Prober:
    """Provider of namespaces and sockets for measurements."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open: dict[str, tuple[dict[str, ProbeSockets], contextlib.ExitStack]] = {}
        """Sockets by device, and the stack that closes them, of each measurement that other hosts take part in."""

    def local_devices(
        self, names: Collection[str], stack: contextlib.ExitStack
    ) -> dict[str, ProbedDevice]:
        """Return devices of this host with open namespaces, which the stack closes."""
        devices = {}
        for name in names:
            device = self._registry.devices[name]
            # A handle of our own: the registry closes its handle if the device ends during the measurement.
            namespace = device.namespace.duplicate()
            stack.callback(namespace.close)
            endpoint = device.endpoint
            devices[name] = ProbedDevice(
                namespace, endpoint.address, endpoint.uplink, endpoint.downlink
            )
        return devices

    def open_ends(self, measurement_id: str, pairs: Sequence[Pair]) -> dict[str, int]:
        """Open sockets for a measurement with other hosts; return the receiver's port of each local device."""
        here = self._registry.devices.keys() & set(chain.from_iterable(pairs))
        with contextlib.ExitStack() as stack:
            devices = self.local_devices(here, stack)
            ends = stack.enter_context(open_sockets(devices, here))
            # Until `take_ends`, the sockets stay open; only an error before this line closes them.
            self._open[measurement_id] = ends, stack.pop_all()
        ports = {}
        for name, sockets in ends.items():
            _, ports[name] = sockets.target
        return ports

    def take_ends(
        self, measurement_id: str, names: Collection[str], ports: Mapping[str, int]
    ) -> tuple[
        dict[str, ProbedDevice],
        dict[str, ProbeSockets | RemoteReceiver],
        contextlib.ExitStack,
    ]:
        """Return the named devices and their ends; the stack closes the sockets of `open_ends`.

        ``ports`` has the receiver's port of every device, on this host and on others.
        """
        local_ends, stack = self._open.pop(measurement_id)
        devices = {}
        ends: dict[str, ProbeSockets | RemoteReceiver] = dict(local_ends)
        endpoints = self._registry.endpoints
        for name in names:
            endpoint = endpoints[name]
            # Without a namespace, since the sockets are already open.
            devices[name] = ProbedDevice(
                None, endpoint.address, endpoint.uplink, endpoint.downlink
            )
            ends.setdefault(name, RemoteReceiver((endpoint.address, ports[name])))
        return devices, ends, stack
