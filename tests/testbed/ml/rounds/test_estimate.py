import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.rounds.estimate import (
    KINDS,
    GraphStage,
    Kind,
    end_times,
    graph_stages,
    iteration_time,
    predecessors,
)


def edges(count: int) -> set[tuple[GraphStage, GraphStage]]:
    """The graph of Figure 2(b) built from what it shows: one lane for each resource, and each mini-batch's way."""
    found: set[tuple[GraphStage, GraphStage]] = set()
    numbers = range(1, count + 1)
    lanes: list[list[GraphStage]] = [
        [("forward", n) for n in numbers] + [("backward", n) for n in numbers],
        [("upload", n) for n in numbers],
        [
            stage
            for n in numbers
            for stage in (("server forward", n), ("server backward", n))
        ],  # type: ignore[misc]
        [("download", n) for n in numbers],
        *([(kind, n) for kind in KINDS] for n in numbers),
    ]
    for lane in lanes:
        found |= set(pairwise(lane))
    return found


def longest_path(durations: dict[Kind, float], count: int) -> float:
    """By relaxing every edge until nothing changes: knows nothing of the order of the stages."""
    graph = edges(count)
    begins = {stage: 0.0 for edge in graph for stage in edge}
    changed = True
    while changed:
        changed = False
        for before, after in graph:
            end = begins[before] + durations[before[0]]
            if end > begins[after]:
                begins[after], changed = end, True
    return max(begin + durations[kind] for (kind, _), begin in begins.items())


def test_the_time_of_an_iteration_is_the_longest_path_through_the_graph_in_1000_cases() -> (
    None
):
    draw = random.Random(10)
    for _ in range(1000):
        count = draw.randint(1, 12)
        durations: dict[Kind, float] = {
            kind: draw.choice([0.0, draw.random(), 10 * draw.random()])
            for kind in KINDS
        }
        expected = longest_path(durations, count)
        assert abs(iteration_time(durations, count) - expected) <= 1e-9 * expected


def test_previous_stages_are_those_of_table_1() -> None:
    assert predecessors(("forward", 1), 3) == ()
    assert predecessors(("forward", 3), 3) == (("forward", 2),)
    assert set(predecessors(("upload", 2), 3)) == {("upload", 1), ("forward", 2)}
    assert predecessors(("server forward", 1), 3) == (("upload", 1),)
    assert set(predecessors(("server forward", 3), 3)) == {
        ("upload", 3),
        ("server backward", 2),
    }
    assert predecessors(("server backward", 2), 3) == (("server forward", 2),)
    assert set(predecessors(("download", 3), 3)) == {
        ("download", 2),
        ("server backward", 3),
    }
    assert set(predecessors(("backward", 1), 3)) == {("forward", 3), ("download", 1)}
    assert set(predecessors(("backward", 2), 3)) == {("backward", 1), ("download", 2)}


def test_one_mini_batch_passes_all_stages_one_after_the_other() -> None:
    durations: dict[Kind, float] = {
        kind: float(place) for place, kind in enumerate(KINDS, 1)
    }
    assert iteration_time(durations, 1) == 21.0


def test_a_delay_holds_up_what_waits_for_a_message_and_not_the_next_message() -> None:
    durations: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    durations["upload"] = 1.0
    found = end_times(durations, 3, {"upload": 0.5})
    assert [found["upload", n] for n in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert [found["server forward", n] for n in (1, 2, 3)] == [1.5, 2.5, 3.5]


@given(st.integers(1, 30))
def test_stages_come_after_their_previous_ones(count: int) -> None:
    seen: set[GraphStage] = set()
    for stage in graph_stages(count):
        assert seen.issuperset(predecessors(stage, count))
        seen.add(stage)
    assert len(seen) == len(KINDS) * count
