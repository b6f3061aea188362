"""Tests of pipeline schedules: order, completeness, absence of deadlocks, and micro-batches in flight."""

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
    peak_in_flight,
    simulate_schedule,
)


def check(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Raise `ScheduleError` unless every stage does each micro-batch once each way, in a possible order."""
    expected = set()
    for micro in range(micro_batches):
        expected |= {Action("forward", micro), Action("backward", micro)}
    lists = actions_by_stage(schedule, stages, micro_batches)
    for stage, actions in enumerate(lists):
        text = " ".join(map(str, actions))
        if set(actions) != expected or len(actions) != len(expected):
            raise ScheduleError(
                f"stage {stage} does not do each of {micro_batches} once: {text}"
            )
        for micro in range(micro_batches):
            forward = actions.index(Action("forward", micro))
            backward = actions.index(Action("backward", micro))
            if backward < forward:
                raise ScheduleError(
                    f"stage {stage} does B{micro} before F{micro}: {text}"
                )
    # The simulation raises an error for a deadlock between stages.
    simulate_schedule(lists, lambda stage, action: 1.0)


sizes = given(stages=st.integers(1, 7), micros=st.integers(1, 9))
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
@sizes
def test_schedule_is_complete_and_free_of_deadlocks(
    name: str, stages: int, micros: int
) -> None:
    check(SCHEDULES[name], stages, micros)


@sizes
def test_peak_in_flight_follows_formula_of_schedule(stages: int, micros: int) -> None:
    for stage in range(stages):
        peaks = {}
        for name, schedule in SCHEDULES.items():
            peaks[name] = peak_in_flight(schedule(stages, stage, micros))
        # GPipe keeps all micro-batches, 1F1B at most one for each stage from this one on.
        assert peaks == {
            "model-parallelism": 1,
            "gpipe": micros,
            "1f1b": min(micros, stages - stage),
        }


def test_actions_are_printed_as_letter_and_number() -> None:
    actions = SCHEDULES["1f1b"](2, 0, 3)
    assert " ".join(map(str, actions)) == "F0 F1 B0 F2 B1 B2"
    assert str(Action("update", 4)) == "U4"


def test_deadlock_error_names_waiting_stages_and_actions() -> None:
    def crossed(stages: int, stage: int, micros: int) -> Iterator[Action]:
        order = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
        # Stage 1 does both forwards first, but stage 0 sends F1 only after it has received B0.
        if stage == 1:
            order = [order[0], order[2], order[1], order[3]]
        return (Action(kind, micro) for kind, micro in order)

    with pytest.raises(
        ScheduleError, match="deadlock: stage 0 waits for B0, stage 1 waits for F1"
    ):
        check(crossed, 2, 2)


def test_incomplete_or_reversed_schedule_is_rejected() -> None:
    with pytest.raises(
        ScheduleError, match="stage 0 does not do each of 2 once: F0 B0"
    ):
        check(lambda *_: iter([Action("forward", 0), Action("backward", 0)]), 1, 2)
    with pytest.raises(ScheduleError, match="stage 0 does B0 before F0: B0 F0"):
        check(lambda *_: iter([Action("backward", 0), Action("forward", 0)]), 1, 1)


def test_schedule_without_stages_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one stage and micro-batch, not 0"):
        actions_by_stage(SCHEDULES["gpipe"], 0, 1)
