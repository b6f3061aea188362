"""Transmission rate of broadcasts (casts), and the random loss of casts at each receiver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

from testbed.common.seeds import make_deriver
from testbed.network.link import Link, least_rate
from testbed.wire.cast import with_gaps
from testbed.wire.message import Message

_SEED_COUNT = float(1 << 63)
"""Number of possible derived seeds, all equally likely, so that a seed divided by it is uniform from 0 to 1."""


# Cached for the pairs of devices of a run, which draw once for each cast or frame.
@lru_cache(10_000)
def _seed_deriver(seed: int, sender: str, receiver: str) -> Callable[[str | int], int]:
    return make_deriver(seed, "cast", sender, receiver)


def broadcast_rate(links: Iterable[Link], *limits: float | None) -> float | None:
    """Return the rate of a broadcast in bit/s: the minimum over all receivers, as on a radio.

    ``links`` are all links from the sender, even to devices that are not addressed; ``limits`` are the rates of the
    sender's uplink and cell. A rate of None is unlimited (as fast as the host).

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
    """Return whether a receiver gets a broadcast, or the frame number ``frame`` of a broadcast.

    ``number`` counts the broadcasts of the sender since its boot. The draw depends only on the arguments, so every run
    of a scenario loses the same broadcasts on both clocks.

    >>> [is_received(7, "a", "b", number, 0.5) for number in range(4)]
    [False, True, False, False]
    """
    if message_loss <= 0:
        return True
    name = number if frame is None else f"{number}/{frame}"
    derived_seed = _seed_deriver(seed, sender, receiver)(name)
    return derived_seed / _SEED_COUNT >= message_loss


def received_part(
    message: Message,
    header: int,
    frame: int | None,
    is_heard: Callable[[int | None], bool],
) -> Message | None:
    """Return the received part of a broadcast; None if nothing usable was received.

    The broadcast has ``header`` bytes before its tensors. It is sent in frames of ``frame`` bytes, or as a whole if
    ``frame`` is None. ``is_heard`` returns whether a frame, given by its number, is received; its argument is None for
    the whole broadcast.
    """
    if frame is None:
        return message if is_heard(None) else None
    tensor_bytes = sum(tensor.nbytes for tensor in message.tensors.values())
    frame_count = math.ceil((header + tensor_bytes + message.padding) / frame)
    lost = [number for number in range(frame_count) if not is_heard(number)]
    return with_gaps(message, header, frame, lost)
