"""Pipeline schedules: pure generators of a stage's actions, printed as ``F0 F1 B0 B1``; simulated and drawn.

In the synchronous schedules all micro-batches of a step use the same weights, and an update ends the step. Each
schedule therefore gives the gradient of the whole batch; micro-batches of an indivisible batch differ by one sample
(`testbed.ml.data.batches.cut_batch`). In the asynchronous schedule every batch has its own update. All are drawn by
`grid` for three stages and four micro-batches, with forward and backward equally long.

In the simulation, a stage does one action at a time, in order. Forward and backward wait for the neighbour's message,
and the link between two stages carries one message at a time in each direction; sending does not block computing.
Devices behave the same way.
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
"""(stages, stage, micro-batches) -> the stage's actions in one step in order, without the final update."""


def written(actions: Iterable[Action]) -> str:
    """Format actions as text, such as ``F0 F1 B0 B1``."""
    return " ".join(map(str, actions))


def in_flight(actions: Iterable[Action]) -> int:
    """Return the peak number of micro-batches between forward and backward, whose activations are kept."""
    kept = most = 0
    for action in actions:
        kept += {"forward": 1, "backward": -1, "update": 0}[action.kind]
        most = max(most, kept)
    return most


def orders(
    schedule: Schedule, stages: int, micro_batches: int
) -> list[Sequence[Action]]:
    """Return the actions of every stage in one step; raises ValueError for less than one stage or micro-batch."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            f"no schedule for {stages} stages and {micro_batches} micro-batches"
        )
    return [tuple(schedule(stages, stage, micro_batches)) for stage in range(stages)]


def _forward_action(micro: int) -> Action:
    return Action("forward", micro)


def _backward_action(micro: int) -> Action:
    return Action("backward", micro)


def model_parallelism(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """One micro-batch at a time passes through all stages and back, without pipelining.

    ::

        stage 0  F0  .  .  .  . B0 F1  .  .  .  . B1 F2  .  .  .  . B2 F3  .  .  .  . B3
        stage 1   . F0  .  . B0  .  . F1  .  . B1  .  . F2  .  . B2  .  . F3  .  . B3  .
        stage 2   .  . F0 B0  .  .  .  . F1 B1  .  .  .  . F2 B2  .  .  .  . F3 B3  .  .
    """
    for micro in range(micro_batches):
        yield _forward_action(micro)
        yield _backward_action(micro)


def gpipe(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards, the last micro-batch first (Huang et al., 2019, figure 2c).

    Every stage keeps the activations of all micro-batches. ::

        stage 0  F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
        stage 1   . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
        stage 2   .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .
    """
    yield from map(_forward_action, range(micro_batches))
    yield from map(_backward_action, reversed(range(micro_batches)))


def one_forward_one_backward(
    stages: int, stage: int, micro_batches: int
) -> Iterator[Action]:
    """As many forwards as stages remain, then alternating backwards and forwards (PipeDream-flush).

    The duration equals GPipe's for equal forwards, backwards and transfers, but stage i of n keeps the activations of
    only n - i micro-batches. ::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = min(micro_batches, stages - stage)
    yield from map(_forward_action, range(ahead))
    for micro in range(micro_batches):
        yield _backward_action(micro)
        if ahead + micro < micro_batches:
            yield _forward_action(ahead + micro)


SCHEDULES: dict[str, Schedule] = {
    "model-parallelism": model_parallelism,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""By the names that scenarios use."""


def asynchronous_1f1b(
    stages: int, stage: int, batches: int | None = None, window: int | None = None
) -> Iterator[Action]:
    """As many forwards as stages remain, then alternating backwards (each with an update) and forwards.

    ``window`` is the number of batches in the pipeline at once; None means one per stage, the maximum. Without
    ``batches`` the schedule is infinite: its executor stops when no more batches arrive. Three stages, four batches,
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
    """Raised for a schedule with a deadlock, or with missing or repeated actions."""


@dataclass(frozen=True)
class Slot:
    """One action with its start and end in seconds."""

    stage: int
    action: Action
    start: float
    end: float


def _free_at(stage: int, action: Action) -> tuple[float, float]:
    return 0.0, 0.0


def _needs_nothing(stage: int, action: Action) -> bool:
    return action.kind == "update" or (action.kind == "forward" and stage == 0)


def play(
    stages: Sequence[Sequence[Action]],
    duration: ActionTime,
    transfer: TransferTime = _free_at,
) -> list[Slot]:
    """Return every action's slot in the order of starts; raises `ScheduleError` naming the waiting actions of a
    deadlock.
    """
    slots: list[Slot] = []
    done = [0] * len(stages)
    clock = [0.0] * len(stages)
    arrived: dict[tuple[int, Action], float] = {}
    links: dict[tuple[int, int], float] = {}

    def send(stage: int, action: Action, end: float) -> None:
        target = (
            stage + {"forward": 1, "backward": -1, "update": -len(stages)}[action.kind]
        )
        if target == len(stages):
            arrived[stage, Action("backward", action.micro)] = end
        elif target >= 0:
            busy, delay = transfer(stage, action)
            links[stage, target] = sent = (
                max(end, links.get((stage, target), 0.0)) + busy
            )
            arrived[target, action] = sent + delay

    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(stages):
            while done[stage] < len(actions):
                action = actions[done[stage]]
                ready = (
                    0.0
                    if _needs_nothing(stage, action)
                    else arrived.get((stage, action))
                )
                if ready is None:
                    break
                start = max(clock[stage], ready)
                clock[stage] = end = start + duration(stage, action)
                slots.append(Slot(stage, action, start, end))
                send(stage, action, end)
                done[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} waits for {order[done[stage]]}"
        for stage, order in enumerate(stages)
        if order[done[stage] :]
    ]
    if stuck:
        raise ScheduleError("deadlock: " + ", ".join(stuck))
    return sorted(slots, key=lambda slot: (slot.start, slot.stage, slot.end))


def grid(schedule: Schedule, stages: int, micro_batches: int, backward: int = 1) -> str:
    """Draw a step with a row per stage and a column per forward time; a backward takes ``backward`` columns.

    Transfers take no time. PipeDream's figures have a backward of 2, GPipe's of 1.
    """
    columns_of = {"forward": 1, "backward": backward, "update": 0}
    slots = play(
        orders(schedule, stages, micro_batches),
        lambda _, action: columns_of[action.kind],
    )
    columns = round(max(slot.end for slot in slots))
    width = 1 + len(str(micro_batches - 1))
    rows = [["."] * columns for _ in range(stages)]
    for slot in slots:
        for column in range(round(slot.start), round(slot.end)):
            rows[slot.stage][column] = str(slot.action)
    label = len(str(stages - 1))
    return "\n".join(
        f"stage {stage:>{label}}  " + " ".join(cell.rjust(width) for cell in row)
        for stage, row in enumerate(rows)
    )
