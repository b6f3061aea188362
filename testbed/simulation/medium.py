"""Shared transmission media, each with one transmission at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(eq=False)
class Medium:
    """A radio channel, or the transmitter of one device: transmissions in the order of the calls, without interruption.

    All broadcasts of a cell's devices share one medium; a device without a cell has its own medium.
    """

    on_reservation: Callable[[float, float], None] | None = None
    """Function of start and end, called for each reservation, because other traffic has to wait meanwhile."""
    free_at: float = 0.0
    """End of the last reservation so far."""


def occupy(
    media: Collection[Medium], now: float, seconds: float
) -> tuple[float, float]:
    """Reserve the next time span in which all media are free; return its start and end.

    Call the function at the instant at which the sender is ready, since reservations are served in the order of calls.

    >>> channel = Medium()
    >>> occupy([channel], now=0.0, seconds=2.0), occupy([channel], now=1.0, seconds=2.0)
    ((0.0, 2.0), (2.0, 4.0))
    """
    start = max([now, *(medium.free_at for medium in media)])
    for medium in media:
        medium.free_at = start + seconds
        if medium.on_reservation is not None:
            medium.on_reservation(start, start + seconds)
    return start, start + seconds
