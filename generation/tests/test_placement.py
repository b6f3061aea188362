"""Choices of devices and layers are optimal."""

import itertools
import math
import random
import time
from collections.abc import Callable

import pytest

from testbed.common.errors import InputError
from testbed_generation.placement import (
    LayerCounts,
    PlacementProblem,
    divide_by_memory,
    divide_evenly,
    minimize_bottleneck,
    minimize_latency,
)


def random_problem(seed: int) -> PlacementProblem:
    generator = random.Random(seed)
    names = tuple("abcd"[: generator.randint(1, 4)])
    message_seconds = {}
    for route in itertools.permutations(names, 2):
        message_seconds[route] = generator.choice((0.1, 1.0, 5.0, math.inf))
    return PlacementProblem(
        devices=names,
        layers=generator.randint(1, 6),
        layer_seconds={name: generator.choice((0.2, 1.0, 3.0)) for name in names},
        capacity={name: generator.randint(0, 5) for name in names},
        message_seconds=lambda sender, receiver: message_seconds[sender, receiver],
        # A token is smaller than activations.
        token_message_seconds=lambda sender, receiver: (
            message_seconds[sender, receiver] / 2
        ),
        output_matrix_seconds={
            name: generator.choice((0.0, 0.5, 2.0)) for name in names
        },
    )


def all_choices(problem: PlacementProblem) -> list[LayerCounts]:
    """Return all chains that begin at the coordinator and have memory for all layers."""
    coordinator, *others = problem.devices
    choices: list[LayerCounts] = []
    for size in range(len(problem.devices)):
        for chosen in itertools.permutations(others, size):
            names = (coordinator, *chosen)
            ranges = [range(1, problem.capacity[name] + 1) for name in names]
            for counts in itertools.product(*ranges):
                if sum(counts) == problem.layers:
                    choices.append(tuple(zip(names, counts, strict=True)))
    return choices


def check_optimum(
    choose: Callable[[PlacementProblem], LayerCounts],
    measure: Callable[[PlacementProblem, LayerCounts], float],
) -> None:
    """Compare the choices for a thousand random problems with brute force."""
    possible = 0
    for seed in range(1000):
        problem = random_problem(seed)
        best = math.inf
        for choice in all_choices(problem):
            best = min(best, measure(problem, choice))
        if best == math.inf:
            with pytest.raises(InputError, match="do not fit"):
                choose(problem)
            continue
        possible += 1
        chosen = choose(problem)
        assert sum(count for _, count in chosen) == problem.layers
        for name, count in chosen:
            assert count <= problem.capacity[name]
        assert measure(problem, chosen) == pytest.approx(best), seed
    # Otherwise the random problems would hardly test the choice.
    assert possible > 300


def test_latency_equals_brute_force_in_a_thousand_cases() -> None:
    check_optimum(minimize_latency, PlacementProblem.latency)


def test_bottleneck_equals_brute_force_in_a_thousand_cases() -> None:
    check_optimum(minimize_bottleneck, PlacementProblem.bottleneck)


def test_80_layers_on_12_devices_are_placed_within_a_second() -> None:
    generator = random.Random(3)
    names = tuple(f"device{number}" for number in range(12))
    message_seconds = {}
    for route in itertools.permutations(names, 2):
        message_seconds[route] = generator.uniform(0.001, 0.02)
    problem = PlacementProblem(
        devices=names,
        layers=80,
        layer_seconds={name: generator.uniform(0.005, 0.05) for name in names},
        capacity={name: generator.randint(4, 16) for name in names},
        message_seconds=lambda sender, receiver: message_seconds[sender, receiver],
    )
    for choose in (minimize_latency, minimize_bottleneck):
        start = time.process_time()
        choose(problem)
        assert time.process_time() - start < 1.0


def test_fixed_rules_keep_order_and_divide_by_memory_or_evenly() -> None:
    problem = PlacementProblem(
        devices=("a", "b", "c"),
        layers=8,
        layer_seconds=dict.fromkeys("abc", 1.0),
        capacity={"a": 8, "b": 2, "c": 6},
        message_seconds=lambda sender, receiver: 0.0,
    )
    assert divide_by_memory(problem) == (("a", 4), ("b", 1), ("c", 3))
    # Evenly divided, 8 layers on 3 devices are 3, 3 and 2.
    with pytest.raises(InputError, match="b has room for 2 of 3 layers: add memory"):
        divide_evenly(problem)
