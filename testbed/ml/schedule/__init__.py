"""Pipeline schedules: the order in which each stage does its actions, with a simulation and a drawing of schedules.

An action is the forward (``F``) or backward (``B``) of a micro-batch on a stage, or an update. Each schedule is a pure
generator of a stage's actions. Its docstring has a drawing by `draw_grid` for three stages and four micro-batches, in
which forward and backward take equally long.

In the synchronous schedules all micro-batches of a step use the same weights, and an update ends the step. Therefore
the gradients of the micro-batches add up to the gradient of the whole batch. In the asynchronous schedule every batch
has its own update, and is the only micro-batch of itself.

`simulate_schedule` computes the times of actions by the rules that devices follow: a stage does one action at a time,
in order. Forward and backward wait for the neighbour's message. The link between two stages carries one message at a
time in each direction, and a stage computes while it sends.
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
    """A forward, a backward or an update of a stage.

    >>> str(Action("forward", 2))
    'F2'
    """

    kind: ActionKind
    micro: int
    """Number of the micro-batch from 0, within its step unless stated otherwise; for an update, number of the step. In
    the asynchronous schedule, number of the batch."""

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


Schedule = Callable[[int, int, int], Iterator[Action]]
"""(stages, stage, micro-batches) -> the stage's actions in one step in order, without the final update."""


def peak_in_flight(actions: Iterable[Action]) -> int:
    """Return the maximum number of micro-batches between their forward and backward on a stage.

    The stage keeps the activations of these micro-batches.

    >>> peak_in_flight(gpipe(stages=2, stage=0, micro_batches=3))
    3
    """
    in_flight = 0
    peak = 0
    for action in actions:
        if action.kind == "forward":
            in_flight += 1
        elif action.kind == "backward":
            in_flight -= 1
        peak = max(peak, in_flight)
    return peak


def actions_by_stage(
    schedule: Schedule, stages: int, micro_batches: int
) -> list[Sequence[Action]]:
    """Return the actions of every stage in one step; raises ValueError for less than one stage or micro-batch."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(
            f"a schedule needs at least one stage and micro-batch, not {stages} and {micro_batches}"
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
    """First a forward for this stage and each later one, then alternating backwards and forwards (PipeDream-flush).

    If all forwards, all backwards and all transfers take equally long, a step takes as long as with GPipe. Stage i of n
    keeps the activations of only n - i micro-batches. ::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    # With equal times, micro-batch 0 reaches the last stage when this stage does the last of these forwards.
    initial_forwards = min(micro_batches, stages - stage)
    for micro in range(initial_forwards):
        yield _forward_action(micro)
    for micro in range(micro_batches):
        yield _backward_action(micro)
        following = initial_forwards + micro
        if following < micro_batches:
            yield _forward_action(following)


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
    """First a forward for this stage and each later one, then alternating backwards, each with an update, and forwards.

    ``window`` is the number of batches in the pipeline at once; None means one per stage, the maximum. Without
    ``batches`` the schedule is infinite, and its executor stops when no more batches arrive. The drawing has updates
    that take no time (PipeDream, figure 4)::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    initial_forwards = max_in_flight(stages, stage, window)
    # After the last batch, as many turns as initial forwards drain the pipeline: they have no batch to forward.
    turns = count() if batches is None else range(batches + initial_forwards)
    for turn in turns:
        batch_to_finish = turn - initial_forwards
        if batch_to_finish >= 0:
            yield Action("backward", batch_to_finish)
            yield Action("update", batch_to_finish)
        if batches is None or turn < batches:
            yield Action("forward", turn)


ActionTime = Callable[[int, Action], float]
"""(stage, action) -> seconds of the stage's processor."""
TransferTime = Callable[[int, Action], tuple[float, float]]
"""(stage, action) -> seconds for which the action's result occupies the link, and the link's one-way delay."""


class ScheduleError(ValueError):
    """Raised for a schedule with a deadlock, or with missing or repeated actions."""


@dataclass(frozen=True)
class Slot:
    """One action with start and end in seconds."""

    stage: int
    action: Action
    start: float
    end: float


def _instant_transfer(stage: int, action: Action) -> tuple[float, float]:
    return 0.0, 0.0


Arrivals = dict[tuple[int, Action], float]
"""(stage, action) -> seconds at which the message arrives for which the action waits."""


def _ready_time(stage: int, action: Action, arrivals: Arrivals) -> float | None:
    """Return the seconds from which an action may start; None while the message has not been sent."""
    # The first stage has the samples, and an update needs no message. Both may follow the action before at once.
    is_input = stage == 0 and action.kind == "forward"
    if is_input or action.kind == "update":
        return 0.0
    return arrivals.get((stage, action))


def _check_finished(
    stages: Sequence[Sequence[Action]], positions: Sequence[int]
) -> None:
    """Raise `ScheduleError` unless all stages are finished; ``positions`` are as in `simulate_schedule`."""
    waiting = []
    for stage, actions in enumerate(stages):
        if positions[stage] < len(actions):
            next_action = actions[positions[stage]]
            waiting.append(f"stage {stage} waits for {next_action}")
    if waiting:
        raise ScheduleError("deadlock: " + ", ".join(waiting))


def simulate_schedule(
    stages: Sequence[Sequence[Action]],
    duration: ActionTime,
    transfer: TransferTime = _instant_transfer,
) -> list[Slot]:
    """Return the slot of every action, in the order of starts.

    ``stages`` has the actions of each stage in order. Nothing is computed but the times, from the seconds of each
    action and of each transfer. Raises `ScheduleError` with the waiting actions of a deadlock.

    >>> stages = actions_by_stage(gpipe, stages=2, micro_batches=1)
    >>> slots = simulate_schedule(stages, lambda stage, action: 1.0)
    >>> [(slot.stage, str(slot.action), slot.start) for slot in slots]
    [(0, 'F0', 0.0), (1, 'F0', 1.0), (1, 'B0', 2.0), (0, 'B0', 3.0)]
    """
    slots: list[Slot] = []
    # The state of the simulation: by stage, the position of the next action, and the end of the action before.
    positions = [0] * len(stages)
    idle_from = [0.0] * len(stages)
    arrivals: Arrivals = {}
    # (sending stage, receiving stage) -> seconds from which the link is free for the next message.
    link_free_from: dict[tuple[int, int], float] = {}

    def send(stage: int, action: Action, end: float) -> None:
        """Add the arrival of an action's result at the neighbouring stage to `arrivals`."""
        if action.kind == "update":
            return
        target = stage + 1 if action.kind == "forward" else stage - 1
        if target == len(stages):
            # The last stage computes the loss itself, so its backward waits for its own forward instead of a message.
            arrivals[stage, Action("backward", action.micro)] = end
        elif target >= 0:
            busy, delay = transfer(stage, action)
            free_from = link_free_from.get((stage, target), 0.0)
            sent = max(end, free_from) + busy
            link_free_from[stage, target] = sent
            arrivals[target, action] = sent + delay

    # Each pass advances every stage until an action waits for a message that has not been sent. A pass without progress
    # is the end of the schedule, or a deadlock.
    has_progress = True
    while has_progress:
        has_progress = False
        for stage, actions in enumerate(stages):
            while positions[stage] < len(actions):
                action = actions[positions[stage]]
                ready = _ready_time(stage, action, arrivals)
                if ready is None:
                    break
                start = max(idle_from[stage], ready)
                end = start + duration(stage, action)
                idle_from[stage] = end
                slots.append(Slot(stage, action, start, end))
                send(stage, action, end)
                positions[stage] += 1
                has_progress = True
    _check_finished(stages, positions)

    def sort_key(slot: Slot) -> tuple[float, int, float]:
        # The end orders an action without duration before the next action of its stage, which has the same start.
        return slot.start, slot.stage, slot.end

    return sorted(slots, key=sort_key)


def draw_grid(
    schedule: Schedule, stages: int, micro_batches: int, backward: int = 1
) -> str:
    """Draw a step with a row for each stage and a column for each forward; a backward takes ``backward`` columns.

    Transfers take no time. A backward is 2 columns wide in PipeDream's figures, and 1 column in GPipe's.

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
        # All durations are whole columns, so `round` only converts floats to integers.
        begin = round(slot.start)
        end = round(slot.end)
        for column in range(begin, end):
            rows[slot.stage][column] = str(slot.action)
    label_width = len(str(stages - 1))
    # A letter, and the number of the last micro-batch.
    cell_width = 1 + len(str(micro_batches - 1))
    lines = []
    for stage, row in enumerate(rows):
        cells = " ".join(cell.rjust(cell_width) for cell in row)
        lines.append(f"stage {stage:>{label_width}}  {cells}")
    return "\n".join(lines)
