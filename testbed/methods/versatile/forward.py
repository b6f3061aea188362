"""The forward criterion (Section IV-A): which batches have lost too much on their way to be worth learning from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Rates = tuple[float, ...]
"""Layer-to-layer success rates of one batch, from 0 to 1: into layer 1 first."""


def valid(rates: Iterable[float], threshold: float) -> bool:
    """Return whether a batch may go on: each rate is at least ``thres_fw``. The paper says larger, but accepts 0.5."""
    return all(rate >= threshold for rate in rates)


def merged(heard: Sequence[Rates], layers: int) -> Rates:
    """Return the rates into this many layers, as the devices of the last of them tell them.

    Each device knows only what it received itself; the rate of a layer is the mean over those that were heard, 0 where
    nobody was.
    """
    return tuple(sum(rates[layer] for rates in heard) / len(heard) if heard else 0.0 for layer in range(layers))
