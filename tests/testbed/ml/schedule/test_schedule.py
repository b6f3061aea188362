"""Schedules: as the papers draw them, complete, free of deadlock, and as long as their formulas say."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    actions_by_stage,
    format_actions,
    peak_in_flight,
    simulate_schedule,
)


def check(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Raise unless every stage does each micro-batch once each way, in a possible order."""
    lists = actions_by_stage(schedule, stages, micro_batches)
    for stage, actions in enumerate(lists):
        expected = {
            Action(kind, micro)
            for kind in ("forward", "backward")
            for micro in range(micro_batches)
        }
        if set(actions) != expected or len(actions) != len(expected):
            raise ScheduleError(
                f"stage {stage} does not do each of {micro_batches} once: {format_actions(actions)}"
            )
        for micro in range(micro_batches):
            if actions.index(Action("backward", micro)) < actions.index(
                Action("forward", micro)
            ):
                raise ScheduleError(
                    f"stage {stage} does B{micro} before F{micro}: {format_actions(actions)}"
                )
    simulate_schedule(lists, lambda stage, action: 1.0)


sizes = given(stages=st.integers(1, 7), micros=st.integers(1, 9))
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
@sizes
def test_every_schedule_is_complete_and_never_deadlocks(
    name: str, stages: int, micros: int
) -> None:
    check(SCHEDULES[name], stages, micros)


@sizes
def test_micro_batches_kept_by_each_stage(stages: int, micros: int) -> None:
    for stage in range(stages):
        kept = {
            name: peak_in_flight(schedule(stages, stage, micros))
            for name, schedule in SCHEDULES.items()
        }
        assert kept == {
            "model-parallelism": 1,
            "gpipe": micros,
            "1f1b": min(micros, stages - stage),
        }


def test_actions_print() -> None:
    assert format_actions(SCHEDULES["1f1b"](2, 0, 3)) == "F0 F1 B0 F2 B1 B2"
    assert str(Action("update", 4)) == "U4"


def test_a_deadlock_says_who_waits_for_what() -> None:
    def crossed(stages: int, stage: int, micros: int) -> Iterator[Action]:
        order = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
        if stage == 1:
            order = [order[0], order[2], order[1], order[3]]
        return (Action(kind, micro) for kind, micro in order)

    with pytest.raises(
        ScheduleError, match="deadlock: stage 0 waits for B0, stage 1 waits for F1"
    ):
        check(crossed, 2, 2)


def test_an_incomplete_schedule_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="stage 0 does not do each of 2 once: F0 B0"
    ):
        check(lambda *_: iter([Action("forward", 0), Action("backward", 0)]), 1, 2)
    with pytest.raises(ScheduleError, match="stage 0 does B0 before F0: B0 F0"):
        check(lambda *_: iter([Action("backward", 0), Action("forward", 0)]), 1, 1)
    with pytest.raises(ValueError, match="no schedule for 0 stages"):
        actions_by_stage(SCHEDULES["gpipe"], 0, 1)
