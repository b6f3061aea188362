"""When every action of every stage runs: the schedule played through, before any device does.

One stage does one action at a time, in its order. Forward and backward wait for what the neighbour sends, and the
link between two stages carries one message at a time in each direction; sending does not keep a stage from
computing. That is what the devices do, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.schedule.generators import Action, Schedule, orders

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
                independent = action.kind == "update" or (action.kind == "forward" and stage == 0)
                ready = 0.0 if independent else arrived.get((stage, action))
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
