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
        addresses = {name: each.address for name, each in self.endpoints.items()}
        downlinks = {name: each.downlink for name, each in self.endpoints.items()}
        uplink = self.endpoints[name].uplink
        return routes(name, interface.broadcast, addresses, self.links, self.cells, uplink, downlinks)

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
        media = {}
        for source in {pair[0] for pair in pairs} & interfaces.keys():
            own = self.routes(source, interfaces[source])
            for pair in pairs:
                address = self.endpoints[pair[1]].address
                if pair[0] == source and address in own:
                    media[pair] = own[address]
        return media
