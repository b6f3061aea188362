"""What a device's links ask of its interface, as plain data. Pure: can be read and tested without a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from testbed.network.impairments import longest_delay
from testbed.network.link import Link, Pair, least_rate

FRAME = 1514
"""Bytes of a full Ethernet frame, as the kernel charges it: without preamble and checksum."""
CEILING = 32_000_000_000
"""bit/s of an HTB class without a limit: more than any host moves through a veth pair, and still a 32-bit byte rate."""
BURST_SECONDS = 2e-4
"""What an idle link may send at once: enough to bridge a late timer, too little to show in a message's time."""
MOST_SEGMENTS = 64
"""Packets of a piece of 64 KiB, the largest there is, and some more."""
QUEUE_SECONDS = 0.05
"""A queue holds what its link sends in a round trip and this much more."""

DEFAULT_CLASS = 1
BROADCAST_CLASS = 2
ACCESS_CLASS = 3
"""What all links of a device share in one direction: its uplink, or its downlink."""
FIRST_PEER_CLASS = 0x10

DOWN = Link(up=False)


@dataclass(frozen=True)
class Endpoint:
    """A device as the shaper finds it."""

    name: str
    pid: int
    """A process in the device's network namespace, as the shaper's process namespace numbers it; 0 of a device on
    another host, of which only the address is known here."""
    address: str
    """Address of the interface that carries the data network."""
    uplink: float | None = None
    """bit/s that it sends to all others together, None without a limit."""
    downlink: float | None = None
    """bit/s that it receives from all others together."""
    network: str | None = None
    """The data network, such as ``10.0.0.0/24``, where the shaper is to make the interface and to plug it into a bridge
    that nothing but devices is on; None: it is there already."""


@dataclass(frozen=True)
class SenderClass:
    """One HTB class: everything that leaves the device for one address."""

    number: int
    address: str
    rate: int
    """bit/s"""
    limit: int
    """Packets that may wait"""


@dataclass(frozen=True)
class Access:
    """The rate that a device's links share in one direction."""

    rate: int
    """bit/s"""
    limit: int
    """Packets of one link that may wait for it"""


@dataclass(frozen=True)
class ReceiverLine:
    """What becomes of everything that arrives from one address."""

    number: int
    """The NFQUEUE number or class of this source."""
    address: str
    link: Link
    limit: int
    """Packets that may be on their way at once."""
    queued: bool
    """Whether packets have to be delayed, lost, altered or counted, beyond being let through or dropped."""


@dataclass(frozen=True)
class InterfacePlan:
    """All that the shaper does to one device's data interface."""

    interface: str
    uplink: Access | None
    downlink: Access | None
    senders: tuple[SenderClass, ...]
    receivers: tuple[ReceiverLine, ...]
    segments: int
    """Packets that TCP may hand down in one piece"""


def plan(
    endpoint: Endpoint,
    interface: str,
    broadcast: str | None,
    peers: Mapping[str, tuple[int, str]],
    links: Mapping[Pair, Link],
    gated: Mapping[str, float] | None = None,
) -> InterfacePlan:
    """Return the plan of a device's interface.

    ``peers`` maps every device's name to its number (from 1, handed out by counting) and its address. A pair
    without a link cannot talk: its packets are dropped where they arrive. ``gated`` holds, by address, the rates that
    the gate sees to already. A link's class keeps its rate all the same, so that a link that becomes slow while packets
    wait there does not let them go at once; it delays none that come from the gate.
    """
    device, uplink = endpoint.name, endpoint.uplink
    gated = gated or {}
    senders, receivers, rates = [], [], []
    for peer, (number, address) in sorted(peers.items(), key=lambda item: item[1][0]):
        link = links.get((device, peer))
        if link is not None:
            senders.append(_sender(FIRST_PEER_CLASS + number, address, link, uplink))
            if link.up:
                rates.append(class_rate(least_rate(gated.get(address), link.rate, uplink)))
        if peer != device:
            receivers.append(_receiver(number, address, links.get((peer, device), DOWN), endpoint.downlink))
    outgoing = [link for (source, _), link in links.items() if source == device]
    if broadcast and outgoing:
        # As on a radio, one transmission for all goes at the rate of the slowest that shall hear it.
        slowest = min(outgoing, key=lambda link: class_rate(link.rate))
        slowest = replace(slowest, rate=None) if broadcast in gated else slowest
        senders.insert(0, _sender(BROADCAST_CLASS, broadcast, slowest, uplink))
    return InterfacePlan(
        interface,
        _access(uplink, outgoing),
        _access(endpoint.downlink, [line.link for line in receivers]),
        tuple(senders),
        tuple(receivers),
        most_segments(rates),
    )


def linked_addresses(plan: InterfacePlan) -> set[str]:
    """Return the addresses of the devices that a device sends to or receives from."""
    senders = {each.address for each in plan.senders if each.number >= FIRST_PEER_CLASS}
    return senders | {each.address for each in plan.receivers if each.link.up}


def most_segments(rates: Iterable[float]) -> int:
    """Return how many packets TCP may hand down in one piece: what the fastest of these links sends in a bucket's time.

    HTB lets a piece pass at once, however long its rate takes for it: five packets at 250 kbit would be 0.2 s early.
    Packet by packet, on the other hand, few hosts fill 1 Gbit/s.
    """
    return max(1, min(MOST_SEGMENTS, int(max(rates, default=CEILING) / 8 * BURST_SECONDS / FRAME)))


def impaired(link: Link) -> bool:
    """Say whether a link does anything to packets beyond letting them through at its rate."""
    return any((link.delay, link.loss, link.bursts, link.duplicate, link.corrupt))


def _sender(number: int, address: str, link: Link, uplink: float | None) -> SenderClass:
    rate = class_rate(link.rate)
    return SenderClass(number, address, rate, queue_limit(replace(link, rate=least_rate(rate, uplink))))


def class_rate(rate: float | None) -> int:
    """Return the bit/s of the HTB class for a rate; every class needs one, also that of a link without a rate."""
    return CEILING if rate is None else round(rate)


def _receiver(number: int, address: str, link: Link, downlink: float | None) -> ReceiverLine:
    queued = link.up and (impaired(link) or downlink is not None)
    return ReceiverLine(number, address, link, line_limit(link), queued)


def _access(rate: float | None, links: Iterable[Link]) -> Access | None:
    if rate is None:
        return None
    return Access(round(rate), queue_limit(Link(rate=rate, delay=max((link.delay for link in links), default=0.0))))


def burst(rate: float) -> int:
    """Return the bytes of HTB's bucket: a millisecond's worth, but one frame at least.

    A class may send while its bucket is not in debt, so a bucket of a little less than a frame lets one frame
    through at once and no second.
    """
    return max(FRAME - 14, math.ceil(rate / 8 * BURST_SECONDS))


def queue_limit(link: Link) -> int:
    """Return how many full frames may wait at the sender, where the link does not say itself.

    Bandwidth times delay of a round trip, and some more. At least 300, because a socket with the kernel's default
    buffer can hold this many small packets before the sender is blocked.
    """
    if link.limit is not None:
        return link.limit
    return min(20_000, max(300, math.ceil(class_rate(link.rate) / 8 * (2 * link.delay + QUEUE_SECONDS) / FRAME)))


def line_limit(link: Link) -> int:
    """Return how many packets the delay line must hold: it is the wire, not a queue, and must never overflow."""
    smallest_frame = 60
    return min(200_000, max(10_000, math.ceil(1.2 * class_rate(link.rate) / 8 * longest_delay(link) / smallest_frame)))
