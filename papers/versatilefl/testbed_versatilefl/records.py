"""Section V-A: each device's records of received casts, and the credibility of other devices (equation 4).

Training is divided into windows of equally many steps. At the end of a window a device records, for each sender, the
fraction of casts that it has received, and the sender's credibility.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.network.link import Pair

ALPHA = 0.9
"""Weight of the last window in equation (4); the value of Section VI-B."""
FAILURE_SERIES = 20
"""Number of lost casts in a row after which a device counts as failed; in a window with fewer casts, all of them.

The paper gives no number. Over a link that loses four casts of five, one series in a hundred is lost by chance.
"""

Ratios = Mapping[Pair, float]
"""(sender, receiver) -> a fraction from 0 to 1; pairs of different devices only."""
Record = dict[str, tuple[float, float]]
"""Sender -> fraction of its last `FAILURE_SERIES` casts in a window that were received, and credibility afterwards."""


def update_credibility(recent: float, before: float, alpha: float = ALPHA) -> float:
    """Return C of equation (4) at the end of a window with the fraction ``recent`` of received casts.

    ``before`` is C at the end of the previous window.

    >>> round(update_credibility(0.0, 0.9), 2)
    0.09
    """
    return alpha * recent + (1 - alpha) * before


def mean_credibility(table: Ratios, device: str) -> float:
    """Return the mean credibility of a device as a sender and as a receiver; 0 without a value in ``table``.

    Section V-B: "the status as both the sender and the receiver affects the net connectivity".

    >>> mean_credibility({("a", "b"): 0.1, ("b", "a"): 0.2, ("b", "c"): 0.9}, "a")
    0.15000000000000002
    """
    values = []
    for (sender, receiver), value in table.items():
        # A pair of a device and itself has no link.
        if device in (sender, receiver) and sender != receiver:
            values.append(value)
    return fmean(values) if values else 0.0


def is_silent(latest: Ratios, device: str) -> bool:
    """Return whether a device has failed: no receiver has received any of the device's latest casts.

    ``latest`` are the received fractions of latest casts. A device without a value in ``latest`` has not failed.

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

    Slots go by the clock, and devices without values cast an empty message. A message that is missing in its slot has
    thus been lost.
    """

    def __init__(
        self, device: str, initial: Ratios, alpha: float, steps: int, record_delay: int
    ) -> None:
        """``initial`` are the reception ratios of the plan, C(0) of equation (4).

        ``alpha`` is the weight of the newest window, ``steps`` the length of a window, and ``record_delay`` the number
        of steps in which records reach all devices.
        """
        self.newest: dict[str, tuple[int, Record]] = {}
        """Receiver -> number of the newest window of which its record is known here, and the record."""
        self._device = device
        self._credibility = dict(initial)
        self._alpha = alpha
        self._steps = steps
        self._record_delay = record_delay
        self._arrivals: defaultdict[str, list[bool]] = defaultdict(list)
        """Sender -> whether each cast expected from it in this window has arrived, in order."""
        self._lost_in_a_row = 0
        """Number of casts lost since the last received one, from any sender."""
        self._current_window: int | None = None
        """The current window; None before the first step."""
        self._last_due_window = -1
        """The newest window that `next_due_window` has returned."""

    @property
    def is_cut_off(self) -> bool:
        """Whether no cast of any device arrives: most likely, this device has lost its links."""
        return self._lost_in_a_row >= FAILURE_SERIES

    def note_cast(self, sender: str, *, received: bool) -> None:
        """Record whether an expected cast has arrived; values of this device are no casts and do not count."""
        if sender == self._device:
            return
        self._arrivals[sender].append(received)
        if received:
            self._lost_in_a_row = 0
        else:
            self._lost_in_a_row += 1

    def merge_records(self, records: Mapping[str, Sequence[Any]]) -> None:
        """Store records newer than the known ones.

        ``records`` maps each receiver to its window and record, with the lists of JSON in place of tuples.
        """
        for receiver, (window, shares) in records.items():
            known_window, _ = self.newest.get(receiver, (-1, {}))
            if window > known_window:
                record = {name: tuple(pair) for name, pair in shares.items()}
                self.newest[receiver] = (window, record)

    def close_window(self, step: int, assignment: NeuronAssignment) -> None:
        """Make the record of a window, once the device works on a step of the next window."""
        previous_window = self._current_window
        # The backward of a step comes after the forward of later steps, so ``step`` may return to the closed window.
        self._current_window = max(step // self._steps, previous_window or 0)
        if previous_window is None or self._current_window == previous_window:
            return
        record = {}
        for sender in assignment.senders(self._device):
            pair = (sender, self._device)
            arrivals = self._arrivals[sender]
            recent = _received_share(arrivals)
            # Section V-A: "the credibility of the joining resource is recorded with zero".
            before = self._credibility.get(pair, 0.0)
            credibility = update_credibility(recent, before, self._alpha)
            self._credibility[pair] = credibility
            # Only the last casts: a device that failed in the middle of a window has cast before.
            latest = _received_share(arrivals[-FAILURE_SERIES:])
            # Rounded to keep casts short, since every cast carries the records.
            record[sender] = (round(latest, 4), round(credibility, 4))
        self._arrivals.clear()
        self.newest[self._device] = (self._current_window - 1, record)

    def next_due_window(self, step: int) -> int | None:
        """Return the window before the current one, once, as soon as all devices know its records; otherwise None."""
        window, steps_in_window = divmod(step, self._steps)
        previous_window = window - 1
        if previous_window <= self._last_due_window:
            return None
        if steps_in_window < self._record_delay:
            return None
        self._last_due_window = previous_window
        return previous_window

    def receptions_of(self, window: int) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Return the fractions of latest casts received in a window, and the credibilities after the window.

        Both map (sender, receiver) to a value, for receivers whose record of this window is known here.
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
    """Return the fraction of received casts; 0 if no cast was expected."""
    return sum(arrivals) / len(arrivals) if arrivals else 0.0
