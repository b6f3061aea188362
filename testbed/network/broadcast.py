"""Broadcasts (casts): the rate of one, and which devices receive it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from testbed.common.seeds import deriving
from testbed.network.link import Link, least_rate
from testbed.wire.cast import with_gaps
from testbed.wire.message import Message

_DRAWS = float(1 << 63)


@lru_cache(10_000)
def _draws(seed: int, sender: str, receiver: str) -> Callable[[str | int], int]:
    return deriving(seed, "cast", sender, receiver)


def broadcast_rate(links: Iterable[Link], *limits: float | None) -> float | None:
    """Return the bit/s of a transmission to all: as on a radio, the slowest that shall hear it sets the pace.

    ``links`` are all that lead away from the sender, whomever the cast is for; ``limits`` are what else bounds the
    sender: its uplink, its cell. None is as fast as the host.
    """
    return least_rate(*(link.rate for link in links), *limits)


def heard(seed: int, sender: str, receiver: str, number: int, message_loss: float, frame: int | None = None) -> bool:
    """Return whether a receiver gets the sender's cast of this number (from 0, since the sender booted).

    All of it, or one of its frames. The draw depends on nothing else, so every run of a scenario, on either clock,
    loses the same casts.
    """
    if message_loss <= 0:
        return True
    drawn = _draws(seed, sender, receiver)(number if frame is None else f"{number}/{frame}")
    return drawn / _DRAWS >= message_loss


def received(message: Message, header: int, frame: int | None, heard: Callable[[int | None], bool]) -> Message | None:
    """Return what is heard of a cast of ``header`` bytes and values, in frames of ``frame`` bytes or whole."""
    if frame is None:
        return message if heard(None) else None
    size = header + sum(tensor.nbytes for tensor in message.tensors.values()) + message.padding
    return with_gaps(message, header, frame, [each for each in range(-(-size // frame)) if not heard(each)])
