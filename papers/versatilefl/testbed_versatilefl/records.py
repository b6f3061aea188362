"""Section V-A: which casts a device has received of late, and how credible that makes the others (equation 4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.network.link import Pair

ALPHA = 0.9
"""Weight of the last window; the paper's."""
SERIES = 20
"""Casts in a row that never arrive where a device has failed, or all of a window that has fewer.

The paper gives no number. Over a link that loses four of five, one of a hundred series is lost by chance.
"""

Ratios = Mapping[Pair, float]
"""By sender and receiver, from 0 to 1; nothing of a device with itself, which is 1."""
Record = dict[str, tuple[float, float]]
"""By sender: the share received at the end of a window, and the credibility there."""


def update_credibility(recent: float, before: float, alpha: float = ALPHA) -> float:
    """Return C at the end of a window, in which the share ``recent`` of the transmissions was received."""
    return alpha * recent + (1 - alpha) * before


def mean_credibility(table: Ratios, device: str) -> float:
    """Return the credibility of a device, as a sender and as a receiver; 0 where there is no record of it."""
    found = [
        value for pair, value in table.items() if device in pair and pair[0] != pair[1]
    ]
    return fmean(found) if found else 0.0


def is_silent(latest: Ratios, device: str) -> bool:
    """Return whether nobody who keeps a record of a device received anything of it of late: it has failed.

    False where there is no such record.
    """
    found = [value for (sender, _), value in latest.items() if sender == device]
    return bool(found) and not any(found)


class ReceptionRecords:
    """One device's records, window after window, and the newest of other devices, which come with their casts.

    Slots go by the clock, and who has nothing to send says so: whatever is not there when it is due was lost. A window
    ends with the last step of its ``steps``.
    """

    def __init__(
        self, device: str, initial: Ratios, alpha: float, steps: int, grace: int
    ) -> None:
        """``initial``: reception ratios of the plan; ``grace``: steps in which records travel."""
        self.newest: dict[str, tuple[int, Record]] = {}
        """By receiver: the newest window of which its record is known, and that record."""
        self._device = device
        self._credibility = dict(initial)
        self._alpha = alpha
        self._steps = steps
        self._grace = grace
        self._noted: defaultdict[str, list[bool]] = defaultdict(list)
        """By sender, for each cast that was due in this window, whether it has arrived."""
        self._lost = 0
        """Casts in a row, whoever sent them."""
        self._open: int | None = None
        self._seen = -1

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing arrives of anyone: not the others have failed, or all at once."""
        return self._lost >= SERIES

    def note_cast(self, sender: str, received: bool) -> None:
        """Note whether a due cast has arrived; a device's own values do not count."""
        if sender != self._device:
            self._noted[sender].append(received)
            self._lost = 0 if received else self._lost + 1

    def merge_records(self, records: Mapping[str, Sequence[Any]]) -> None:
        """Take records that came with a cast, as they are in JSON: window and shares by receiver."""
        for receiver, (window, shares) in records.items():
            if window > self.newest.get(receiver, (-1, {}))[0]:
                self.newest[receiver] = (
                    window,
                    {name: tuple(pair) for name, pair in shares.items()},
                )

    def close_window(self, step: int, arrangement: NeuronAssignment) -> None:
        """Close the window before that of a step, unless that is done."""
        # Backward, a device works on earlier steps than forward.
        before, self._open = self._open, max(step // self._steps, self._open or 0)
        if before is None or self._open == before:
            return
        record = {}
        for sender in arrangement.senders(self._device):
            pair, noted = (sender, self._device), self._noted[sender]
            value = update_credibility(
                _share(noted), self._credibility.get(pair, 0.0), self._alpha
            )
            self._credibility[pair] = value
            record[sender] = (round(_share(noted[-SERIES:]), 4), round(value, 4))
        self._noted.clear()
        self.newest[self._device] = (self._open - 1, record)

    def next_due_window(self, step: int) -> int | None:
        """Return the last window once, as soon as its records have come round."""
        window, position = divmod(step, self._steps)
        if window - 1 <= self._seen or position < self._grace:
            return None
        self._seen = window - 1
        return self._seen

    def receptions_of(self, window: int) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Return by sender and receiver the shares received at the end of a window, and the credibility there.

        Both as far as they are known.
        """
        known = {
            (sender, receiver): values
            for receiver, (at, shares) in self.newest.items()
            if at == window
            for sender, values in shares.items()
        }
        return {pair: share for pair, (share, _) in known.items()}, {
            pair: value for pair, (_, value) in known.items()
        }


def _share(noted: Sequence[bool]) -> float:
    """Return the share received; 0 of a device of which nothing was due."""
    return sum(noted) / len(noted) if noted else 0.0
