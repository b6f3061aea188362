"""Which packets of a device wait for their turn on a medium, and the rules that lead them there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from controller.shaping.chain import RuleChain
from controller.shaping.medium import Route
from controller.shaping.plan import queue_limit
from testbed.network.broadcast import broadcast_rate
from testbed.network.link import Link, Pair
from testbed.network.topology import Cell, cell_of

QUEUE = 60_000
"""Number of the netfilter queue in each device's namespace; the delay line's count from 1."""
GATED_RATE = 25e6
"""bit/s up to which casts wait at the gate: HTB lets a frame go at the beginning of its time instead of at the end, and
above this rate that time is below half a millisecond."""


def routes(
    device: str,
    broadcast: str | None,
    peers: Mapping[str, str],
    links: Mapping[Pair, Link],
    cells: Sequence[Cell],
    uplink: float | None = None,
) -> dict[str, Route]:
    """Return, by address, what a device sends over a medium: everything within its cells, and its casts.

    ``peers`` maps every device's name to its address. A cast of a device in several cells takes all of them at once.
    """
    found = {}
    outgoing = {pair: link for pair, link in links.items() if pair[0] == device}
    for pair, link in outgoing.items():
        cell = cell_of(pair, cells)
        if cell is not None and pair[1] in peers:
            rate = min(cell.rate, link.rate or cell.rate)
            found[peers[pair[1]]] = Route((_channel(cell),), rate, queue_limit(replace(link, rate=rate)))
    own = [cell for cell in cells if any(cell.carries(pair) for pair in outgoing)]
    slowest = broadcast_rate(outgoing.values(), uplink, *(cell.rate for cell in own))
    if broadcast and outgoing and slowest is not None and (own or slowest <= GATED_RATE):
        channels = tuple(map(_channel, own)) or (f"casts of {device}",)
        found[broadcast] = Route(channels, slowest, queue_limit(Link(rate=slowest)))
    return found


def _channel(cell: Cell) -> str:
    return "cell of " + ", ".join(cell.devices)


def chain(interface: str, gated: Mapping[str, Route]) -> RuleChain:
    """Return the chain that leads what leaves by the data interface for these addresses into the queue."""
    rules = tuple(f"-d {address}/32 -j NFQUEUE --queue-num {QUEUE}" for address in gated)
    return RuleChain("TESTBED-GATE", ("OUTPUT", "-o", interface), rules)
