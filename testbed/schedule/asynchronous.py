"""The schedule of asynchronous pipelines: every batch has an update of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from testbed.schedule.actions import Action
from testbed.schedule.versions import in_flight


def asynchronous_1f1b(
    stages: int, stage: int, batches: int | None = None, window: int | None = None
) -> Iterator[Action]:
    """As many forwards as there are stages from here on, then a backward with its update and a forward in turn.

    ``window`` is how many batches are in the pipeline at once; None, and never more than: one a stage. Without
    ``batches`` it goes on for ever: its executor stops when no more batches come. Three stages, four batches,
    updates taking no time (PipeDream, figure 4)::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = in_flight(stages, stage, window)
    for batch in count() if batches is None else range(batches + ahead):
        if batch >= ahead:
            yield Action("backward", batch - ahead)
            yield Action("update", batch - ahead)
        if batches is None or batch < batches:
            yield Action("forward", batch)
