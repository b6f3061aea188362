"""Equation (4): how well devices hear each other of late, from what was received and what was not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from testbed.network.link import Pair

ALPHA = 0.9
"""Weight of the last window; the paper's."""
SERIES = 20
"""Casts in a row that never arrive where a device has failed, or all of a window that has fewer.

The paper gives no number. Over a link that loses four of five, one of a hundred series is lost by chance.
"""

Ratios = Mapping[Pair, float]
"""By sender and receiver, from 0 to 1; nothing of a device with itself, which is 1."""


def credibility(recent: float, before: float, alpha: float = ALPHA) -> float:
    """Return C at the end of a window, in which the share ``recent`` of the transmissions was received."""
    return alpha * recent + (1 - alpha) * before


def updated(before: Ratios, recent: Ratios, alpha: float = ALPHA) -> dict[Pair, float]:
    """Return C of all pairs; a pair of which there is no record of the window received nothing."""
    pairs = {pair: None for pair in (*before, *recent) if pair[0] != pair[1]}
    return {pair: credibility(recent.get(pair, 0.0), before.get(pair, 0.0), alpha) for pair in pairs}


def average(table: Ratios, device: str) -> float:
    """Return the credibility of a device, as a sender and as a receiver; 0 where there is no record of it."""
    found = [value for pair, value in table.items() if device in pair and pair[0] != pair[1]]
    return fmean(found) if found else 0.0


def silent(latest: Ratios, device: str) -> bool:
    """Return whether nobody who keeps a record of a device received anything of it of late: it has failed.

    False where there is no such record.
    """
    found = [value for (sender, _), value in latest.items() if sender == device]
    return bool(found) and not any(found)


class Reception:
    """What one device received in the window under way, of what it should have.

    Slots go by the clock, and who has nothing to send says so: whatever is not there when it is due was lost.
    """

    def __init__(self) -> None:
        self._noted: defaultdict[str, list[bool]] = defaultdict(list)
        self._lost = 0
        """In a row, whoever sent them."""

    @property
    def cut_off(self) -> bool:
        """Whether nothing arrives of anyone: not the others have failed, or all at once."""
        return self._lost >= SERIES

    def note(self, sender: str, received: bool) -> None:
        """Note whether a cast that was due has arrived."""
        self._noted[sender].append(received)
        self._lost = 0 if received else self._lost + 1

    def close(self, senders: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Return the shares received of each sender, in the window and of the last `SERIES`; begin the next window.

        0 of one of which nothing was due.
        """
        found = {sender: (_share(self._noted[sender]), _share(self._noted[sender][-SERIES:])) for sender in senders}
        self._noted.clear()
        return found


def _share(noted: Sequence[bool]) -> float:
    return sum(noted) / len(noted) if noted else 0.0
