"""Section V-A: each device's records of received casts, and the credibility of the others (equation 4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.network.link import Pair

ALPHA = 0.9
"""Weight of the last window in equation (4); the value of Section VI-B."""
SERIES = 20
"""Number of missing casts in a row after which a device counts as failed; all casts of a window with fewer casts.

The paper gives no number. Over a link that loses four casts of five, one series in a hundred is missing by chance.
"""

Ratios = Mapping[Pair, float]
"""By sender and receiver, from 0 to 1; pairs of different devices only."""
Record = dict[str, tuple[float, float]]
"""By sender: the fraction received at the end of a window, and the credibility at that time."""


def update_credibility(recent: float, before: float, alpha: float = ALPHA) -> float:
    """Return C of equation (4) at the end of a window with the fraction ``recent`` of received casts.

    ``before`` is C at the end of the previous window.

    >>> round(update_credibility(0.0, 0.9), 2)
    0.09
    """
    return alpha * recent + (1 - alpha) * before


def mean_credibility(table: Ratios, device: str) -> float:
    """Return the credibility of a device, averaged as a sender and as a receiver; 0 without a record of the device.

    Section V-B: "the status as both the sender and the receiver affects the net connectivity".

    >>> mean_credibility({("a", "b"): 0.1, ("b", "a"): 0.2, ("b", "c"): 0.9}, "a")
    0.15000000000000002
    """
    values = []
    for (sender, receiver), value in table.items():
        # A device and itself are no link.
        if device in (sender, receiver) and sender != receiver:
            values.append(value)
    return fmean(values) if values else 0.0


def is_silent(latest: Ratios, device: str) -> bool:
    """Return whether a device has failed: no receiver with a record of the device has any of its latest casts.

    False without such a record.

    >>> is_silent({("a", "b"): 0.0, ("a", "c"): 0.0, ("b", "c"): 0.8}, "a")
    True
    """
    has_receiver = False
    for (sender, _), share in latest.items():
        if sender != device:
            continue
        if share:
            return False
        has_receiver = True
    return has_receiver


class ReceptionRecords:
    """One device's records, window after window, and the newest records of other devices from their casts.

    Slots go by the clock, and devices without values cast an empty message: a message that is missing in its slot was
    lost. A window has ``steps`` steps.
    """

    def __init__(
        self, device: str, initial: Ratios, alpha: float, steps: int, record_delay: int
    ) -> None:
        """``initial`` are the reception ratios of the plan, C(0) of equation (4).

        ``alpha`` is the weight of the last window, ``steps`` the length of a window, and ``record_delay`` the number of
        steps in which records reach all devices.
        """
        self.newest: dict[str, tuple[int, Record]] = {}
        """By receiver: the newest window with a known record, and the record."""
        self._device = device
        self._credibility = dict(initial)
        self._alpha = alpha
        self._steps = steps
        self._record_delay = record_delay
        self._arrivals: defaultdict[str, list[bool]] = defaultdict(list)
        """By sender, whether each cast due in this window has arrived."""
        self._lost_in_a_row = 0
        """Number of lost casts in a row, from any sender."""
        self._current_window: int | None = None
        """The current window; None before the first step."""
        self._last_due_window = -1
        """The last window returned by `next_due_window`."""

    @property
    def is_cut_off(self) -> bool:
        """Whether no cast of any device arrives: most likely this device has lost all links, not all others failed."""
        return self._lost_in_a_row >= SERIES

    def note_cast(self, sender: str, *, received: bool) -> None:
        """Record whether a due cast has arrived; a device's own values do not count."""
        if sender != self._device:
            self._arrivals[sender].append(received)
            self._lost_in_a_row = 0 if received else self._lost_in_a_row + 1

    def merge_records(self, records: Mapping[str, Sequence[Any]]) -> None:
        """Store all records newer than the known ones. ``records`` has receiver -> window and record, as in JSON."""
        for receiver, (window, shares) in records.items():
            known_window, _ = self.newest.get(receiver, (-1, {}))
            if window > known_window:
                # JSON has lists instead of tuples.
                record = {name: tuple(pair) for name, pair in shares.items()}
                self.newest[receiver] = (window, record)

    def close_window(self, step: int, assignment: NeuronAssignment) -> None:
        """Close the window before the current step's window, if still open."""
        before = self._current_window
        # The backward of a step comes after the forward of later ones: a closed window stays closed.
        self._current_window = max(step // self._steps, before or 0)
        if before is None or self._current_window == before:
            return
        record = {}
        for sender in assignment.senders(self._device):
            pair = (sender, self._device)
            arrivals = self._arrivals[sender]
            recent = _received_share(arrivals)
            # Section V-A: "the credibility of the joining resource is recorded with zero".
            known = self._credibility.get(pair, 0.0)
            value = update_credibility(recent, known, self._alpha)
            self._credibility[pair] = value
            # Only the last casts: a device that failed in the middle of a window has cast before.
            latest = _received_share(arrivals[-SERIES:])
            # Rounded, since every cast carries the records.
            share = round(latest, 4)
            record[sender] = (share, round(value, 4))
        self._arrivals.clear()
        self.newest[self._device] = (self._current_window - 1, record)

    def next_due_window(self, step: int) -> int | None:
        """Return the last window once, as soon as all devices know the records; otherwise None."""
        window, position = divmod(step, self._steps)
        if window - 1 <= self._last_due_window or position < self._record_delay:
            return None
        self._last_due_window = window - 1
        return self._last_due_window

    def receptions_of(self, window: int) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Return the received fractions at the end of a window, and the credibilities, by sender and receiver.

        Both contain only pairs whose record of this window is known here.
        """
        latest: dict[Pair, float] = {}
        credibilities: dict[Pair, float] = {}
        for receiver, (known_window, record) in self.newest.items():
            if known_window != window:
                continue
            for sender, (share, credibility) in record.items():
                latest[sender, receiver] = share
                credibilities[sender, receiver] = credibility
        return latest, credibilities


def _received_share(arrivals: Sequence[bool]) -> float:
    """Return the fraction received; 0 if no cast was due."""
    return sum(arrivals) / len(arrivals) if arrivals else 0.0
