"""Communication of schemes and their optimum, against the paper, brute force and an integer program."""

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.models.graph import Graph, GraphLayer
from testbed_stahl.plan import Scheme
from testbed_stahl.schemes import (
    Reuse,
    Schemes,
    WorkerTotals,
    fused_schemes,
    least_communication,
    total_communication,
    uniform_schemes,
)
from tests.helpers import integer_program
from tests.helpers.graphs import (
    FOUR_LAYERS,
    HalvingLayer,
    dense_layer,
    random_chains,
    yolov2,
)

MIB = 2**20
YOLO = yolov2()
EARLY = 16
"""Early layers of YOLOv2, which are tiled and so excluded from the choice of schemes."""
OPTIMUM: Schemes = ("lop", "fuse1", "fuse2", "lop")
"""Optimal schemes of the paper for the example of four layers."""
# Fused pairs in each row of the paper's Table 2.
TABLE_2 = {
    "LOP": (),
    "FUSE4": ((19, 20), (21, 22), (23, 24), (29, 30)),
    "FUSE3": ((18, 19), (21, 22), (23, 24), (29, 30)),
    "FUSE2": ((18, 19), (20, 21), (23, 24), (29, 30)),
    "FUSE1": ((18, 19), (20, 21), (22, 23), (29, 30)),
}
PROGRAMS = [least_communication, integer_program.optimal_schemes]
"""The dynamic program of the planner and the integer program of the paper."""
SCHEMES: tuple[Scheme, ...] = ("lop", "lip", "fuse1", "fuse2")


@pytest.mark.parametrize(
    ("schemes", "expected"),
    [
        (uniform_schemes(FOUR_LAYERS, "lop"), 34),
        (uniform_schemes(FOUR_LAYERS, "lip"), 48),
        (fused_schemes(FOUR_LAYERS, ((0, 1), (2, 3))), 40),
        (("lop", "fuse1", "fuse2", "lop"), 22),
    ],
)
def test_communication_of_four_layer_example_matches_paper(
    schemes: tuple[Scheme, ...], expected: int
) -> None:
    assert total_communication(FOUR_LAYERS, schemes, WorkerTotals.equal(2)) == expected


def test_optimal_schemes_of_four_layer_example_match_paper() -> None:
    workers = WorkerTotals.equal(2)
    assert least_communication(FOUR_LAYERS, workers) == OPTIMUM
    assert integer_program.optimal_schemes(FOUR_LAYERS, workers) == OPTIMUM


def test_printed_equation_9_contradicts_value_of_four_layer_example() -> None:
    workers = WorkerTotals.equal(2)
    # The paper states 22, which follows only if FUSE1 reuses the values that a device holds.
    printed = total_communication(FOUR_LAYERS, OPTIMUM, workers, "equation-9")
    assert printed == 26


def communication_of_table_2(reuse: Reuse) -> dict[str, Fraction]:
    """Return the elements sent between six devices for YOLOv2 in each row of Table 2."""
    workers = WorkerTotals.equal(6)
    communication = {}
    for name, pairs in TABLE_2.items():
        schemes = fused_schemes(YOLO, pairs, EARLY)
        communication[name] = total_communication(YOLO, schemes, workers, reuse)
    return communication


def to_mebibytes(elements: Fraction) -> float:
    return round(float(4 * elements / MIB), 1)


@pytest.mark.parametrize(
    ("reuse", "expected"),
    [
        (
            "equation-9",
            {"LOP": 80.1, "FUSE4": 82.5, "FUSE3": 75.5, "FUSE2": 68.4, "FUSE1": 68.4},
        ),
        (
            "with-reuse",
            {"LOP": 80.1, "FUSE4": 81.4, "FUSE3": 74.3, "FUSE2": 67.3, "FUSE1": 68.4},
        ),
    ],
)
def test_communication_of_yolov2_on_six_devices_matches_table_2(
    reuse: Reuse, expected: dict[str, float]
) -> None:
    mebibytes = {}
    for name, elements in communication_of_table_2(reuse).items():
        mebibytes[name] = to_mebibytes(elements)
    assert mebibytes == expected


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("reuse", "least"), [("equation-9", 68.4), ("with-reuse", 67.3)]
)
def test_best_row_of_table_2_is_optimal_without_lip(
    program: Callable[..., Schemes], reuse: Reuse, least: float
) -> None:
    workers = WorkerTotals.equal(6)
    schemes = program(YOLO, workers, reuse, EARLY, lip=False)
    communication = total_communication(YOLO, schemes, workers, reuse)
    assert communication == min(communication_of_table_2(reuse).values())
    assert to_mebibytes(communication) == least


@pytest.mark.parametrize("program", PROGRAMS)
def test_optimum_with_lip_communicates_less_than_table_2(
    program: Callable[..., Schemes],
) -> None:
    workers = WorkerTotals.equal(6)
    schemes = program(YOLO, workers, "with-reuse", EARLY)
    assert to_mebibytes(total_communication(YOLO, schemes, workers)) == 57.0
    # Layer 26 reduces 512 channels to 64: LIP exchanges fewer values if a layer has few outputs.
    assert [index for index, scheme in enumerate(schemes) if scheme == "lip"] == [26]


def is_valid(graph: Graph, schemes: tuple[Scheme, ...]) -> bool:
    """Return whether whole layers cannot be split and FUSE1 and FUSE2 occur only as fusible pairs."""
    for index, scheme in enumerate(schemes):
        if (scheme == "whole") == graph.layers[index].splits:
            return False
        is_followed_by_fuse2 = schemes[index + 1 : index + 2] == ("fuse2",)
        if (scheme == "fuse1") != is_followed_by_fuse2:
            return False
        if scheme == "fuse1" and not graph.fuses(index):
            return False
    return schemes[0] != "fuse2"


@settings(deadline=None)
@given(
    random_chains(most=5),
    st.integers(1, 8),
    st.sampled_from(["equation-9", "with-reuse"]),
)
def test_dynamic_program_matches_brute_force(
    graph: Graph, devices: int, reuse: Reuse
) -> None:
    workers = WorkerTotals.equal(devices)
    communication = []
    for schemes in product((*SCHEMES, "whole"), repeat=len(graph.layers)):
        if is_valid(graph, schemes):
            communication.append(total_communication(graph, schemes, workers, reuse))
    optimum = least_communication(graph, workers, reuse)
    assert is_valid(graph, optimum)
    assert total_communication(graph, optimum, workers, reuse) == min(communication)


def test_integer_program_matches_dynamic_program_on_random_chains() -> None:
    chance = random.Random(4)
    for _ in range(300):
        graph = random_chain(chance)
        workers = WorkerTotals(
            chance.randint(1, 7), Fraction(chance.randint(1, 15), 16)
        )
        reuse: Reuse = chance.choice(["equation-9", "with-reuse"])
        lip = chance.random() < 0.8
        dynamic, integer = (
            program(graph, workers, reuse, lip=lip) for program in PROGRAMS
        )
        assert is_valid(graph, integer)
        # Several assignments can have the same communication, so only the totals are compared.
        expected = total_communication(graph, dynamic, workers, reuse)
        communication = total_communication(graph, integer, workers, reuse)
        assert communication == expected, (graph, workers, reuse)


def random_chain(chance: random.Random) -> Graph:
    """Draw a chain with layer sizes over three decades, some pooling layers and sometimes a route at the end."""
    layers: list[GraphLayer] = []
    inputs = chance.choice([2, 64, 4096]) * chance.randint(1, 9)
    for index in range(chance.randint(1, 10)):
        if index > 0 and chance.random() < 0.1:
            layers.append(
                GraphLayer(f"l{index}", (HalvingLayer(by=1),), (inputs,), (index - 1,))
            )
        else:
            layers.append(
                dense_layer(
                    index, inputs, chance.choice([2, 64, 4096]) * chance.randint(1, 9)
                )
            )
        inputs = layers[-1].outputs
    if len(layers) > 2 and chance.random() < 0.5:
        repeated = chance.randrange(len(layers) - 1)
        size = inputs + layers[repeated].outputs
        layers.append(GraphLayer("join", (), (size,), (len(layers) - 1, repeated)))
        layers.append(dense_layer(len(layers), size, 9))
    return Graph("random", tuple(layers))


def test_worker_totals_sum_shares_of_workers() -> None:
    shares = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
    assert WorkerTotals.of(shares, 0) == WorkerTotals(2, Fraction(1, 2))
    assert WorkerTotals.of(shares, 1) == WorkerTotals(2, Fraction(3, 4))
    assert WorkerTotals.of((Fraction(1), Fraction(0)), 0) == WorkerTotals(
        0, Fraction(0)
    )
    assert WorkerTotals.of((Fraction(1, 6),) * 6, 3) == WorkerTotals.equal(6)


@pytest.mark.parametrize(
    "pairs",
    [
        ((16, 17),),
        ((18, 20),),
        ((18, 19), (19, 20)),
        ((24, 25),),
        ((15, 16),),
        ((30, 31),),
    ],
)
def test_pairs_that_cannot_be_fused_are_rejected_with_valid_pairs(
    pairs: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(
        InputError,
        match=r"choose from 18\+19, 19\+20, 20\+21, 21\+22, 22\+23, 23\+24, 29\+30",
    ):
        fused_schemes(YOLO, pairs, 16)
