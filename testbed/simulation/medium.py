"""What devices share when they transmit: one transmission at a time."""

from __future__ import annotations


class Medium:
    """A radio channel, or one device's own transmitter: whoever asks first transmits first, nobody interrupts.

    A cell's devices share one of these for whatever they send to each other; a device in no cell has one of its own
    for its casts.
    """

    __slots__ = ("_free_at",)

    def __init__(self) -> None:
        self._free_at = 0.0

    def occupy(self, now: float, seconds: float) -> tuple[float, float]:
        """Reserve the next free stretch for a transmission that is ready at ``now``; return its start and end.

        To be called at the very instant at which the sender is ready: reservations are served in the order of calls.
        """
        start = self._free_at if self._free_at > now else now
        self._free_at = start + seconds
        return start, self._free_at
