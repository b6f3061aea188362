"""Pipeline schedules: pure generators of what a stage does, as data that prints: ``F0 F1 B0 B1``; played and drawn.

In the synchronous ones all micro-batches of a step see the same weights, and an update ends the step. So each gives the
gradient of the whole batch, whatever the order; the micro-batches of a batch that does not divide differ by one sample
(`testbed.ml.data.batches.cut_batch`). In the asynchronous one every batch has an update of its own. All are drawn
for three stages and four micro-batches, forward and backward equally long, by `grid`.

Played, one stage does one action at a time, in its order. Forward and backward wait for what the neighbour sends, and
the link between two stages carries one message at a time in each direction; sending does not keep a stage from
computing. That is what the devices do, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from testbed.ml.schedule.versions import in_flight as most_under_way

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


ActionTime = Callable[[int, Action], float]
"""(stage, action) -> seconds of the stage's processor."""
TransferTime = Callable[[int, Action], tuple[float, float]]
"""(stage, action) -> seconds the link is busy with the action's result, and its one-way delay after that."""


class ScheduleError(ValueError):
    """A schedule that deadlocks, or does not do everything exactly once."""


@dataclass(frozen=True)
class Slot:
    """One action where it stands in time, in seconds."""

    stage: int
    action: Action
    start: float
    end: float


def _free(stage: int, action: Action) -> tuple[float, float]:
    return 0.0, 0.0


def _needs_nothing(stage: int, action: Action) -> bool:
    return action.kind == "update" or (action.kind == "forward" and stage == 0)


def play(stages: Sequence[Sequence[Action]], duration: ActionTime, transfer: TransferTime = _free) -> list[Slot]:
    """Return every action's slot, in the order of starts; raises `ScheduleError` naming what waits in a deadlock."""
    slots: list[Slot] = []
    done = [0] * len(stages)
    clock = [0.0] * len(stages)
    arrived: dict[tuple[int, Action], float] = {}
    links: dict[tuple[int, int], float] = {}

    def send(stage: int, action: Action, end: float) -> None:
        """Make the result of an action arrive where it is needed."""
        target = stage + {"forward": 1, "backward": -1, "update": -len(stages)}[action.kind]
        if target == len(stages):
            arrived[stage, Action("backward", action.micro)] = end
        elif target >= 0:
            busy, delay = transfer(stage, action)
            links[stage, target] = sent = max(end, links.get((stage, target), 0.0)) + busy
            arrived[target, action] = sent + delay

    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(stages):
            while done[stage] < len(actions):
                action = actions[done[stage]]
                ready = 0.0 if _needs_nothing(stage, action) else arrived.get((stage, action))
                if ready is None:
                    break
                start = max(clock[stage], ready)
                clock[stage] = end = start + duration(stage, action)
                slots.append(Slot(stage, action, start, end))
                send(stage, action, end)
                done[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} waits for {order[done[stage]]}" for stage, order in enumerate(stages) if order[done[stage] :]
    ]
    if stuck:
        raise ScheduleError("deadlock: " + ", ".join(stuck))
    return sorted(slots, key=lambda slot: (slot.start, slot.stage, slot.end))


def grid(schedule: Schedule, stages: int, micro_batches: int, backward: int = 1) -> str:
    """Draw a step: a row for each stage, a column for each time of a forward, a backward taking ``backward`` of them.

    Transfers take no time. The figures of PipeDream have a backward of 2, those of GPipe of 1.
    """
    columns_of = {"forward": 1, "backward": backward, "update": 0}
    slots = play(orders(schedule, stages, micro_batches), lambda _, action: columns_of[action.kind])
    columns = round(max(slot.end for slot in slots))
    width = 1 + len(str(micro_batches - 1))
    rows = [["."] * columns for _ in range(stages)]
    for slot in slots:
        for column in range(round(slot.start), round(slot.end)):
            rows[slot.stage][column] = str(slot.action)
    label = len(str(stages - 1))
    return "\n".join(
        f"stage {stage:>{label}}  " + " ".join(cell.rjust(width) for cell in row) for stage, row in enumerate(rows)
    )
