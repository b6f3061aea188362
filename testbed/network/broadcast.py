"""Broadcasts: transmission rate and receivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from testbed.common.seeds import deriving
from testbed.network.link import Link, least_rate
from testbed.wire.cast import with_gaps
from testbed.wire.message import Message

_DRAWS = float(1 << 63)


@lru_cache(10_000)
def _seeded_draws(seed: int, sender: str, receiver: str) -> Callable[[str | int], int]:
    return deriving(seed, "cast", sender, receiver)


def broadcast_rate(links: Iterable[Link], *limits: float | None) -> float | None:
    """Return the rate of a broadcast in bit/s: the minimum over all receivers, as on a radio.

    ``links`` are all that lead away from the sender, whomever the cast is for; ``limits`` are what else bounds the
    sender: its uplink, its cell. None is as fast as the host.
    """
    return least_rate(*(link.rate for link in links), *limits)


def heard(
    seed: int,
    sender: str,
    receiver: str,
    number: int,
    message_loss: float,
    frame: int | None = None,
) -> bool:
    """Return whether a receiver gets a broadcast, or one of its frames; ``number`` counts broadcasts since the sender's
    boot.

    The draw depends only on the arguments, so every run of a scenario loses the same broadcasts on both clocks.
    """
    if message_loss <= 0:
        return True
    drawn = _seeded_draws(seed, sender, receiver)(
        number if frame is None else f"{number}/{frame}"
    )
    return drawn / _DRAWS >= message_loss


def received(
    message: Message,
    header: int,
    frame: int | None,
    heard: Callable[[int | None], bool],
) -> Message | None:
    """Return the received part of a broadcast of ``header`` bytes and values, sent in frames of ``frame`` bytes or
    whole."""
    if frame is None:
        return message if heard(None) else None
    size = (
        header
        + sum(tensor.nbytes for tensor in message.tensors.values())
        + message.padding
    )
    return with_gaps(
        message,
        header,
        frame,
        [each for each in range(-(-size // frame)) if not heard(each)],
    )
