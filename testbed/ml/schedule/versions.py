"""Versions of weights in asynchronous 1F1B: which one a batch uses, how many there are, when they are aggregated.

Batches and versions are counted from 0: version v of a stage's weights is what the updates of the batches before v have
made, so every stage's version v stands for the same batches. Aggregation does not count as a version here; in
FTPipeHD's Figure 2 it does.
"""

from __future__ import annotations


def in_flight(stages: int, stage: int, window: int | None = None) -> int:
    """Return the batches a stage has forwarded and not done backward at most: n - i, or ``window`` if smaller."""
    return min(window or stages, stages - stage)


def used(batch: int, stages: int, stage: int = 0) -> int:
    """Return the version that a stage does a batch with, forward and backward.

    With vertical sync all stages use the first one's, the default. Without, stage i uses its newest, which the batch
    n - i before made.
    """
    return max(0, batch - in_flight(stages, stage) + 1)


def kept(stages: int, stage: int, vertical_sync: bool = True) -> int:
    """Return how many versions a stage has to keep at most.

    Without vertical sync n - i: the newest is used by the newest batch in flight. With it n on every stage: batches in
    flight use no more than n - i of them, but later stages have newer ones by then, which batches still to come will
    use.
    """
    return in_flight(stages, 0 if vertical_sync else stage)


def aggregates(done: int, trainings: int, multiple: int = 1) -> bool:
    """Return whether a stage aggregates after the updates of ``done`` batches, its weights being those of one before.

    At an interval that is a multiple of the n - i trainings that go on side by side; 0 is never. A single one has
    nothing to aggregate.
    """
    return multiple > 0 and trainings > 1 and done > 0 and done % (multiple * trainings) == 0
