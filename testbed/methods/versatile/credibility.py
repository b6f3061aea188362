"""Equation (4): how well devices hear each other of late, from what was received and what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean

from testbed.network.link import Pair

ALPHA = 0.9
"""Weight of the last window; the paper's."""

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


def silent(recent: Ratios, device: str) -> bool:
    """Return whether nobody who keeps a record of a device received anything of it: it has failed.

    False where there is no such record.
    """
    found = [value for (sender, _), value in recent.items() if sender == device]
    return bool(found) and not any(found)


class Reception:
    """What one device received in the window under way, of what it should have: gaps in numbers are losses.

    A sender numbers its casts, those of each kind to each layer by themselves. What was lost behind the last one that
    arrived counts in the window in which the next one does; before the first one that ever did, nothing counts.
    """

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()
        self._newest: dict[tuple[str, str], int] = {}
        self._before: dict[tuple[str, str], int] = {}
        """The newest when the window began."""

    def note(self, sender: str, stream: str, number: int) -> None:
        """Note a cast that has arrived; one with a lower number than before is of a sender that booted."""
        key = (sender, stream)
        if key not in self._newest or number <= self._newest[key]:
            self._before[key] = number - 1
        self._newest[key] = number
        self._received[sender] += 1

    def close(self, senders: Iterable[str]) -> dict[str, float]:
        """Return the share received of each sender, 0 of one that was not heard, and begin the next window."""
        due: Counter[str] = Counter()
        for key, number in self._newest.items():
            due[key[0]] += number - self._before[key]
        found = {sender: min(1.0, self._received[sender] / due[sender]) if due[sender] else 0.0 for sender in senders}
        self._before = dict(self._newest)
        self._received.clear()
        return found
