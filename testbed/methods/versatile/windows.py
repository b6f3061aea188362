"""The windows of one device: what it received in each, and whether it is time to look at what all received."""

from __future__ import annotations

from testbed.methods.versatile.credibility import Ratios, Reception, credibility
from testbed.methods.versatile.knowledge import Knowledge


class Windows:
    """Records of one device, window after window; a window ends with the last step of its ``steps``."""

    def __init__(
        self, knowledge: Knowledge, reception: Reception, initial: Ratios, alpha: float, steps: int, grace: int
    ) -> None:
        """``initial``: reception ratios of the plan; ``grace``: steps in which records travel."""
        self._knowledge = knowledge
        self._reception = reception
        self._credibility = dict(initial)
        self._alpha = alpha
        self._steps = steps
        self._grace = grace
        self._open: int | None = None
        self._seen = -1

    @property
    def cut_off(self) -> bool:
        """Whether the device hears nobody, now."""
        return self._reception.cut_off

    def close(self, step: int) -> None:
        """Close the window before that of a step, unless that is done."""
        # Backward, a device works on earlier steps than forward.
        before, self._open = self._open, max(step // self._steps, self._open or 0)
        if before is None or self._open == before:
            return
        me, record = self._knowledge.device, {}
        for sender, (recent, latest) in self._reception.close(self._knowledge.now.senders(me)).items():
            value = credibility(recent, self._credibility.get((sender, me), 0.0), self._alpha)
            self._credibility[sender, me] = value
            record[sender] = (round(latest, 4), round(value, 4))
        self._knowledge.records[me] = (self._open - 1, record)

    def due(self, step: int) -> int | None:
        """Return the last window once, as soon as its records have come round."""
        window, position = divmod(step, self._steps)
        if window - 1 <= self._seen or position < self._grace:
            return None
        self._seen = window - 1
        return self._seen
