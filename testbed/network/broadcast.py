"""Broadcasts (casts): the rate of one, and which devices receive it."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.network.link import Link
from testbed.seeds import derive

_DRAWS = float(1 << 63)


def broadcast_rate(links: Iterable[Link], *limits: float | None) -> float | None:
    """Return the bit/s of a transmission to all: as on a radio, the slowest that shall hear it sets the pace.

    ``links`` are all that lead away from the sender, whomever the cast is for; ``limits`` are what else bounds the
    sender: its uplink, its cell. None is as fast as the host.
    """
    rates = [rate for rate in (*(link.rate for link in links), *limits) if rate is not None]
    return min(rates, default=None)


def heard(seed: int, sender: str, receiver: str, number: int, message_loss: float) -> bool:
    """Return whether a receiver gets the sender's cast of this number (from 0, since the sender booted) whole.

    The draw depends on nothing else, so every run of a scenario, on either clock, loses the same casts.
    """
    return message_loss <= 0 or derive(seed, "cast", sender, receiver, number) / _DRAWS >= message_loss
