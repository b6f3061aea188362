"""Choices of devices and layers are the best of all that there are."""

import itertools
import math
import random
import time

import pytest

from testbed.common.errors import InputError
from testbed_generation.placement import (
    Layers,
    Row,
    by_memory,
    even,
    least_bottleneck,
    least_latency,
)


def random_row(seed: int) -> Row:
    draw = random.Random(seed)
    names = tuple("abcd"[: draw.randint(1, 4)])
    links = {
        pair: draw.choice((0.1, 1.0, 5.0, math.inf))
        for pair in itertools.permutations(names, 2)
    }
    back = {pair: seconds / 2 for pair, seconds in links.items()}
    return Row(
        devices=names,
        layers=draw.randint(1, 6),
        seconds={name: draw.choice((0.2, 1.0, 3.0)) for name in names},
        capacity={name: draw.randint(0, 5) for name in names},
        send=lambda one, other: links[one, other],
        answer=lambda one, other: back[one, other],
        last_seconds={name: draw.choice((0.0, 0.5, 2.0)) for name in names},
    )


def every_choice(row: Row) -> list[Layers]:
    """Return all rows that begin at the source and hold all layers within their memory."""
    choices = []
    for size in range(len(row.devices)):
        for others in itertools.permutations(row.devices[1:], size):
            names = (row.devices[0], *others)
            for counts in itertools.product(
                *(range(1, row.capacity[name] + 1) for name in names)
            ):
                if sum(counts) == row.layers:
                    choices.append(tuple(zip(names, counts, strict=True)))
    return choices


@pytest.mark.parametrize("goal", ["latency", "bottleneck"])
def test_choice_equals_brute_force_in_a_thousand_cases(goal: str) -> None:
    choose = {"latency": least_latency, "bottleneck": least_bottleneck}[goal]
    fitting = 0
    for seed in range(1000):
        row = random_row(seed)
        measure = {"latency": row.latency, "bottleneck": row.bottleneck}[goal]
        best = min(map(measure, every_choice(row)), default=math.inf)
        if best == math.inf:
            with pytest.raises(InputError, match="do not fit"):
                choose(row)
            continue
        fitting += 1
        chosen = choose(row)
        assert sum(count for _, count in chosen) == row.layers
        assert all(count <= row.capacity[name] for name, count in chosen)
        assert measure(chosen) == pytest.approx(best), seed
    assert fitting > 300


def test_80_layers_over_12_devices_take_less_than_a_second_each() -> None:
    draw = random.Random(3)
    names = tuple(f"device{number}" for number in range(12))
    links = {
        pair: draw.uniform(0.001, 0.02) for pair in itertools.permutations(names, 2)
    }
    row = Row(
        devices=names,
        layers=80,
        seconds={name: draw.uniform(0.005, 0.05) for name in names},
        capacity={name: draw.randint(4, 16) for name in names},
        send=lambda one, other: links[one, other],
    )
    for choose in (least_latency, least_bottleneck):
        start = time.process_time()
        choose(row)
        assert time.process_time() - start < 1.0


def test_given_rows_keep_the_order_and_follow_their_rule() -> None:
    row = Row(
        ("a", "b", "c"),
        8,
        dict.fromkeys("abc", 1.0),
        {"a": 8, "b": 2, "c": 6},
        lambda one, other: 0.0,
    )
    assert by_memory(row) == (("a", 4), ("b", 1), ("c", 3))
    with pytest.raises(
        InputError, match="b has room for 2 of 3 layers: add memory or devices"
    ):
        even(row)
