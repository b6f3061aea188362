"""When every action runs: by formula, by hand, and against all that each action has to wait for."""

import inspect
import random

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
def test_the_drawings_in_the_documentation_are_those_of_the_grid(name: str) -> None:
    assert draw_grid(SCHEDULES[name], 3, 4) in inspect.cleandoc(
        SCHEDULES[name].__doc__ or ""
    ).replace("\n    ", "\n")


@sizes
def test_lengths_follow_the_formulas(stages: int, micros: int) -> None:
    def length(name: str) -> float:
        return max(
            slot.end
            for slot in simulate_schedule(
                actions_by_stage(SCHEDULES[name], stages, micros), lambda *_: 1.0
            )
        )

    assert length("model-parallelism") == 2 * stages * micros
    assert length("gpipe") == 2 * (micros + stages - 1)
    assert length("1f1b") == 2 * (micros + stages - 1)


def test_1f1b_as_in_pipedreams_figure() -> None:
    # Figure 4 of PipeDream (Narayanan et al., 2019), startup and steady state, a backward taking two forwards.
    rows = [
        row.split()[2:]
        for row in draw_grid(SCHEDULES["1f1b"], 4, 8, backward=2).splitlines()
    ]
    assert rows[0][:15] == [
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
    assert rows[3][:12] == [
        ".",
        ".",
        ".",
        "F0",
        "B0",
        "B0",
        "F1",
        "B1",
        "B1",
        "F2",
        "B2",
        "B2",
    ]


def test_transfers_queue_for_their_link_and_take_its_delay() -> None:
    slots = simulate_schedule(
        actions_by_stage(SCHEDULES["gpipe"], 2, 2),
        lambda *_: 1.0,
        lambda stage, action: (3.0, 0.5),
    )
    begins = {(slot.stage, str(slot.action)): slot.start for slot in slots}
    # F0 ends at 1 and is on the link until 4; F1, ready at 2, follows until 7. Gradients have the way back free.
    assert begins[1, "F0"] == 4.5
    assert begins[1, "F1"] == 7.5
    assert begins[1, "B1"] == 8.5
    assert begins[0, "B1"] == 13.0
    assert begins[0, "B0"] == 16.0


@every_schedule
@given(seed=st.integers(0, 10**6))
def test_every_action_begins_at_the_very_instant_at_which_all_that_it_waits_for_is_there(
    name: str, seed: int
) -> None:
    draw = random.Random(seed)
    stages, micros = draw.randint(1, 4), draw.randint(1, 5)
    spent = {
        (s, a): float(draw.randint(0, 5))
        for s in range(stages)
        for a in actions_by_stage(SCHEDULES[name], stages, micros)[s]
    }
    travels = {
        key: (float(draw.randint(0, 4)), float(draw.randint(0, 2))) for key in spent
    }
    slots = simulate_schedule(
        actions_by_stage(SCHEDULES[name], stages, micros),
        lambda *key: spent[key],
        lambda *key: travels[key],
    )
    found = {(slot.stage, slot.action): slot for slot in slots}
    assert found.keys() == spent.keys()
    assert slots == sorted(slots, key=lambda slot: (slot.start, slot.stage, slot.end))
    arrivals: dict[tuple[int, Action], float] = {}
    for source in range(stages):
        for kind, target in (("forward", source + 1), ("backward", source - 1)):
            free = 0.0
            for slot in (
                found[source, each]
                for each in actions_by_stage(SCHEDULES[name], stages, micros)[source]
            ):
                if slot.action.kind == kind and 0 <= target < stages:
                    busy, delay = travels[source, slot.action]
                    free = max(free, slot.end) + busy
                    arrivals[target, slot.action] = free + delay
    for stage, actions in enumerate(actions_by_stage(SCHEDULES[name], stages, micros)):
        before = 0.0
        for action in actions:
            slot = found[stage, action]
            there = arrivals.get((stage, action), 0.0)
            if action.kind == "backward" and stage == stages - 1:
                there = found[stage, Action("forward", action.micro)].end
            assert slot == Slot(
                stage,
                action,
                max(before, there),
                max(before, there) + spent[stage, action],
            )
            before = slot.end


def test_an_update_waits_for_nothing_but_its_turn() -> None:
    rows = [
        [*actions, Action("update", 0)]
        for actions in actions_by_stage(SCHEDULES["gpipe"], 2, 1)
    ]
    ends = {
        (slot.stage, str(slot.action)): slot.end
        for slot in simulate_schedule(rows, lambda *_: 1.0)
    }
    assert (ends[1, "U0"], ends[0, "B0"], ends[0, "U0"]) == (4.0, 4.0, 5.0)


def test_what_nobody_sends_is_waited_for_in_vain() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 waits for B0$"):
        simulate_schedule([[Action("backward", 0)]], lambda *_: 1.0)
