"""Random transmission of messages on one direction of a link: loss, corruption, delay and reordering.

A message arrives with the last of its packets, in any order, because TCP restores the order. A corrupted packet fails
its checksum and counts as lost; a duplicate changes nothing. `testbed.simulation.reno` repeats lost packets and slows
down after a loss.
"""

from __future__ import annotations

import math

from testbed.network import impairments
from testbed.network.link import Link
from testbed.simulation.reno import (
    TIMEOUT_MARGIN,
    Draw,
    Transmission,
    Window,
    double_timeout,
)
from testbed.wire.framing import ETHERNET_HEADER, SEGMENT, TCP_HEADERS

PACKET = SEGMENT + TCP_HEADERS + ETHERNET_HEADER
"""Bytes on the wire of a full segment."""
_MAX_ATTEMPTS = 10_000
"""Maximum number of attempts, so that a link with nearly total loss cannot block forever."""
_MAX_DRAWN_DELAYS = 1000
"""Number of final packets with drawn delays; earlier ones arrive long before the end."""


class Crossing:
    """The random processes of one direction of a link, between two changes of the link's properties."""

    def __init__(self, link: Link, seed: str) -> None:
        self._delay = link.delay
        self._lost = impairments.loss_process(link, f"{seed} loss")
        self._corrupted = impairments.bernoulli_process(link.corrupt, f"{seed} corrupt")
        self._delays = impairments.delay_process(link, f"{seed} delay")

    def draw_loss(self) -> bool:
        """Draw the fate of the next packet: true if lost."""
        # Both are drawn for each packet, so that a change of one does not shift the draws of the other.
        gone = self._lost is not None and self._lost()
        return (self._corrupted is not None and self._corrupted()) or gone

    def draw_delay(self) -> float:
        """Draw the delay of the next packet, in seconds."""
        return self._delay if self._delays is None else self._delays()

    def draw_message(
        self,
        wire: float,
        spacing: float,
        round_trip: float,
        window: Window,
        draw_acknowledgement_loss: Draw,
    ) -> tuple[float, float, float]:
        """Draw the transmission of a message of ``wire`` bytes, with ``spacing`` seconds per full packet.

        Returns the number of bytes sent, including repeated ones; the minimum seconds until they have left, 0 if the
        rate alone decides; and the lateness of the arrival relative to the last byte's departure plus the link's delay,
        negative if that byte skips the delay. ``draw_acknowledgement_loss`` draws whether an acknowledgement is lost.
        """
        packets = math.ceil(wire / PACKET)
        if self._lost is None and self._corrupted is None:
            return wire, 0.0, self._latest_arrival(packets, spacing)
        # All packets get an equal size, a negligible error: in fact only the last one is smaller.
        size = wire / packets
        transmission = Transmission(
            window,
            packets,
            spacing * size / PACKET,
            round_trip,
            self.draw_loss,
            draw_acknowledgement_loss,
        )
        transmission.run()
        lateness = transmission.last_departure - transmission.sending_seconds
        lateness += self._latest_arrival(transmission.last_round_size, spacing)
        return transmission.sent_packets * size, transmission.sending_seconds, lateness

    def draw_acknowledgement(self, round_trip: float) -> float:
        """Draw the lateness, relative to the link's delay, of an acknowledgement, which is one packet.

        The message of the acknowledgement uses the other direction; ``round_trip`` is in seconds.
        """
        lag = 0.0
        timeout = round_trip + TIMEOUT_MARGIN
        for _ in range(_MAX_ATTEMPTS):
            if not self.draw_loss():
                break
            lag += timeout
            timeout = double_timeout(timeout, round_trip)
        return lag + self._latest_arrival(1, 0.0)

    def _latest_arrival(self, packets: int, spacing: float) -> float:
        """Return the arrival of the latest packet, relative to the arrival of the final one with the link's delay."""
        if self._delays is None:
            return 0.0
        drawn = min(packets, _MAX_DRAWN_DELAYS)
        latest = -math.inf
        for behind in range(drawn - 1, -1, -1):
            # A packet sent earlier by some spacings may still be the last to arrive.
            latest = max(latest, self._delays() - behind * spacing)
        return latest - self._delay


def is_random_link(link: Link) -> bool:
    """Return whether a link has random behaviour."""
    return bool(link.loss or link.jitter or link.bursts or link.corrupt or link.reorder)


def loses_everything(link: Link) -> bool:
    """Return whether every packet is lost by chance."""
    return is_random_link(link) and impairments.expected_loss(link) >= 1


def is_passable(link: Link) -> bool:
    """Return whether any packet arrives."""
    return link.up and not loses_everything(link)


def make_crossing(link: Link, seed: str) -> Crossing | None:
    """Return the random processes of a link; None for a deterministic link."""
    if not is_random_link(link) or loses_everything(link):
        return None
    return Crossing(link, seed)
