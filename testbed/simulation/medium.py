"""Shared transmission media, each with one transmission at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(eq=False)
class Medium:
    """A radio channel, or one device's own transmitter: whoever asks first transmits first, nobody interrupts.

    A cell's devices share one of these for whatever they send to each other; a device in no cell has one of its own
    for its casts.
    """

    reserved: Callable[[float, float], None] | None = None
    """Callback for each reservation, since other traffic has to wait."""
    free_at: float = 0.0
    """When the last transmission reserved so far ends."""


def occupy(
    media: Collection[Medium], now: float, seconds: float
) -> tuple[float, float]:
    """Reserve the next time span in which all media are free; return its start and end.

    To be called at the very instant at which the sender is ready: reservations are served in the order of calls.
    """
    start = max([now, *(medium.free_at for medium in media)])
    for medium in media:
        medium.free_at = start + seconds
        if medium.reserved is not None:
            medium.reserved(start, start + seconds)
    return start, start + seconds
