"""What chance does to messages on one direction of a link: packets lost, corrupted, late, or out of turn.

A message arrives when the last of its packets does, in whatever order: TCP puts them right. A corrupted packet
fails its checksum and is as good as lost; one that arrives twice changes nothing.
"""

from __future__ import annotations

import math

from testbed.network import impairments
from testbed.network.link import Link
from testbed.wire.framing import ETHERNET_HEADER, SEGMENT, TCP_HEADERS

RETRANSMISSION_TIMEOUT = 0.2
"""Seconds beyond the round trip before TCP sends unanswered bytes again (Linux's minimum); doubles each time."""
LONGEST_TIMEOUT = 2.0
"""Where the doubling ends: the agent gives a connection up that is silent for so long, and connects again."""
PACKET = SEGMENT + TCP_HEADERS + ETHERNET_HEADER
"""Bytes on the wire of a full segment."""
_ROUNDS = 10_000
"""Attempts after which it gets through: so that a link that loses nearly everything delays nobody for ever."""
_LATEST = 1000
"""Packets of a message whose delays are drawn: those before its last thousand are there long before it is."""


class Crossing:
    """The random processes of one direction of a link, from one change of its figures to the next."""

    def __init__(self, link: Link, seed: str) -> None:
        self._delay = link.delay
        self._lost = impairments.losses(link, f"{seed} loss")
        self._corrupted = impairments.chance(link.corrupt, f"{seed} corrupt")
        self._delays = impairments.delays(link, f"{seed} delay")

    def lost(self) -> bool:
        """Draw the fate of the next packet."""
        gone = self._lost is not None and self._lost()
        return (self._corrupted is not None and self._corrupted()) or gone

    def delay(self) -> float:
        """Draw the delay of the next packet."""
        return self._delay if self._delays is None else self._delays()

    def message(self, wire: float, spacing: float, round_trip: float) -> tuple[float, float]:
        """Draw what becomes of a message of this many bytes on the wire, whose packets leave ``spacing`` seconds apart.

        Returns the bytes sent in all, and by how much it arrives later than its last byte's departure and the link's
        delay say: negative where that byte skips the delay. Each round repeats what the one before lost. Where others
        follow a lost packet, that is noticed within a round trip; a lone one is repeated only at the time-out.
        """
        total, lag, timeout = wire, 0.0, RETRANSMISSION_TIMEOUT
        packets = math.ceil(wire / PACKET)
        for _ in range(_ROUNDS):
            if not (lost := self._losses(packets)):
                break
            total += min(lost * PACKET, wire)
            lag += round_trip
            if packets == 1:
                lag += timeout
                timeout = min(2 * timeout, LONGEST_TIMEOUT)
            packets = lost
        return total, lag + self._latest(packets, spacing)

    def answer(self, round_trip: float) -> float:
        """Draw by how much an answer, a message of one packet, arrives later than the link's delay says."""
        return self.message(PACKET, 0.0, round_trip)[1]

    def _losses(self, packets: int) -> int:
        if self._lost is None and self._corrupted is None:
            return 0
        return sum(self.lost() for _ in range(packets))

    def _latest(self, packets: int, spacing: float) -> float:
        """Return when the last of the packets arrives, from when the last one would with the link's delay."""
        if self._delays is None:
            return 0.0
        drawn = min(packets, _LATEST)
        return max(self._delays() - (drawn - 1 - index) * spacing for index in range(drawn)) - self._delay


def has_chance(link: Link) -> bool:
    """Return whether chance has a part in what becomes of a link's packets."""
    return bool(link.loss or link.jitter or link.bursts or link.corrupt or link.reorder)


def passes(link: Link) -> bool:
    """Return whether anything ever gets across."""
    return link.up and not (has_chance(link) and impairments.expected_loss(link) >= 1)


def crossing(link: Link, seed: str) -> Crossing | None:
    """Return the random processes of a link, None where chance has no part in it, as where all is lost."""
    return Crossing(link, seed) if has_chance(link) and impairments.expected_loss(link) < 1 else None
