"""Composition of batches as a function of seed and step alone, so a resumed run sees the same batches.

Each epoch is a new permutation of the samples, cut into whole batches. The remaining samples, fewer than one batch, are
skipped in that epoch and drawn in others, so every step has the same size and cost. With `drop_last` off they form a
smaller last batch of the epoch. A training set smaller than the batch is one batch of all its samples.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from testbed.common.lazy import np, npt
from testbed.common.seeds import derive

Indices: TypeAlias = "npt.NDArray[np.int64]"
"""(samples,): places of samples in a data set, from 0."""


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool = True) -> int:
    """Return the number of batches in the samples, at least one; raises ValueError for an empty set.

    >>> steps_per_epoch(100, 32)
    3
    >>> steps_per_epoch(100, 32, drop_last=False)
    4
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(f"{samples} samples do not fill a batch of {batch_size}")
    if drop_last:
        # A set smaller than the batch is one batch of all samples.
        return max(1, samples // batch_size)
    return math.ceil(samples / batch_size)


def batch_length(
    samples: int,
    batch_size: int,
    step: int,
    *,
    drop_last: bool = True,
) -> int:
    """Return the number of samples of a training step from 0.

    >>> [batch_length(100, 32, step, drop_last=False) for step in range(4)]
    [32, 32, 32, 4]
    """
    per_epoch = steps_per_epoch(samples, batch_size, drop_last=drop_last)
    position = step % per_epoch
    remaining = samples - position * batch_size
    return min(batch_size, remaining)


def left_out(samples: int, batch_size: int, *, drop_last: bool = True) -> int:
    """Return the number of samples each epoch leaves out.

    >>> left_out(100, 32)
    4
    """
    # A set smaller than the batch is one batch of all samples.
    if not drop_last or samples < batch_size:
        return 0
    return samples % batch_size


def is_due(done: int, every: float | None) -> bool:
    """Return whether a periodic action is due after ``done`` steps; an interval of None or 0 is never due.

    >>> is_due(20, every=10), is_due(0, every=10), is_due(20, every=None)
    (True, False, False)
    """
    if not every or done <= 0:
        return False
    return done % every == 0


class IntervalTrigger:
    """Triggers a periodic action, every so many steps or seconds.

    >>> trigger = IntervalTrigger(10, now=0.0)
    >>> trigger(10, now=0.5)
    True
    """

    def __init__(self, every: float | None, now: float) -> None:
        """``every`` is a number of steps if it is an integer, else seconds since ``now``; None never triggers."""
        self._every = every
        self._last = now

    def __call__(self, done: int, now: float) -> bool:
        """Return whether the action is due after ``done`` steps at time ``now``."""
        if isinstance(self._every, float):
            return done > 0 and now - self._last >= self._every
        return is_due(done, self._every)

    def made(self, now: float) -> None:
        """Restart the interval in seconds."""
        self._last = now


# Asked for once for each batch of an epoch.
@lru_cache(maxsize=4)
def _epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of the samples in an epoch, (samples,), which cannot be changed."""
    generator = np.random.default_rng(derive(seed, "batches", epoch))
    order = generator.permutation(samples)
    # The cache hands out one array to all callers.
    order.flags.writeable = False
    return order


def batch(
    samples: int,
    batch_size: int,
    seed: int | None,
    step: int,
    *,
    drop_last: bool = True,
) -> Indices:
    """Return the sample indices of a training step counted from 0, (samples,); without a seed in stored order.

    >>> batch(samples=10, batch_size=4, seed=None, step=1)
    array([4, 5, 6, 7])
    """
    per_epoch = steps_per_epoch(samples, batch_size, drop_last=drop_last)
    epoch, position = divmod(step, per_epoch)
    order = np.arange(samples) if seed is None else _epoch_order(samples, seed, epoch)
    begin = position * batch_size
    # A smaller last batch ends with the samples.
    return order[begin : begin + batch_size]


def cut_batch(size: int, micro_batches: int) -> tuple[slice, ...]:
    """Cut a batch into contiguous micro-batches of nearly equal size, larger ones first.

    The mean loss of the batch is the mean of the micro-batches' losses weighted by their sizes. Raises ValueError for
    more micro-batches than samples, which would leave some empty.

    >>> cut_batch(10, 4)
    (slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None))
    """
    if not 1 <= micro_batches <= size:
        raise ValueError(
            f"a batch of {size} cannot be cut into {micro_batches} micro-batches: take 1 to {size}"
        )
    length, longer = divmod(size, micro_batches)
    shorter = micro_batches - longer
    lengths = [length + 1] * longer + [length] * shorter
    edges = accumulate(lengths, initial=0)
    return tuple(slice(begin, end) for begin, end in pairwise(edges))
