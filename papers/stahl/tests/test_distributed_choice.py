"""Communication and the choice of schemes: the paper's figures, brute force, integer against dynamic program."""

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
TABLE_2 = {
    "LOP": (),
    "FUSE4": ((19, 20), (21, 22), (23, 24), (29, 30)),
    "FUSE3": ((18, 19), (21, 22), (23, 24), (29, 30)),
    "FUSE2": ((18, 19), (20, 21), (23, 24), (29, 30)),
    "FUSE1": ((18, 19), (20, 21), (22, 23), (29, 30)),
}
PROGRAMS = [least_communication, integer_program.optimal_schemes]
"""The dynamic program that plans are made with, and the paper's integer program."""
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
def test_the_four_layer_example_communicates_as_the_paper_says(
    schemes: tuple[Scheme, ...], expected: int
) -> None:
    assert total_communication(FOUR_LAYERS, schemes, WorkerTotals.equal(2)) == expected


def test_the_optimum_of_the_four_layer_example_is_the_papers() -> None:
    workers = WorkerTotals.equal(2)
    assert least_communication(FOUR_LAYERS, workers) == ("lop", "fuse1", "fuse2", "lop")
    assert integer_program.optimal_schemes(FOUR_LAYERS, workers) == (
        "lop",
        "fuse1",
        "fuse2",
        "lop",
    )


def test_equation_9_as_printed_does_not_give_the_papers_own_22() -> None:
    assert (
        total_communication(
            FOUR_LAYERS,
            ("lop", "fuse1", "fuse2", "lop"),
            WorkerTotals.equal(2),
            "equation-9",
        )
        == 26
    )


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
def test_yolov2_on_six_devices_communicates_as_table_2_says(
    reuse: Reuse, expected: dict[str, float]
) -> None:
    found = {
        name: round(
            float(
                4
                * total_communication(
                    YOLO, fused_schemes(YOLO, pairs, 16), WorkerTotals.equal(6), reuse
                )
                / MIB
            ),
            1,
        )
        for name, pairs in TABLE_2.items()
    }
    assert found == expected


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("reuse", "least"), [("equation-9", 68.4), ("with-reuse", 67.3)]
)
def test_of_lop_and_fused_pairs_the_best_of_table_2_is_the_optimum(
    program: Callable[..., Schemes], reuse: Reuse, least: float
) -> None:
    workers = WorkerTotals.equal(6)
    found = total_communication(
        YOLO, program(YOLO, workers, reuse, 16, lip=False), workers, reuse
    )
    assert found == min(
        total_communication(YOLO, fused_schemes(YOLO, pairs, 16), workers, reuse)
        for pairs in TABLE_2.values()
    )
    assert round(float(4 * found / MIB), 1) == least


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_whole_integer_program_does_better_than_table_2_with_lip_where_a_layer_has_few_outputs(
    program: Callable[..., Schemes],
) -> None:
    schemes = program(YOLO, WorkerTotals.equal(6), "with-reuse", 16)
    assert (
        round(
            float(4 * total_communication(YOLO, schemes, WorkerTotals.equal(6)) / MIB),
            1,
        )
        == 57.0
    )
    # GraphLayer 26 makes 64 channels of 512.
    assert [index for index, scheme in enumerate(schemes) if scheme == "lip"] == [26]


def allowed(graph: Graph, schemes: tuple[Scheme, ...]) -> bool:
    return (
        all(
            (scheme == "whole") == (not graph.layers[index].splits)
            and (scheme == "fuse1")
            == (index + 1 < len(schemes) and schemes[index + 1] == "fuse2")
            and (scheme != "fuse1" or graph.fuses(index))
            for index, scheme in enumerate(schemes)
        )
        and schemes[0] != "fuse2"
    )


@settings(deadline=None)
@given(
    random_chains(most=5),
    st.integers(1, 8),
    st.sampled_from(["equation-9", "with-reuse"]),
)
def test_the_dynamic_program_finds_the_least_there_is(
    graph: Graph, devices: int, reuse: Reuse
) -> None:
    workers = WorkerTotals.equal(devices)
    ways = [
        way
        for way in product((*SCHEMES, "whole"), repeat=len(graph.layers))
        if allowed(graph, way)
    ]
    found = least_communication(graph, workers, reuse)
    assert allowed(graph, found)
    assert total_communication(graph, found, workers, reuse) == min(
        total_communication(graph, way, workers, reuse) for way in ways
    )


def test_integer_and_dynamic_program_agree_on_random_chains() -> None:
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
        assert allowed(graph, integer)
        assert total_communication(
            graph, integer, workers, reuse
        ) == total_communication(graph, dynamic, workers, reuse), (
            graph,
            workers,
            reuse,
        )


def random_chain(chance: random.Random) -> Graph:
    """Sizes over three decades; a tenth of the layers pool, and some outputs are asked for again at the end."""
    layers: list[GraphLayer] = []
    entering = chance.choice([2, 64, 4096]) * chance.randint(1, 9)
    for index in range(chance.randint(1, 10)):
        if index > 0 and chance.random() < 0.1:
            layers.append(
                GraphLayer(
                    f"l{index}", (HalvingLayer(by=1),), (entering,), (index - 1,)
                )
            )
        else:
            layers.append(
                dense_layer(
                    index, entering, chance.choice([2, 64, 4096]) * chance.randint(1, 9)
                )
            )
        entering = layers[-1].outputs
    if len(layers) > 2 and chance.random() < 0.5:
        again = chance.randrange(len(layers) - 1)
        size = entering + layers[again].outputs
        layers.append(GraphLayer("join", (), (size,), (len(layers) - 1, again)))
        layers.append(dense_layer(len(layers), size, 9))
    return Graph("random", tuple(layers))


def test_unequal_shares_cost_what_the_formulas_say_for_their_sum() -> None:
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
def test_pairs_that_cannot_be_fused_are_refused_naming_those_that_can(
    pairs: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(
        InputError,
        match=r"choose from 18\+19, 19\+20, 20\+21, 21\+22, 22\+23, 23\+24, 29\+30",
    ):
        fused_schemes(YOLO, pairs, 16)
