"""Requests for text: their prompts, when they arrive, and how many tokens each gets. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from testbed.common.seeds import derive


@dataclass(frozen=True)
class Request:
    """A prompt with its time of arrival at the source."""

    number: int
    prompt: tuple[int, ...]
    """Its tokens."""
    arrival: float
    """Seconds after the start of the run."""
    limit: int
    """Tokens to generate at most."""


def arrivals(
    count: int, interval: float, poisson: bool, seed: int
) -> tuple[float, ...]:
    """Return the arrival times of requests: every ``interval`` seconds, or at random with that mean; 0: all at once.

    Example:
        >>> arrivals(3, 2.0, False, 0)
        (0.0, 2.0, 4.0)
    """
    if not poisson or interval == 0:
        return tuple(number * interval for number in range(count))
    draw = random.Random(derive(seed, "arrivals"))
    # Times between the events of a Poisson process are exponentially distributed.
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + draw.expovariate(1 / interval))
    return tuple(times[:count])


def random_prompt(
    length: int, vocabulary: int, seed: int, number: int
) -> tuple[int, ...]:
    """Return a prompt of so many random tokens, always the same for a seed and number.

    >>> len(random_prompt(4, 512, seed=1, number=0))
    4
    """
    draw = random.Random(derive(seed, "prompt", number))
    return tuple(draw.randrange(min(vocabulary, 256)) for _ in range(length))
