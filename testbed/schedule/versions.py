"""Versions of weights in asynchronous 1F1B: which one a batch uses, how many there are, when they are aggregated.

Batches and versions are counted from 0: version v of a stage's weights is what the updates of the batches before v have
made, so every stage's version v stands for the same batches. Aggregation does not count as a version here; FTPipeHD's
Figure 2 counts it, and `numbered` does as well.
"""

from __future__ import annotations


def in_flight(stages: int, stage: int, window: int | None = None) -> int:
    """Return how many batches a stage has forwarded and not yet backwarded at most: n - i, each with its version.

    Fewer where ``window``, how many are anywhere in the pipeline at once, is smaller.
    """
    return min(window or stages, stages - stage)


def used(batch: int, stages: int, stage: int = 0) -> int:
    """Return the version that a stage forwards and backwards a batch with.

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


def needed(done: int, batch: int, stages: int, stage: int, vertical_sync: bool = True) -> range:
    """Return the versions a stage must keep after the updates of ``done`` batches, ``batch`` being forwarded next.

    From the one that the oldest batch in flight uses to the newest.
    """
    oldest = min(done, batch)
    return range(used(oldest, stages, 0 if vertical_sync else stage), done + 1)


def interval(stages: int, stage: int, multiple: int = 1) -> int:
    """Return after how many updates a stage aggregates: a multiple of the n - i trainings that go on side by side."""
    return multiple * in_flight(stages, stage)


def aggregates(done: int, stages: int, stage: int, multiple: int = 1) -> bool:
    """Say whether a stage aggregates after the updates of ``done`` batches; with a single version it never does."""
    return in_flight(stages, stage) > 1 and done > 0 and done % interval(stages, stage, multiple) == 0


def numbered(done: int, stages: int, stage: int, multiple: int = 1) -> int:
    """Return the number that Figure 2 gives the newest version after ``done`` batches: aggregations count too."""
    return done + (done // interval(stages, stage, multiple) if in_flight(stages, stage) > 1 else 0)
