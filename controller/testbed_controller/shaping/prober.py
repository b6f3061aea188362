"""Namespaces and sockets for measurements on this host or together with other hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from testbed.network.link import Pair
from testbed_controller.shaping.registry import Registry
from testbed_controller.shaping.trains import Ends, FarEnds, Site, open_sockets


class Prober:
    """Provider of namespaces and sockets for measurements."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open: dict[str, tuple[dict[str, Ends], contextlib.ExitStack]] = {}
        """Sockets of prepared measurements with other hosts."""

    def sites(
        self, names: Collection[str], stack: contextlib.ExitStack
    ) -> dict[str, Site]:
        """Return the sites of devices on this host; the stack owns their namespaces."""
        sites = {}
        for name in names:
            attached = self._registry.devices[name]
            # A handle of our own: the registry closes its handle if the device ends during the measurement.
            namespace = attached.namespace.duplicate()
            stack.callback(namespace.close)
            endpoint = attached.endpoint
            sites[name] = Site(
                namespace, endpoint.address, endpoint.uplink, endpoint.downlink
            )
        return sites

    def open_ends(self, run: str, pairs: Sequence[Pair]) -> dict[str, int]:
        """Open sockets for a measurement with other hosts; return the receiver's port of each local device."""
        here = self._registry.devices.keys() & set(chain.from_iterable(pairs))
        with contextlib.ExitStack() as stack:
            ends = stack.enter_context(open_sockets(self.sites(here, stack), here))
            # The sockets stay open until `take_ends`: only an error before closes them.
            self._open[run] = ends, stack.pop_all()
        ports = {}
        for name, device_ends in ends.items():
            _, ports[name] = device_ends.target
        return ports

    def take_ends(
        self, run: str, names: Collection[str], ports: Mapping[str, int]
    ) -> tuple[dict[str, Site], dict[str, Ends | FarEnds], contextlib.ExitStack]:
        """Return the sites and ends of local and remote devices; the stack closes the sockets of `open_ends`.

        ``ports`` has the ports of all devices; the local ones come from `open_ends`.
        """
        opened, held = self._open.pop(run)
        sites = {}
        ends: dict[str, Ends | FarEnds] = dict(opened)
        endpoints = self._registry.endpoints
        for name in names:
            endpoint = endpoints[name]
            sites[name] = Site(
                None, endpoint.address, endpoint.uplink, endpoint.downlink
            )
            ends.setdefault(name, FarEnds((endpoint.address, ports[name])))
        return sites, ends, held
