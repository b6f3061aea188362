"""Weight versions in asynchronous 1F1B: the version used by each batch, the number of versions, their aggregation.

In asynchronous 1F1B each stage updates its weights after the backward of every batch, while later batches are between
their forward and backward. So a stage keeps several versions of its weights. Aggregation is FTPipeHD's average of these
versions.

Batches and versions are counted from 0. Version v of a stage's weights results from the updates by batches 0 to v - 1,
so version v has the same batches on every stage. In contrast to FTPipeHD's Figure 2, an aggregation does not increase
the version.

In the formulas n is the number of stages, and i the stage, counted from 0.
"""

from __future__ import annotations


def max_in_flight(stages: int, stage: int, window: int | None = None) -> int:
    """Return the maximum number of batches between forward and backward on a stage: n - i, or ``window`` if smaller.

    A batch after its forward on stage i is on this stage or one of the n - i - 1 stages after it, one batch on each.

    >>> [max_in_flight(3, stage) for stage in range(3)]
    [3, 2, 1]
    """
    at_once = window or stages
    return min(at_once, stages - stage)


def version_used(batch: int, stages: int, stage: int = 0) -> int:
    """Return the version a stage uses for a batch, forward and backward.

    With vertical sync, the default, all stages use the version that the first stage used: ``stage`` is 0. Without
    vertical sync, stage i uses its newest version, whose last update is by the batch n - i before.

    >>> [version_used(batch, stages=3) for batch in range(5)]
    [0, 0, 0, 1, 2]
    """
    # The batches in flight, this batch included, have not updated the weights yet. The first batches use version 0.
    in_flight = max_in_flight(stages, stage)
    return max(0, batch - in_flight + 1)


def max_versions(stages: int, stage: int, *, vertical_sync: bool = True) -> int:
    """Return the maximum number of versions kept by a stage.

    Without vertical sync the number is n - i: each batch in flight uses a version, and the newest batch uses the newest
    version. With vertical sync the number is n on every stage: a later stage has fewer batches in flight, but also
    keeps the newer versions that its next batches will use.

    >>> [max_versions(stages=3, stage=stage) for stage in range(3)]
    [3, 3, 3]
    """
    deciding_stage = 0 if vertical_sync else stage
    return max_in_flight(stages, deciding_stage)


def is_aggregation_due(done: int, trainings: int, multiple: int = 1) -> bool:
    """Return whether a stage aggregates after the updates of ``done`` batches.

    The interval in batches is ``multiple`` times ``trainings``; a ``multiple`` of 0 disables aggregation. ``trainings``
    is the stage's number of batches in flight, n - i, which FTPipeHD calls concurrent trainings (Section III-C). With
    one training there is one version, and nothing to aggregate.

    >>> [done for done in range(10) if is_aggregation_due(done, trainings=3)]
    [3, 6, 9]
    """
    if multiple <= 0 or trainings <= 1 or done <= 0:
        return False
    interval = multiple * trainings
    return done % interval == 0
