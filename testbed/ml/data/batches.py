"""Composition of batches as a function of seed and step alone, so a resumed run sees the same batches.

Each epoch is a new permutation of the samples, cut into whole batches; a step trains one batch. The samples after the
last whole batch are left out of the epoch, so that every step has the same size and cost; other epochs have other
permutations and use these samples. With `drop_last` off, the remaining samples form a smaller last batch of the epoch.
A training set smaller than the batch is one batch of all its samples.

`IntervalTrigger` decides when a periodic action such as an evaluation is due.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from testbed.common.lazy import np, npt
from testbed.common.seeds import derive

Indices: TypeAlias = "npt.NDArray[np.int64]"
"""(samples,): indices of samples in a data set, from 0."""


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool = True) -> int:
    """Return the number of batches in an epoch, at least one; raises ValueError without samples.

    >>> steps_per_epoch(100, 32)
    3
    >>> steps_per_epoch(100, 32, drop_last=False)
    4
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(
            f"a batch of {batch_size} of {samples} samples is impossible: both must be at least 1"
        )
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
    """Return the number of samples of a training step; steps are counted from 0 through all epochs.

    >>> [batch_length(100, 32, step, drop_last=False) for step in range(4)]
    [32, 32, 32, 4]
    """
    per_epoch = steps_per_epoch(samples, batch_size, drop_last=drop_last)
    position = step % per_epoch
    remaining = samples - position * batch_size
    return min(batch_size, remaining)


def leftover_samples(samples: int, batch_size: int, *, drop_last: bool = True) -> int:
    """Return the number of samples left out by each epoch.

    >>> leftover_samples(100, 32)
    4
    """
    # A set smaller than the batch is one batch of all samples.
    if not drop_last or samples < batch_size:
        return 0
    return samples % batch_size


def is_due(done: int, every: float | None) -> bool:
    """Return whether an action with an interval of ``every`` steps is due after ``done`` steps; None or 0: never.

    >>> is_due(20, every=10), is_due(0, every=10), is_due(20, every=None)
    (True, False, False)
    """
    if not every or done <= 0:
        return False
    return done % every == 0


class IntervalTrigger:
    """Decides when a periodic action is due: after a number of steps, or of seconds.

    >>> trigger = IntervalTrigger(10, now=0.0)
    >>> trigger.is_due(10, now=0.5)
    True
    """

    def __init__(self, every: float | None, now: float) -> None:
        """Start the first interval.

        Args:
            every: an integer is a number of steps, a float a number of seconds; with None, the action is never due.
            now: present time in seconds.
        """
        self._every = every
        self._interval_start = now

    def is_due(self, done: int, now: float) -> bool:
        """Return whether the action is due after ``done`` steps, at time ``now`` in seconds."""
        if isinstance(self._every, float):
            # Not before the first step, whose result the action needs.
            return done > 0 and now - self._interval_start >= self._every
        return is_due(done, self._every)

    def restart(self, now: float) -> None:
        """Start the next interval, after the action; intervals in steps need no restart."""
        self._interval_start = now


# Each batch of an epoch needs the order, and devices of one simulation may be in neighbouring epochs.
@lru_cache(maxsize=4)
def _epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of the samples in an epoch, (samples,), as a read-only array."""
    generator = np.random.default_rng(derive(seed, "batches", epoch))
    order = generator.permutation(samples)
    # Read-only, since all callers share the cached array.
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
    """Return the sample indices of a training step, (samples of the batch,); in stored order if ``seed`` is None.

    Steps are counted from 0 through all epochs.

    >>> batch(samples=10, batch_size=4, seed=None, step=1)
    array([4, 5, 6, 7])
    """
    per_epoch = steps_per_epoch(samples, batch_size, drop_last=drop_last)
    epoch, position = divmod(step, per_epoch)
    order = np.arange(samples) if seed is None else _epoch_order(samples, seed, epoch)
    begin = position * batch_size
    # A slice ends with the array, so the last batch may be smaller.
    return order[begin : begin + batch_size]


def cut_batch(size: int, micro_batches: int) -> tuple[slice, ...]:
    """Cut a batch of ``size`` samples into contiguous micro-batches, the larger ones first.

    Their sizes differ by at most one sample. Raises ValueError for more micro-batches than samples.

    >>> cut_batch(10, 4)
    (slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None))
    """
    if not 1 <= micro_batches <= size:
        raise ValueError(
            f"a batch of {size} cannot be cut into {micro_batches} micro-batches: take 1 to {size}"
        )
    length, longer_count = divmod(size, micro_batches)
    shorter_count = micro_batches - longer_count
    lengths = [length + 1] * longer_count + [length] * shorter_count
    edges = accumulate(lengths, initial=0)
    return tuple(slice(begin, end) for begin, end in pairwise(edges))
