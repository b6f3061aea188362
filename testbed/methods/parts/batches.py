"""Which samples make up which training step, and how a batch is cut into micro-batches."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from testbed.scenario.schema import WorkloadPart
from testbed.seeds import derive


def split(samples: int, parts: int) -> list[slice]:
    """Cut ``samples`` into ``parts`` consecutive pieces whose sizes differ by at most one, the larger first.

    Fewer pieces where there are not enough samples: none is empty.
    """
    parts = min(parts, samples)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + samples // parts + (part < samples % parts))
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class Batches:
    """The training part in a new order every epoch; the last batch of an epoch may be smaller.

    A step's samples depend on the seed and the step alone, so a step that is done again sees the same ones.
    """

    def __init__(self, samples: int, workload: WorkloadPart, seed: int) -> None:
        self._samples = samples
        self._size = workload.batch_size
        self._seed = seed
        self.per_epoch = math.ceil(samples / workload.batch_size)
        self.steps = workload.steps if workload.steps is not None else (workload.epochs or 0) * self.per_epoch
        """Training steps of the whole workload."""
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the indices of the samples of a step, counted from 0."""
        epoch, position = divmod(step, self.per_epoch)
        return self._order(epoch)[position * self._size : (position + 1) * self._size]

    def _shuffle(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64(derive(self._seed, "order", epoch)))
        return generator.permutation(self._samples)
