"""Pipeline schedules: pure generators of a stage's actions, printed as ``F0 F1 B0 B1``; simulated and drawn.

In the synchronous schedules all micro-batches of a step use the same weights, and an update ends the step. Each
schedule therefore gives the gradient of the whole batch; micro-batches of an indivisible batch differ by one sample
(`testbed.ml.data.batches.cut_batch`). In the asynchronous schedule every batch has its own update. All are drawn by
`draw_grid` for three stages and four micro-batches, with forward and backward equally long.

In the simulation, a stage does one action at a time, in order. Forward and backward wait for the neighbour's message,
and the link between two stages carries one message at a time in each direction; sending does not block computing.
Devices behave the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from testbed.ml.schedule.versions import max_in_flight

ActionKind = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Action:
    """One piece of a stage's work.

    >>> str(Action("forward", 2))
    'F2'
    """

    kind: ActionKind
    micro: int
    """Micro-batch, counted from 0 within its step; for an update the step."""

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


Schedule = Callable[[int, int, int], Iterator[Action]]
"""(stages, stage, micro-batches) -> the stage's actions in one step in order, without the final update."""


def format_actions(actions: Iterable[Action]) -> str:
    """Format actions as text.

    >>> format_actions(one_forward_one_backward(stages=2, stage=0, micro_batches=3))
    'F0 F1 B0 F2 B1 B2'
    """
    return " ".join(map(str, actions))


def peak_in_flight(actions: Iterable[Action]) -> int:
    """Return the peak number of micro-batches between forward and backward, whose activations are kept.

    >>> peak_in_flight(gpipe(stages=2, stage=0, micro_batches=3))
    3
    """
    kept = 0
    peak = 0
    for action in actions:
        if action.kind == "forward":
            kept += 1
        elif action.kind == "backward":
            kept -= 1
        peak = max(peak, kept)
    return peak


def actions_by_stage(
    schedule: Schedule, stages: int, micro_batches: int
) -> list[Sequence[Action]]:
    """Return the actions of every stage in one step; raises ValueError for less than one stage or micro-batch."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            f"no schedule for {stages} stages and {micro_batches} micro-batches"
        )
    actions: list[Sequence[Action]] = []
    for stage in range(stages):
        actions.append(tuple(schedule(stages, stage, micro_batches)))
    return actions


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
    for micro in range(micro_batches):
        yield _forward_action(micro)
    for micro in reversed(range(micro_batches)):
        yield _backward_action(micro)


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
    # With equal times, micro-batch 0 reaches the last stage when this stage does the last of these forwards.
    ahead = min(micro_batches, stages - stage)
    for micro in range(ahead):
        yield _forward_action(micro)
    for micro in range(micro_batches):
        yield _backward_action(micro)
        if ahead + micro < micro_batches:
            yield _forward_action(ahead + micro)


SCHEDULES: dict[str, Schedule] = {
    "model-parallelism": model_parallelism,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""Synchronous schedules by their names in scenario files."""


def asynchronous_1f1b(
    stages: int,
    stage: int,
    batches: int | None = None,
    window: int | None = None,
) -> Iterator[Action]:
    """As many forwards as stages remain, then alternating backwards (each with an update) and forwards.

    ``window`` is the number of batches in the pipeline at once; None means one per stage, the maximum. Without
    ``batches`` the schedule is infinite: its executor stops when no more batches arrive. Three stages, four batches,
    updates taking no time (PipeDream, figure 4)::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = max_in_flight(stages, stage, window)
    # The last ``ahead`` turns only drain: their batches do not exist.
    turns = count() if batches is None else range(batches + ahead)
    for batch in turns:
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


def _instant_transfer(stage: int, action: Action) -> tuple[float, float]:
    """Occupy no link and have no delay."""
    return 0.0, 0.0


Arrivals = dict[tuple[int, Action], float]
"""(stage, action) -> arrival of the message that the action waits for."""


def _ready_time(stage: int, action: Action, arrivals: Arrivals) -> float | None:
    """Return when an action may start; None while its message has not been sent."""
    # The samples are at the first stage, and an update needs no message: both follow the action before them.
    is_input = stage == 0 and action.kind == "forward"
    if is_input or action.kind == "update":
        return 0.0
    return arrivals.get((stage, action))


def _check_finished(stages: Sequence[Sequence[Action]], done: Sequence[int]) -> None:
    """Raise `ScheduleError` for stages with actions left after the ``done`` first ones."""
    waiting = []
    for stage, actions in enumerate(stages):
        if done[stage] < len(actions):
            waiting.append(f"stage {stage} waits for {actions[done[stage]]}")
    if waiting:
        raise ScheduleError("deadlock: " + ", ".join(waiting))


def simulate_schedule(
    stages: Sequence[Sequence[Action]],
    duration: ActionTime,
    transfer: TransferTime = _instant_transfer,
) -> list[Slot]:
    """Return the slot of every action in the order of starts, without executing anything.

    ``stages`` has the actions of each stage in order. Raises `ScheduleError` with the waiting actions of a deadlock.

    >>> stages = actions_by_stage(gpipe, stages=2, micro_batches=1)
    >>> slots = simulate_schedule(stages, lambda stage, action: 1.0)
    >>> [(slot.stage, str(slot.action), slot.start) for slot in slots]
    [(0, 'F0', 0.0), (1, 'F0', 1.0), (1, 'B0', 2.0), (0, 'B0', 3.0)]
    """
    slots: list[Slot] = []
    done = [0] * len(stages)
    """Number of finished actions of each stage."""
    idle_from = [0.0] * len(stages)
    arrivals: Arrivals = {}
    link_free_from: dict[tuple[int, int], float] = {}
    """(sending stage, receiving stage) -> when the last message has left."""

    def send(stage: int, action: Action, end: float) -> None:
        """Note the arrival of an action's result at the neighbouring stage."""
        if action.kind == "update":
            return
        target = stage + 1 if action.kind == "forward" else stage - 1
        if target == len(stages):
            # The last stage computes the loss itself: its backward waits for its own forward.
            arrivals[stage, Action("backward", action.micro)] = end
        elif target >= 0:
            busy, delay = transfer(stage, action)
            free_from = link_free_from.get((stage, target), 0.0)
            sent = max(end, free_from) + busy
            link_free_from[stage, target] = sent
            arrivals[target, action] = sent + delay

    # Each pass runs every stage as far as its messages allow; a pass without progress is the end, or a deadlock.
    progressed = True
    while progressed:
        progressed = False
        for stage, actions in enumerate(stages):
            while done[stage] < len(actions):
                action = actions[done[stage]]
                ready = _ready_time(stage, action, arrivals)
                if ready is None:
                    break
                start = max(idle_from[stage], ready)
                end = start + duration(stage, action)
                idle_from[stage] = end
                slots.append(Slot(stage, action, start, end))
                send(stage, action, end)
                done[stage] += 1
                progressed = True
    _check_finished(stages, done)

    def start_then_stage(slot: Slot) -> tuple[float, int, float]:
        # The end last: an action without duration comes before the next one of its stage.
        return slot.start, slot.stage, slot.end

    return sorted(slots, key=start_then_stage)


def draw_grid(
    schedule: Schedule, stages: int, micro_batches: int, backward: int = 1
) -> str:
    """Draw a step with a row per stage and a column per forward time; a backward takes ``backward`` columns.

    Transfers take no time. PipeDream's figures have a backward of 2, GPipe's of 1.

    >>> print(draw_grid(gpipe, stages=2, micro_batches=2))
    stage 0  F0 F1  .  . B1 B0
    stage 1   . F0 F1 B1 B0  .
    """
    columns_of = {"forward": 1, "backward": backward, "update": 0}

    def duration(stage: int, action: Action) -> float:
        return columns_of[action.kind]

    actions = actions_by_stage(schedule, stages, micro_batches)
    slots = simulate_schedule(actions, duration)
    ends = [slot.end for slot in slots]
    columns = round(max(ends))
    rows = [["."] * columns for _ in range(stages)]
    for slot in slots:
        # All durations are whole columns, so rounding only makes integers of floats.
        begin = round(slot.start)
        end = round(slot.end)
        for column in range(begin, end):
            rows[slot.stage][column] = str(slot.action)
    label_width = len(str(stages - 1))
    # A letter and the largest micro-batch's number.
    cell_width = 1 + len(str(micro_batches - 1))
    lines = []
    for stage, row in enumerate(rows):
        cells = " ".join(cell.rjust(cell_width) for cell in row)
        lines.append(f"stage {stage:>{label_width}}  {cells}")
    return "\n".join(lines)
