"""A directed link between two devices, as a value."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[str, str]
"""(source device, destination device): a link is directed."""


@dataclass(frozen=True)
class Link:
    """What packets meet on their way from one device to another.

    The rate is charged at the sender; delay and loss act at the receiver, by source. A link that is not
    ``up`` drops everything silently, as a partition does.
    """

    rate: float | None = None
    """bit/s on the wire (Ethernet frames); None is as fast as the host."""
    delay: float = 0.0
    """One-way delay in seconds."""
    loss: float = 0.0
    """Fraction of packets lost, each independently."""
    up: bool = True

    def transmission_time(self, wire_bytes: float) -> float:
        """Return the seconds that the sender is busy putting bytes on the wire."""
        return 0.0 if self.rate is None else wire_bytes * 8 / self.rate
