"""Plans of a device "a" with two peers, for the tests of tc commands."""

from __future__ import annotations

from testbed.network.link import Link
from testbed_controller.shaping.plan import Endpoint, InterfacePlan, plan_interface

ENDPOINT_OF_A = Endpoint("a", 1, "198.18.0.2")
PEERS = {"a": (1, "198.18.0.2"), "b": (2, "198.18.0.3"), "c": (3, "198.18.0.4")}
BROADCAST = "198.18.255.255"
CEILING = "htb rate 32000000000bit ceil 32000000000bit burst 800000 cburst 800000 quantum 1514"
"""Class without a limit: 32 Gbit/s are above the capacity of any host."""
BORROWS = "htb rate 1000bit burst 1 ceil"
"""Class of a link: it borrows nearly all of its rate from the shared class."""


def plan_outgoing(**links: Link) -> InterfacePlan:
    """Return the plan of a for links to peers by name; the link from b is delayed and lossy."""
    pairs = {("a", peer): link for peer, link in links.items()}
    pairs[("b", "a")] = Link(delay=0.02, loss=0.01)
    pairs[("c", "a")] = Link()
    return plan_interface(ENDPOINT_OF_A, "eth1", BROADCAST, PEERS, pairs)


def plan_incoming(link: Link, downlink: float | None = None) -> InterfacePlan:
    """Return the plan of a for a link from b; the link from c has a delay of 1 ms."""
    endpoint = Endpoint("a", 1, "198.18.0.2", downlink=downlink)
    links = {("b", "a"): link, ("c", "a"): Link(delay=0.001)}
    return plan_interface(endpoint, "eth1", None, PEERS, links)
