"""Rings of windows: Halda against brute force, texts of one process, and reads that overlap with others' work."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import testbed
from testbed.common.errors import InputError
from testbed.device import Device
from testbed_generation.disk import Disk
from testbed_generation.ring import (
    Member,
    Ring,
    Windows,
    best_windows,
    even_windows,
    halda,
    memory_windows,
)


def random_ring(seed: int) -> Ring:
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(1, 4)]
    links = {
        pair: draw.choice((0.1, 1.0, 5.0, math.inf))
        for pair in itertools.permutations(names, 2)
    }
    members = []
    for name in names:
        disk = draw.choice((None, 0.5, 4.0))
        members.append(
            Member(name, draw.choice((0.2, 1.0, 3.0)), draw.uniform(0, 6), disk)
        )
    return Ring(
        tuple(members),
        draw.choice((2, 4, 6, 8)),
        draw.choice((0.5, 1.0)),
        lambda one, other: links[one, other],
        draw.choice((0.0, 1.0)),
    )


def every_windows(ring: Ring, rounds: int) -> list[Windows]:
    """Return all windows of all subsets of the ring that contain its head."""
    total = ring.layers // rounds
    choices = []
    sizes = itertools.product(range(total + 1), repeat=len(ring.members))
    for counts in sizes:
        if sum(counts) != total or not counts[0]:
            continue
        windows = tuple(
            (member.name, count)
            for member, count in zip(ring.members, counts, strict=True)
            if count
        )
        choices.append(Windows(rounds, windows))
    return choices


def test_halda_equals_brute_force_in_a_thousand_cases() -> None:
    fitting = 0
    for seed in range(1000):
        ring = random_ring(seed)
        for rounds in (1, 2):
            choices = every_windows(ring, rounds)
            least = min(windows.halda_seconds(ring) for windows in choices)
            if least == math.inf:
                connected = replace(ring, send=lambda one, other: 0.0)
                fits = min(each.halda_seconds(connected) for each in choices) < math.inf
                reason = "no link leads from" if fits else "do not fit"
                with pytest.raises(InputError, match=reason):
                    halda(ring, rounds)
                continue
            fitting += 1
            chosen = halda(ring, rounds)
            assert sum(count for _, count in chosen.windows) * rounds == ring.layers
            assert chosen.halda_seconds(ring) == pytest.approx(least), seed
    assert fitting > 1000


def test_80_layers_over_12_devices_take_less_than_a_second() -> None:
    draw = random.Random(3)
    members = tuple(
        Member(f"device{number}", draw.uniform(0.005, 0.05), draw.uniform(4, 9), 20.0)
        for number in range(12)
    )
    ring = Ring(members, 80, 1.0, lambda one, other: 0.01)
    start = time.process_time()
    best_windows(ring, halda, None)
    assert time.process_time() - start < 1.0


def test_more_rounds_hide_reads_from_a_disk() -> None:
    slow = Member("slow", 0.01, 3.0, disk=50.0)
    ring = Ring((Member("head", 0.1, 100.0), slow), 8, 1.0, lambda one, other: 0.0)
    # In one round the window of 4 layers does not fit into 3 bytes, so its reading is seen; in two rounds it is hidden.
    assert even_windows(ring, 1).token_seconds(ring) == pytest.approx(0.44 + 0.08)
    assert even_windows(ring, 2).token_seconds(ring) == pytest.approx(0.44)
    assert best_windows(ring, even_windows, None).rounds == 2


def test_without_prefetching_every_read_is_waited_for() -> None:
    slow = Member("slow", 0.01, 3.0, disk=50.0)
    members = (Member("head", 0.1, 100.0), slow)
    ring = Ring(members, 8, 1.0, lambda one, other: 0.0, prefetch=False)
    # Of 4 layers memory holds 3, so each of two rounds reads half a layer.
    assert even_windows(ring, 2).token_seconds(ring) == pytest.approx(0.44 + 0.02)


def test_windows_by_memory_fill_devices_without_a_disk_and_share_the_rest() -> None:
    members = (
        Member("cpu", 1.0, 2.0, disk=9.0),
        Member("gpu", 1.0, 6.0),
        Member("phone", 1.0, 2.0, disk=9.0),
    )
    ring = Ring(members, 20, 1.0, lambda one, other: 0.0)
    # In proportion the GPU would get 12 layers.
    assert memory_windows(ring, 1).windows == (("cpu", 7), ("gpu", 6), ("phone", 7))
    without_disks = Ring(members[1:2], 20, 1.0, lambda one, other: 0.0)
    with pytest.raises(InputError, match="gpu has no memory for 20 layers"):
        memory_windows(without_disks, 1)


@pytest.mark.parametrize("assign", [halda, even_windows, memory_windows])
def test_missing_link_of_a_ring_is_named(
    assign: Callable[[Ring, int], Windows],
) -> None:
    links = {("a", "b"): 0.1}
    members = (Member("a", 1.0, 2.0), Member("b", 1.0, 2.0))
    ring = Ring(members, 4, 1.0, lambda one, other: links.get((one, other), math.inf))
    with pytest.raises(InputError, match="no link leads from b to a"):
        assign(ring, 1)


def test_device_with_negative_free_memory_takes_no_layer_of_others() -> None:
    members = (
        Member("head", 1.0, 6.0),
        Member("small", 1.0, -3.0),
        Member("large", 1.0, 9.0),
    )
    ring = Ring(members, 8, 1.0, lambda one, other: 0.0)
    windows = memory_windows(ring, 1).windows
    assert [name for name, _ in windows] == ["head", "large"]
    assert sum(window for _, window in windows) == 8


def test_head_without_memory_for_a_layer_is_refused() -> None:
    for memory in (-3.0, 0.5):
        members = (Member("head", 1.0, memory), Member("large", 1.0, 9.0))
        ring = Ring(members, 8, 1.0, lambda one, other: 0.0)
        with pytest.raises(InputError, match="head has no memory for 1 layer:"):
            memory_windows(ring, 1)


SCENARIO: dict[str, Any] = {
    "name": "ring",
    "workload": {
        "task": "generate",
        "model": {
            "layers": 6,
            "width": 32,
            "heads": 4,
            "kv_heads": 2,
            "hidden": 48,
            "vocabulary": 256,
        },
        "prompts": ["hello", "a longer prompt"],
        "tokens": 8,
        "concurrency": 2,
    },
    "devices": {
        "a": {"profile": "raspberry-pi-4b"},
        "b": {"profile": "raspberry-pi-4b"},
        "c": {"profile": "raspberry-pi-4b"},
    },
    "network": {"topology": "mesh", "link": {"rate": "100mbit", "delay": "5ms"}},
}


def texts(**method: object) -> list[dict[str, object]]:
    faults = method.pop("faults", [])
    work = {**SCENARIO["workload"], "method": method}
    scenario = testbed.build(**{**SCENARIO, "workload": work, "faults": faults})
    return list(testbed.simulate(scenario).run.metrics["text_list"])


RING = {"name": "ring", "partition": "even", "rounds": 2}


@pytest.mark.parametrize("rounds", [1, 2])
def test_texts_are_those_of_one_device(rounds: int) -> None:
    alone = texts(name="sequential", partition="even")
    assert texts(**{**RING, "rounds": rounds}) == alone


@pytest.mark.parametrize("recovery", ["restart", "replicate"])
@pytest.mark.parametrize("token", [0, 3, 6])
def test_texts_survive_the_death_of_a_device(recovery: str, token: int) -> None:
    kill = {"kill": "c", "when": {"device": "a", "event": "token", "micro": token}}
    assert texts(**RING, recovery=recovery, faults=[kill]) == texts(**RING)


@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"partition": "memory"}])
def test_times_with_a_disk_are_the_predicted_ones(options: dict[str, Any]) -> None:
    device = {"profile": {"name": "small", "memory": "3.8GB", "speed": "100gflops"}}
    run = testbed.simulate(
        testbed.build(
            **{
                **SCENARIO,
                "workload": {
                    "task": "generate",
                    "model": {"preset": "llama-3-8b", "storage": "q8_0"},
                    "prompts": {"count": 1, "length": 4},
                    "tokens": 6,
                    "numerics": "none",
                    "method": {
                        "name": "ring",
                        "rounds": 4,
                        "disk": {"a": "5GB/s", "b": "5GB/s", "c": "5GB/s"},
                        **options,
                    },
                },
                "devices": {"a": device, "b": device, "c": device},
            }
        )
    ).run
    assert run.metrics["tpot"] == pytest.approx(run.plan.details.token_time, rel=0.02)


def test_dropped_windows_of_a_disk_are_not_read_any_more() -> None:
    slept: list[float] = []

    class Clock:
        def now(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    def read_window(*, after_restart: bool) -> float:
        device: Device = Clock()  # type: ignore[assignment]
        disk = Disk(device, rate=1.0, memory=8.0, layer_bytes=1.0)
        if after_restart:
            disk.hold(0, 4)
            disk.hold(8, 4)
            disk.drop(0)
            disk.drop(8)
        disk.hold(14, 6)
        disk.hold(20, 6)
        asyncio.run(disk.fetch(14))
        return slept.pop()

    assert read_window(after_restart=True) == read_window(after_restart=False)


def test_rounds_that_do_not_divide_the_layers_are_refused() -> None:
    with pytest.raises(InputError, match="6 layers do not divide into 4 rounds"):
        texts(**{**RING, "rounds": 4})
