"""A radio cell: devices that share one channel, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from testbed.network.link import Pair


@dataclass(frozen=True)
class Cell:
    """Devices that hear each other on one channel: what any of them sends to another takes from one rate.

    What a member sends to a device outside of the cell goes another way and costs the channel nothing. The links' own
    rates hold beside the channel's.
    """

    devices: tuple[str, ...]
    rate: float
    """bit/s on the wire, of all transmissions together."""

    def carries(self, pair: Pair) -> bool:
        """Return whether a transmission between the two takes from the channel."""
        return pair[0] in self.devices and pair[1] in self.devices


def cell_of(pair: Pair, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell that carries a pair; there is one at most."""
    return next((cell for cell in cells if cell.carries(pair)), None)
