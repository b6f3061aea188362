"""The desired configuration of a device's interface as plain data; all functions are pure.

Links are emulated at both of their ends. At the sender, HTB classes of the kernel limit the rate of packets. At the
receiver, the packets of each link pass a line, which delays, loses or alters them: a queue of the kernel's netem, or of
the delay line, a process of the shaper. Where several devices share a channel, another process, the gate, decides which
packet is sent next (`testbed_controller.shaping.gatekeeper`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from testbed.network.impairments import longest_delay
from testbed.network.link import Link, Pair, least_rate
from testbed.wire.framing import ETHERNET_HEADER

FRAME = 1514
"""Size of a full Ethernet frame in bytes as the kernel charges it, without preamble and checksum."""
CEILING = 32_000_000_000
"""Rate of an HTB class without a limit, in bit/s: above any host's capacity; as bytes a second it fits into 32 bits."""
BURST_SECONDS = 2e-4
"""Data that an idle link may send at once, as transmission time at its rate: enough to make up for a late timer, too
little to change the transmission time of a message."""
MAX_SEGMENTS = 64
"""Maximum number of packets that TCP may pass down at once; a piece of 64 KiB has fewer."""
QUEUE_SECONDS = 0.05
"""Length of a queue beyond the round trip of its link, as transmission time in seconds."""

DEFAULT_CLASS = 1
"""Class of packets that belong to no link."""
BROADCAST_CLASS = 2
"""Class of broadcasts."""
ACCESS_CLASS = 3
"""Class shared by all links of a device in one direction: its uplink or downlink."""
FIRST_PEER_CLASS = 0x10
"""Class of the link to the first peer; others follow."""

NO_LINK = Link(up=False)
"""Stands for a missing link: it drops all packets."""


@dataclass(frozen=True)
class Endpoint:
    """A device in the requests to the shaper."""

    name: str
    pid: int
    """ID of a process in the device's network namespace, as the shaper sees it; 0 for a device on another host."""
    address: str
    """Address of the interface on the data network."""
    uplink: float | None = None
    """Maximum total rate of sent data in bit/s; None is unlimited."""
    downlink: float | None = None
    """Maximum total rate of received data in bit/s; None is unlimited."""
    network: str | None = None
    """Data network, such as ``10.0.0.0/24``, if the shaper has to create the interface and connect it to the bridge
    between devices; None if the interface exists."""


@dataclass(frozen=True)
class SenderClass:
    """The HTB class and the queue for all packets from the device to one address."""

    number: int
    address: str
    rate: int
    """Maximum rate in bit/s."""
    limit: int
    """Maximum number of packets in the queue."""


@dataclass(frozen=True)
class Access:
    """The limit of all links of a device together in one direction: its uplink or its downlink."""

    rate: int
    """Maximum rate in bit/s."""
    limit: int
    """Maximum number of packets of one link that wait because of this limit."""


@dataclass(frozen=True)
class ReceiverLine:
    """The treatment of the packets arriving from one address."""

    number: int
    """Number of the sending device; also identifies the queue of the packets (NFQUEUE or class of netem)."""
    address: str
    """Address of the sending device."""
    link: Link
    limit: int
    """Maximum number of packets in transit."""
    queued: bool
    """Whether packets need a queue, because they are delayed, lost or altered, or share a downlink."""


@dataclass(frozen=True)
class InterfacePlan:
    """The complete configuration of one device's data interface."""

    interface: str
    """Name of the interface."""
    uplink: Access | None
    downlink: Access | None
    senders: tuple[SenderClass, ...]
    """One for each address to which the device sends."""
    receivers: tuple[ReceiverLine, ...]
    """One for each address from which packets may arrive."""
    segments: int
    """Maximum number of packets that TCP passes down at once, as one piece."""


def plan_interface(
    endpoint: Endpoint,
    interface: str,
    broadcast: str | None,
    peers: Mapping[str, tuple[int, str]],
    links: Mapping[Pair, Link],
    gated_rates: Mapping[str, float] | None = None,
) -> InterfacePlan:
    """Return the configuration for the links, the uplink and the downlink of a device.

    ``peers`` maps every device to its number (from 1) and its address, and ``broadcast`` is the broadcast address; None
    without broadcasts. A pair without a link cannot communicate: its packets are dropped on arrival.

    ``gated_rates`` maps addresses to the rates that the gate enforces. The class of such an address has the rate of its
    link nevertheless. Packets from the gate come at a lower or equal rate, so the class does not delay them. When a
    link becomes slow and its packets go through the gate from then on, earlier packets still wait in the class, and
    must not leave at once.
    """
    device = endpoint.name
    uplink = endpoint.uplink
    gated_rates = gated_rates or {}
    senders = []
    receivers = []
    rates = []
    # In the order of the numbers, so that equal arguments give equal plans.
    for peer, (number, address) in sorted(peers.items(), key=lambda item: item[1][0]):
        link = links.get((device, peer))
        if link is not None:
            class_number = FIRST_PEER_CLASS + number
            senders.append(_make_sender(class_number, address, link, uplink))
            if link.up:
                lowest = least_rate(gated_rates.get(address), link.rate, uplink)
                rates.append(class_rate(lowest))
        if peer != device:
            incoming = links.get((peer, device), NO_LINK)
            receivers.append(
                _make_receiver(number, address, incoming, endpoint.downlink)
            )
    outgoing = [link for (source, _), link in links.items() if source == device]
    if broadcast and outgoing:
        senders.insert(
            0, _make_broadcast_sender(broadcast, outgoing, gated_rates, uplink)
        )
    return InterfacePlan(
        interface,
        _make_access(uplink, outgoing),
        _make_access(endpoint.downlink, [line.link for line in receivers]),
        tuple(senders),
        tuple(receivers),
        segment_limit(rates),
    )


def linked_addresses(plan: InterfacePlan) -> set[str]:
    """Return the addresses of all devices linked with a device in either direction."""
    addresses = set()
    for sender in plan.senders:
        # Broadcasts have a class as well, but no device has their address.
        if sender.number >= FIRST_PEER_CLASS:
            addresses.add(sender.address)
    for line in plan.receivers:
        if line.link.up:
            addresses.add(line.address)
    return addresses


def segment_limit(rates: Iterable[float]) -> int:
    """Return the number of packets that TCP may pass down at once, as one piece.

    HTB releases a piece at once, however long its transmission takes: five packets at 250 kbit/s would be 0.2 s early.
    Packet by packet, however, few hosts reach 1 Gbit/s. One limit applies to the whole interface, so the fastest of the
    rates in bit/s determines it; beside a fast link, pieces of a slow one are early by up to their transmission time.

    >>> segment_limit([250e3]), segment_limit([250e3, 1e9])
    (1, 16)
    """
    fastest = max(rates, default=CEILING)
    frames = int(fastest / 8 * BURST_SECONDS / FRAME)
    return max(1, min(MAX_SEGMENTS, frames))


def is_impaired(link: Link) -> bool:
    """Return whether a link changes packets beyond limiting their rate.

    >>> is_impaired(Link(rate=1e6)), is_impaired(Link(delay=0.005))
    (False, True)
    """
    return any((link.delay, link.loss, link.bursts, link.duplicate, link.corrupt))


def _make_sender(
    number: int, address: str, link: Link, uplink: float | None
) -> SenderClass:
    rate = class_rate(link.rate)
    # A slower uplink determines how long the queue takes to empty.
    limit = queue_limit(replace(link, rate=least_rate(rate, uplink)))
    return SenderClass(number, address, rate, limit)


def _make_broadcast_sender(
    broadcast: str,
    outgoing: Sequence[Link],
    gated_rates: Collection[str],
    uplink: float | None,
) -> SenderClass:
    # As on a radio, one transmission for all receivers uses the rate of the slowest link.
    slowest = min(outgoing, key=lambda link: class_rate(link.rate))
    # The gate sends each broadcast at the rate of its slowest receiver at that moment.
    if broadcast in gated_rates:
        slowest = replace(slowest, rate=None)
    return _make_sender(BROADCAST_CLASS, broadcast, slowest, uplink)


def class_rate(rate: float | None) -> int:
    """Return the rate of an HTB class in bit/s; a link without a limit has the class rate `CEILING`.

    >>> class_rate(1e6), class_rate(None) == CEILING
    (1000000, True)
    """
    return CEILING if rate is None else round(rate)


def _make_receiver(
    number: int, address: str, link: Link, downlink: float | None
) -> ReceiverLine:
    # A downlink counts every packet, even those of unimpaired links.
    queued = link.up and (is_impaired(link) or downlink is not None)
    return ReceiverLine(number, address, link, line_limit(link), queued)


def _make_access(rate: float | None, links: Iterable[Link]) -> Access | None:
    if rate is None:
        return None
    longest = max((link.delay for link in links), default=0.0)
    return Access(round(rate), queue_limit(Link(rate=rate, delay=longest)))


def burst(rate: float) -> int:
    """Return the size of HTB's bucket in bytes for a rate in bit/s: `BURST_SECONDS` of it, at least about one frame.

    A class may send while its bucket is not negative, so a bucket slightly smaller than a frame releases one frame at
    once, and no second one.

    >>> burst(1e6), burst(1e9)
    (1500, 25000)
    """
    return max(FRAME - ETHERNET_HEADER, math.ceil(rate / 8 * BURST_SECONDS))


def queue_limit(link: Link) -> int:
    """Return the maximum number of full frames that wait at the sender; the link's own limit takes precedence.

    The bandwidth-delay product of a round trip plus a margin; at least 300, because a socket with the kernel's default
    buffer holds that many small packets before it blocks.

    >>> queue_limit(Link(rate=100e6, delay=0.01)), queue_limit(Link(rate=1e6))
    (578, 300)
    """
    if link.limit is not None:
        return link.limit
    seconds = 2 * link.delay + QUEUE_SECONDS
    frames = math.ceil(class_rate(link.rate) / 8 * seconds / FRAME)
    return min(20_000, max(300, frames))


def line_limit(link: Link) -> int:
    """Return the capacity of a link's line in packets: the line represents the wire and must never overflow.

    >>> line_limit(Link(rate=8e6, delay=0.01))
    10000
    """
    # The smallest frame of Ethernet without its checksum, in bytes.
    smallest_frame = 60
    # The bytes on the wire at the full rate, with a margin of 20 %.
    most_bytes = 1.2 * class_rate(link.rate) / 8 * longest_delay(link)
    packets = math.ceil(most_bytes / smallest_frame)
    return min(200_000, max(10_000, packets))
