"""Weight versions in asynchronous 1F1B: the version used by each batch, the number of versions, their aggregation.

Batches and versions are counted from 0: version v of a stage's weights results from the updates of the batches before
v, so version v of every stage stands for the same batches. Aggregation does not count as a version here, in contrast to
FTPipeHD's Figure 2.

In the formulas n is the number of stages, and i the stage, counted from 0.
"""

from __future__ import annotations


def max_in_flight(stages: int, stage: int, window: int | None = None) -> int:
    """Return the maximum number of batches between forward and backward on a stage: n - i, or ``window`` if smaller.

    A batch that stage i has forwarded is on this stage or one of the n - i - 1 stages after it.

    >>> [max_in_flight(3, stage) for stage in range(3)]
    [3, 2, 1]
    """
    at_once = window or stages
    return min(at_once, stages - stage)


def version_used(batch: int, stages: int, stage: int = 0) -> int:
    """Return the version a stage uses for a batch, forward and backward.

    With vertical sync, the default, all stages use the first stage's version: pass ``stage`` 0. Without, stage i uses
    its newest version, made by the batch n - i before.

    >>> [version_used(batch, stages=3) for batch in range(5)]
    [0, 0, 0, 1, 2]
    """
    # The batches under way, this one included, have not updated the weights yet. The first ones use version 0.
    under_way = max_in_flight(stages, stage)
    return max(0, batch - under_way + 1)


def max_versions(stages: int, stage: int, *, vertical_sync: bool = True) -> int:
    """Return the maximum number of versions kept by a stage.

    Without vertical sync the number is n - i: the newest batch in flight uses the newest version. With vertical sync it
    is n on every stage: batches in flight use at most n - i versions, but later stages already have newer ones for
    future batches.

    >>> [max_versions(stages=3, stage=stage) for stage in range(3)]
    [3, 3, 3]
    """
    deciding_stage = 0 if vertical_sync else stage
    return max_in_flight(stages, deciding_stage)


def is_aggregation_due(done: int, trainings: int, multiple: int = 1) -> bool:
    """Return whether a stage aggregates after the updates of ``done`` batches.

    The interval is ``multiple`` times the n - i concurrent ``trainings`` of a stage (FTPipeHD, Section III-C); a
    ``multiple`` of 0 disables aggregation. A single training has no versions to aggregate.

    >>> [done for done in range(10) if is_aggregation_due(done, trainings=3)]
    [3, 6, 9]
    """
    if multiple <= 0 or trainings <= 1 or done <= 0:
        return False
    interval = multiple * trainings
    return done % interval == 0
