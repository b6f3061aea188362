"""Requests for text: prompts, times of arrival, and numbers of tokens. Pure functions without torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from testbed.common.seeds import derive


@dataclass(frozen=True)
class Request:
    """A prompt with the time of arrival at the coordinator."""

    number: int
    prompt: tuple[int, ...]
    """Tokens of the prompt."""
    arrival: float
    """Seconds after the start of the run."""
    limit: int
    """Maximum number of tokens to generate."""


def arrival_times(
    count: int, interval: float, *, poisson: bool, seed: int
) -> tuple[float, ...]:
    """Return the arrival times of ``count`` requests in seconds; the first is 0.

    Requests arrive every ``interval`` seconds, or with ``poisson`` at random with this mean interval. With an interval
    of 0 all requests arrive at once.

    Example:
        >>> arrival_times(3, 2.0, poisson=False, seed=0)
        (0.0, 2.0, 4.0)
    """
    if not poisson or interval == 0:
        return tuple(number * interval for number in range(count))
    # A separate generator, so that other options that draw random numbers do not change the times.
    generator = random.Random(derive(seed, "arrivals"))
    # Times between the events of a Poisson process are exponentially distributed.
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + generator.expovariate(1 / interval))
    return tuple(times[:count])


def random_prompt(
    length: int, vocabulary: int, seed: int, number: int
) -> tuple[int, ...]:
    """Return a prompt of ``length`` random tokens, which depend on the seed and on the number of the prompt alone.

    >>> len(random_prompt(4, 512, seed=1, number=0))
    4
    """
    generator = random.Random(derive(seed, "prompt", number))
    # The 256 tokens of single bytes have a text without a tokenizer.
    tokens = min(vocabulary, 256)
    return tuple(generator.randrange(tokens) for _ in range(length))
