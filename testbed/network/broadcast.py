"""Broadcasts: transmission rate and receivers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

from testbed.common.seeds import make_deriver
from testbed.network.link import Link, least_rate
from testbed.wire.cast import with_gaps
from testbed.wire.message import Message

_DRAWS = float(1 << 63)
"""Number of values of a derived seed, which is equally likely to be any of them."""


@lru_cache(10_000)
def _seeded_draws(seed: int, sender: str, receiver: str) -> Callable[[str | int], int]:
    return make_deriver(seed, "cast", sender, receiver)


def broadcast_rate(links: Iterable[Link], *limits: float | None) -> float | None:
    """Return the rate of a broadcast in bit/s: the minimum over all receivers, as on a radio.

    ``links`` are all links from the sender, including those to devices that the broadcast is not for; ``limits`` are
    further bounds of the sender: its uplink, its cell. None is as fast as the host.

    >>> broadcast_rate([Link(rate=6e6), Link(rate=2e6)], None)
    2000000.0
    """
    return least_rate(*(link.rate for link in links), *limits)


def is_received(
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

    >>> [is_received(7, "a", "b", number, 0.5) for number in range(4)]
    [False, True, False, False]
    """
    if message_loss <= 0:
        return True
    name = number if frame is None else f"{number}/{frame}"
    draw = _seeded_draws(seed, sender, receiver)(name)
    return draw / _DRAWS >= message_loss


def received_part(
    message: Message,
    header: int,
    frame: int | None,
    is_heard: Callable[[int | None], bool],
) -> Message | None:
    """Return the received part of a broadcast of ``header`` bytes and values, sent in frames of ``frame`` bytes or
    whole. ``is_heard`` decides about each frame, or about the whole (None)."""
    if frame is None:
        return message if is_heard(None) else None
    values = sum(tensor.nbytes for tensor in message.tensors.values())
    frames = math.ceil((header + values + message.padding) / frame)
    lost = [number for number in range(frames) if not is_heard(number)]
    return with_gaps(message, header, frame, lost)
