"""Plans the interfaces of devices from the links, cells and addresses of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping import plan as planning
from testbed_controller.shaping.interfaces import Interface
from testbed_controller.shaping.medium import Route, routes
from testbed_controller.shaping.plan import Endpoint, InterfacePlan


@dataclass
class Planner:
    """All that the links of a run shall be at one instant."""

    endpoints: Mapping[str, Endpoint]
    numbers: Mapping[str, int]
    links: Mapping[Pair, Link]
    cells: Sequence[Cell]
    gated: bool = True
    """Whether there is a gate; without one no route leads through it."""

    def routes(self, name: str, interface: Interface) -> dict[str, Route]:
        """Return the routes of a device over shared media, by address."""
        if not self.gated:
            return {}
        return routes(self.endpoints[name], interface.broadcast, self.endpoints, self.links, self.cells)

    def plan(self, name: str, interface: Interface) -> InterfacePlan:
        """Return the plan of a device's interface."""
        return planning.plan(
            self.endpoints[name],
            interface.name,
            interface.broadcast,
            {name: (self.numbers[name], each.address) for name, each in self.endpoints.items()},
            self.links,
            {address: route.rate for address, route in self.routes(name, interface).items()},
        )

    def media(self, pairs: Sequence[Pair], interfaces: Mapping[str, Interface]) -> dict[Pair, Route]:
        """Return the routes of these links, as far as they lead over shared media from a device with an interface."""
        by_source = {name: self.routes(name, interface) for name, interface in interfaces.items()}
        media = {}
        for source, destination in pairs:
            route = by_source.get(source, {}).get(self.endpoints[destination].address)
            if route is not None:
                media[source, destination] = route
        return media
