"""Tests of simulated schedules: times by formula, by hand, and against an independent computation."""

import inspect
import random
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.schedule import (
    SCHEDULES,
    Action,
    ScheduleError,
    Slot,
    actions_by_stage,
    draw_grid,
    simulate_schedule,
)

sizes = given(stages=st.integers(1, 7), micros=st.integers(1, 9))

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
def test_docstring_of_schedule_shows_its_grid(name: str) -> None:
    docstring = inspect.cleandoc(SCHEDULES[name].__doc__ or "")
    assert draw_grid(SCHEDULES[name], 3, 4) in docstring.replace("\n    ", "\n")


@sizes
def test_schedule_length_follows_formula(stages: int, micros: int) -> None:
    def length(name: str) -> float:
        actions = actions_by_stage(SCHEDULES[name], stages, micros)
        slots = simulate_schedule(actions, lambda *_: 1.0)
        return max(slot.end for slot in slots)

    assert length("model-parallelism") == 2 * stages * micros
    # Filling and draining the pipeline take a forward and a backward for each further stage.
    assert length("gpipe") == 2 * (micros + stages - 1)
    assert length("1f1b") == 2 * (micros + stages - 1)


def test_1f1b_grid_matches_figure_4_of_pipedream() -> None:
    # Figure 4 of PipeDream (Narayanan et al., 2019), startup and steady state, a backward taking two forwards.
    grid = draw_grid(SCHEDULES["1f1b"], 4, 8, backward=2)
    # The first two words of a row are "stage" and its number.
    rows = [row.split()[2:] for row in grid.splitlines()]
    first_stage = [
        "F0",
        "F1",
        "F2",
        "F3",
        ".",
        ".",
        ".",
        ".",
        ".",
        ".",
        "B0",
        "B0",
        "F4",
        "B1",
        "B1",
    ]
    last_stage = [".", ".", ".", "F0", "B0", "B0", "F1", "B1", "B1", "F2", "B2", "B2"]
    assert rows[0][:15] == first_stage
    assert rows[3][:12] == last_stage


def slots_by_action(slots: Iterable[Slot]) -> dict[tuple[int, str], Slot]:
    """Return the slots by stage and printed action, such as (0, "F1")."""
    return {(slot.stage, str(slot.action)): slot for slot in slots}


def test_transfers_wait_for_their_link_and_add_its_delay() -> None:
    slots = simulate_schedule(
        actions_by_stage(SCHEDULES["gpipe"], 2, 2),
        lambda *_: 1.0,
        lambda stage, action: (3.0, 0.5),
    )
    slot_of = slots_by_action(slots)
    # F0 ends at 1 and occupies the link until 4; F1, ready at 2, follows until 7. Gradients have the other direction.
    assert slot_of[1, "F0"].start == 4.5
    assert slot_of[1, "F1"].start == 7.5
    assert slot_of[1, "B1"].start == 8.5
    assert slot_of[0, "B1"].start == 13.0
    assert slot_of[0, "B0"].start == 16.0


def message_arrivals(
    actions_of: Sequence[Sequence[Action]],
    slot_of: Mapping[tuple[int, Action], Slot],
    transfers: Mapping[tuple[int, Action], tuple[float, float]],
) -> dict[tuple[int, Action], float]:
    """Return the arrival of the message for each action, by (stage, action)."""
    stages = len(actions_of)
    arrivals: dict[tuple[int, Action], float] = {}
    for source, actions in enumerate(actions_of):
        for kind, target in (("forward", source + 1), ("backward", source - 1)):
            if not 0 <= target < stages:
                continue
            # Messages of one direction share a link, in the order of the actions.
            link_free = 0.0
            for action in actions:
                if action.kind == kind:
                    busy, delay = transfers[source, action]
                    sent = slot_of[source, action].end
                    link_free = max(link_free, sent) + busy
                    arrivals[target, action] = link_free + delay
    return arrivals


@every_schedule
@given(seed=st.integers(0, 10**6))
def test_action_starts_when_stage_is_idle_and_message_has_arrived(
    name: str, seed: int
) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 4)
    micros = draw.randint(1, 5)
    actions_of = actions_by_stage(SCHEDULES[name], stages, micros)
    durations: dict[tuple[int, Action], float] = {}
    transfers: dict[tuple[int, Action], tuple[float, float]] = {}
    for stage, actions in enumerate(actions_of):
        for action in actions:
            durations[stage, action] = float(draw.randint(0, 5))
    for key in durations:
        transfers[key] = (float(draw.randint(0, 4)), float(draw.randint(0, 2)))
    slots = simulate_schedule(
        actions_of, lambda *key: durations[key], lambda *key: transfers[key]
    )
    assert slots == sorted(slots, key=lambda slot: (slot.start, slot.stage, slot.end))
    slot_of = {(slot.stage, slot.action): slot for slot in slots}
    assert slot_of.keys() == durations.keys()

    arrivals = message_arrivals(actions_of, slot_of, transfers)
    for stage, actions in enumerate(actions_of):
        idle_from = 0.0
        for action in actions:
            arrival = arrivals.get((stage, action), 0.0)
            # The last stage computes the loss itself, so a backward waits for its own forward.
            if action.kind == "backward" and stage == stages - 1:
                arrival = slot_of[stage, Action("forward", action.micro)].end
            start = max(idle_from, arrival)
            end = start + durations[stage, action]
            assert slot_of[stage, action] == Slot(stage, action, start, end)
            idle_from = end


def test_update_waits_only_for_previous_action_of_its_stage() -> None:
    rows = []
    for actions in actions_by_stage(SCHEDULES["gpipe"], 2, 1):
        rows.append([*actions, Action("update", 0)])
    slot_of = slots_by_action(simulate_schedule(rows, lambda *_: 1.0))
    # Stage 1 updates while stage 0 is still in its backward.
    assert slot_of[1, "U0"].end == 4.0
    assert slot_of[0, "B0"].end == 4.0
    assert slot_of[0, "U0"].end == 5.0


def test_action_without_sender_is_reported_as_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 waits for B0$"):
        simulate_schedule([[Action("backward", 0)]], lambda *_: 1.0)
