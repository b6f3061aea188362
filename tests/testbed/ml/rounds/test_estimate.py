"""Tests of PipeLearn's stage graph and iteration time, against an independent search for the longest path."""

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


def figure_2_edges(count: int) -> set[tuple[GraphStage, GraphStage]]:
    """Return the edges of Figure 2(b): the order of stages on each resource, and of the stages of each mini-batch."""
    device: list[GraphStage] = []
    server: list[GraphStage] = []
    uplink: list[GraphStage] = []
    downlink: list[GraphStage] = []
    sequences = [device, server, uplink, downlink]
    for number in range(1, count + 1):
        device.append(("forward", number))
        uplink.append(("upload", number))
        # The server trains one mini-batch forward and backward before the next.
        server += [("server forward", number), ("server backward", number)]
        downlink.append(("download", number))
        sequences.append([(kind, number) for kind in KINDS])
    # The device does its backwards after all its forwards.
    device += [("backward", number) for number in range(1, count + 1)]
    edges: set[tuple[GraphStage, GraphStage]] = set()
    for sequence in sequences:
        edges |= set(pairwise(sequence))
    return edges


def longest_path(durations: dict[Kind, float], count: int) -> float:
    """Return the length of the longest path by relaxing all edges until nothing changes, in any order of the stages."""
    edges = figure_2_edges(count)
    starts: dict[GraphStage, float] = {}
    for edge in edges:
        starts |= dict.fromkeys(edge, 0.0)
    changed = True
    while changed:
        changed = False
        for before, after in edges:
            end = starts[before] + durations[before[0]]
            if end > starts[after]:
                starts[after] = end
                changed = True
    return max(start + durations[kind] for (kind, _), start in starts.items())


def test_iteration_time_is_longest_path_in_1000_random_graphs() -> None:
    draw = random.Random(10)
    for _ in range(1000):
        count = draw.randint(1, 12)
        durations: dict[Kind, float] = {}
        for kind in KINDS:
            # Zeros, since stages without duration make many paths equally long.
            durations[kind] = draw.choice([0.0, draw.random(), 10 * draw.random()])
        expected = longest_path(durations, count)
        assert abs(iteration_time(durations, count) - expected) <= 1e-9 * expected


def test_predecessors_of_stages_match_table_1() -> None:
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


def test_single_mini_batch_passes_all_stages_in_sequence() -> None:
    durations: dict[Kind, float] = {}
    for place, kind in enumerate(KINDS, 1):
        durations[kind] = float(place)
    # 1 + 2 + ... + 6.
    assert iteration_time(durations, 1) == 21.0


def test_delay_postpones_receiving_stage_but_not_next_message() -> None:
    durations: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    durations["upload"] = 1.0
    ends = end_times(durations, 3, {"upload": 0.5})
    for number in (1, 2, 3):
        # Uploads of 1 s follow each other without the delay.
        assert ends["upload", number] == float(number)
        assert ends["server forward", number] == number + 0.5


@given(st.integers(1, 30))
def test_graph_stages_come_after_their_predecessors(count: int) -> None:
    earlier: set[GraphStage] = set()
    for stage in graph_stages(count):
        assert earlier.issuperset(predecessors(stage, count))
        earlier.add(stage)
    assert len(earlier) == len(KINDS) * count
