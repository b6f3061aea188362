"""Interface plans of all devices from the links, cells and addresses of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping.interfaces import Interface
from testbed_controller.shaping.medium import Route, routes_of
from testbed_controller.shaping.plan import Endpoint, InterfacePlan, plan_interface


@dataclass
class Planner:
    """The desired state of all links of a run at one instant."""

    endpoints: Mapping[str, Endpoint]
    numbers: Mapping[str, int]
    links: Mapping[Pair, Link]
    cells: Sequence[Cell]
    has_gate: bool = True
    """Whether a gate is available; without a gate there are no routes."""

    def routes(self, name: str, interface: Interface) -> dict[str, Route]:
        """Return a device's routes through the gate, by address."""
        if not self.has_gate:
            return {}
        return routes_of(
            self.endpoints[name],
            interface.broadcast,
            self.endpoints,
            self.links,
            self.cells,
        )

    def plan(self, name: str, interface: Interface) -> InterfacePlan:
        """Return the plan of a device's interface."""
        peers = {}
        for peer, endpoint in self.endpoints.items():
            peers[peer] = (self.numbers[peer], endpoint.address)
        gated_rates = {}
        for address, route in self.routes(name, interface).items():
            gated_rates[address] = route.rate
        return plan_interface(
            self.endpoints[name],
            interface.name,
            interface.broadcast,
            peers,
            self.links,
            gated_rates,
        )

    def routes_of_links(
        self, pairs: Sequence[Pair], interfaces: Mapping[str, Interface]
    ) -> dict[Pair, Route]:
        """Return the routes of the links that pass the gate, if the sender has one of ``interfaces``, by device."""
        by_source = {}
        for name, interface in interfaces.items():
            by_source[name] = self.routes(name, interface)
        by_pair = {}
        for source, destination in pairs:
            address = self.endpoints[destination].address
            route = by_source.get(source, {}).get(address)
            if route is not None:
                by_pair[source, destination] = route
        return by_pair
