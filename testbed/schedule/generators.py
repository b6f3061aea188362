"""Pipeline schedules: pure generators of what a stage does, as data that prints: ``F0 F1 B0 B1``.

In the synchronous ones all micro-batches of a step see the same weights, and an update ends the step. So each gives the
gradient of the whole batch, whatever the order; the micro-batches of a batch that does not divide differ by one sample
(`testbed.data.batches.micro_batches`). In the asynchronous one every batch has an update of its own. All are drawn
for three stages and four micro-batches, forward and backward equally long, with `testbed.schedule.grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from testbed.schedule.versions import in_flight as most_under_way

ActionKind = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Action:
    """One piece of a stage's work."""

    kind: ActionKind
    micro: int
    """Micro-batch, counted from 0 within its step; for an update the step."""

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


Schedule = Callable[[int, int, int], Iterator[Action]]
"""(stages, stage, micro-batches) -> what that stage does in one step, in order; the update that ends it left out."""


def written(actions: Iterable[Action]) -> str:
    """Return actions as text, such as ``F0 F1 B0 B1``."""
    return " ".join(map(str, actions))


def in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of micro-batches forwarded and not yet done backward: whose activations are kept."""
    kept = most = 0
    for action in actions:
        kept += {"forward": 1, "backward": -1, "update": 0}[action.kind]
        most = max(most, kept)
    return most


def orders(schedule: Schedule, stages: int, micro_batches: int) -> list[Sequence[Action]]:
    """Return what every stage does in one step; raises ValueError for less than one stage or micro-batch."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"no schedule for {stages} stages and {micro_batches} micro-batches")
    return [tuple(schedule(stages, stage, micro_batches)) for stage in range(stages)]


def _forward(micro: int) -> Action:
    return Action("forward", micro)


def _backward(micro: int) -> Action:
    return Action("backward", micro)


def model_parallelism(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """One micro-batch at a time through all stages and back: no pipelining.

    ::

        stage 0  F0  .  .  .  . B0 F1  .  .  .  . B1 F2  .  .  .  . B2 F3  .  .  .  . B3
        stage 1   . F0  .  . B0  .  . F1  .  . B1  .  . F2  .  . B2  .  . F3  .  . B3  .
        stage 2   .  . F0 B0  .  .  .  . F1 B1  .  .  .  . F2 B2  .  .  .  . F3 B3  .  .
    """
    for micro in range(micro_batches):
        yield _forward(micro)
        yield _backward(micro)


def gpipe(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards, the last micro-batch first (Huang et al., 2019, figure 2c).

    Every stage keeps the activations of all micro-batches. ::

        stage 0  F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
        stage 1   . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
        stage 2   .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .
    """
    yield from map(_forward, range(micro_batches))
    yield from map(_backward, reversed(range(micro_batches)))


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """As many forwards as there are stages from here on, then a backward and a forward in turn (PipeDream-flush).

    As long as GPipe's when forwards, backwards and transfers are even, but stage i of n keeps the activations of n - i
    micro-batches only. ::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = min(micro_batches, stages - stage)
    yield from map(_forward, range(ahead))
    for micro in range(micro_batches):
        yield _backward(micro)
        if ahead + micro < micro_batches:
            yield _forward(ahead + micro)


SCHEDULES: dict[str, Schedule] = {
    "model-parallelism": model_parallelism,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""By the names that scenarios use."""


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
    ahead = most_under_way(stages, stage, window)
    for batch in count() if batches is None else range(batches + ahead):
        if batch >= ahead:
            yield Action("backward", batch - ahead)
            yield Action("update", batch - ahead)
        if batches is None or batch < batches:
            yield Action("forward", batch)
