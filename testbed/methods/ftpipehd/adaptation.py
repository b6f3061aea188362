"""What is learnt of the devices from the run itself, and when the model is cut again for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from testbed.partition.cuts import Cuts


@dataclass(frozen=True)
class Repartition:
    """When a new partition is looked for: after the ``first`` batches of a run, then whenever ``every`` divides."""

    first: int = 10
    every: int = 100

    def due(self, done: int) -> bool:
        """Say whether after ``done`` batches of the run; 0 switches either off."""
        return done > 0 and (done == self.first or (self.every > 0 and done % self.every == 0))


def estimate(execution: Sequence[float], cuts: Cuts, observed: Sequence[float | None]) -> tuple[float, ...]:
    """Return the capacities by equations (1) and (2): observed over profiled seconds of each stage's units.

    ``execution`` are the coordinator's profiled seconds of each unit for one batch, ``observed`` the mean seconds of
    each stage for one batch; None, nothing observed yet, gives 1. The paper sets the coordinator's to 1; where its
    time is observed, it is estimated like any other, and is 1 as long as nothing slows it.
    """
    return tuple(
        1.0 if seconds is None else seconds / sum(execution[first:last])
        for seconds, (first, last) in zip(observed, pairwise(cuts), strict=True)
    )


def worthwhile(current: float, best: float, least_gain: float = 0.02) -> bool:
    """Say whether a partition of bottleneck ``best`` is worth leaving one of ``current`` for.

    Measurements scatter: without a least gain the cuts would flutter between neighbours that are as good as each other.
    """
    return best < current * (1 - least_gain)
