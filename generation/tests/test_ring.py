"""Rings of windows: Halda equals brute force, texts are those of one device, and reads overlap with computing."""

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


def no_time(sender: str, receiver: str) -> float:
    """Return 0 seconds for a message."""
    return 0.0


def random_ring(seed: int) -> Ring:
    generator = random.Random(seed)
    names = "abcd"[: generator.randint(1, 4)]
    message_seconds = {}
    for route in itertools.permutations(names, 2):
        message_seconds[route] = generator.choice((0.1, 1.0, 5.0, math.inf))
    members = []
    for name in names:
        disk_rate = generator.choice((None, 0.5, 4.0))
        layer_seconds = generator.choice((0.2, 1.0, 3.0))
        memory = generator.uniform(0, 6)
        members.append(Member(name, layer_seconds, memory, disk_rate))
    return Ring(
        tuple(members),
        layers=generator.choice((2, 4, 6, 8)),
        layer_bytes=generator.choice((0.5, 1.0)),
        message_seconds=lambda sender, receiver: message_seconds[sender, receiver],
        output_seconds=generator.choice((0.0, 1.0)),
    )


def all_windows(ring: Ring, rounds: int) -> list[Windows]:
    """Return all windows of all subsets of the ring that contain its head."""
    per_round = ring.layers // rounds
    choices = []
    for counts in itertools.product(range(per_round + 1), repeat=len(ring.members)):
        if sum(counts) != per_round or counts[0] == 0:
            continue
        layer_counts = []
        for member, count in zip(ring.members, counts, strict=True):
            if count:
                layer_counts.append((member.name, count))
        choices.append(Windows(rounds, tuple(layer_counts)))
    return choices


def lowest_cost(ring: Ring, choices: list[Windows]) -> float:
    return min(windows.halda_seconds(ring) for windows in choices)


def test_halda_equals_brute_force_in_a_thousand_cases() -> None:
    possible = 0
    for seed in range(1000):
        ring = random_ring(seed)
        for rounds in (1, 2):
            choices = all_windows(ring, rounds)
            lowest = lowest_cost(ring, choices)
            if lowest == math.inf:
                connected = replace(ring, message_seconds=no_time)
                fits = lowest_cost(connected, choices) < math.inf
                reason = "no link leads from" if fits else "do not fit"
                with pytest.raises(InputError, match=reason):
                    halda(ring, rounds)
                continue
            possible += 1
            windows = halda(ring, rounds)
            per_round = sum(count for _, count in windows.layer_counts)
            assert per_round * rounds == ring.layers
            assert windows.halda_seconds(ring) == pytest.approx(lowest), seed
    # Otherwise the random rings would hardly test the choice.
    assert possible > 1000


def test_80_layers_on_12_devices_are_assigned_within_a_second() -> None:
    generator = random.Random(3)
    members = []
    for number in range(12):
        layer_seconds = generator.uniform(0.005, 0.05)
        memory = generator.uniform(4, 9)
        members.append(Member(f"device{number}", layer_seconds, memory, 20.0))
    ring = Ring(tuple(members), 80, 1.0, lambda sender, receiver: 0.01)
    start = time.process_time()
    best_windows(ring, halda, None)
    assert time.process_time() - start < 1.0


def test_more_rounds_hide_reads_from_a_disk() -> None:
    slow = Member("slow", 0.01, 3.0, disk_rate=50.0)
    ring = Ring((Member("head", 0.1, 100.0), slow), 8, 1.0, no_time)
    # 4 layers of 0.1 s and 4 layers of 0.01 s.
    computing = 0.44
    # In one round the window of 4 layers does not fit into 3 bytes, so it is read whole (4 bytes at 50 bytes/s) when it
    # is used. In two rounds the read overlaps with the computing of the head.
    assert even_windows(ring, 1).token_seconds(ring) == pytest.approx(computing + 0.08)
    assert even_windows(ring, 2).token_seconds(ring) == pytest.approx(computing)
    assert best_windows(ring, even_windows, None).rounds == 2


def test_reads_without_prefetching_add_to_token_time() -> None:
    slow = Member("slow", 0.01, 3.0, disk_rate=50.0)
    members = (Member("head", 0.1, 100.0), slow)
    ring = Ring(members, 8, 1.0, no_time, prefetch=False)
    # Memory has room for 3 of 4 layers, so each of two rounds reads half a layer, in 0.01 s.
    assert even_windows(ring, 2).token_seconds(ring) == pytest.approx(0.44 + 0.02)


def test_memory_windows_fill_device_without_disk_and_share_other_layers() -> None:
    members = (
        Member("cpu", 1.0, 2.0, disk_rate=9.0),
        Member("gpu", 1.0, 6.0),
        Member("phone", 1.0, 2.0, disk_rate=9.0),
    )
    ring = Ring(members, 20, 1.0, no_time)
    # In proportion to memory the GPU would get 12 layers, of which 6 fit; the other devices share 14 layers.
    assert memory_windows(ring, 1).layer_counts == (
        ("cpu", 7),
        ("gpu", 6),
        ("phone", 7),
    )
    without_disks = Ring(members[1:2], 20, 1.0, no_time)
    with pytest.raises(InputError, match="gpu has no memory for 20 layers"):
        memory_windows(without_disks, 1)


@pytest.mark.parametrize("assign_windows", [halda, even_windows, memory_windows])
def test_error_names_missing_link_of_ring(
    assign_windows: Callable[[Ring, int], Windows],
) -> None:
    message_seconds = {("a", "b"): 0.1}
    members = (Member("a", 1.0, 2.0), Member("b", 1.0, 2.0))
    ring = Ring(
        members,
        layers=4,
        layer_bytes=1.0,
        message_seconds=lambda *route: message_seconds.get(route, math.inf),
    )
    with pytest.raises(InputError, match="no link leads from b to a"):
        assign_windows(ring, 1)


def test_device_with_negative_free_memory_gets_no_layers() -> None:
    members = (
        Member("head", 1.0, 6.0),
        Member("small", 1.0, -3.0),
        Member("large", 1.0, 9.0),
    )
    ring = Ring(members, 8, 1.0, no_time)
    layer_counts = memory_windows(ring, 1).layer_counts
    assert [name for name, _ in layer_counts] == ["head", "large"]
    assert sum(count for _, count in layer_counts) == 8


def test_head_without_memory_for_a_layer_is_refused() -> None:
    for memory in (-3.0, 0.5):
        members = (Member("head", 1.0, memory), Member("large", 1.0, 9.0))
        ring = Ring(members, 8, 1.0, no_time)
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


def generate_texts(**method: object) -> list[dict[str, object]]:
    faults = method.pop("faults", [])
    work = {**SCENARIO["workload"], "method": method}
    scenario = testbed.build(**{**SCENARIO, "workload": work, "faults": faults})
    return list(testbed.simulate(scenario).run.metrics["text_list"])


RING = {"name": "ring", "partition": "even", "rounds": 2}


@pytest.mark.parametrize("rounds", [1, 2])
def test_texts_equal_those_of_sequential(rounds: int) -> None:
    pipeline_texts = generate_texts(name="sequential", partition="even")
    assert generate_texts(**{**RING, "rounds": rounds}) == pipeline_texts


@pytest.mark.parametrize("recovery", ["restart", "replicate"])
@pytest.mark.parametrize("token", [0, 3, 6])
def test_texts_do_not_change_if_device_dies(recovery: str, token: int) -> None:
    kill = {"kill": "c", "when": {"device": "a", "event": "token", "micro": token}}
    assert generate_texts(**RING, recovery=recovery, faults=[kill]) == generate_texts(
        **RING
    )


@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"partition": "memory"}])
def test_token_time_with_disks_is_the_predicted_time(options: dict[str, Any]) -> None:
    device = {"profile": {"name": "small", "memory": "3.8GB", "speed": "100gflops"}}
    workload = {
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
    }
    devices = {"a": device, "b": device, "c": device}
    keys = {**SCENARIO, "workload": workload, "devices": devices}
    run = testbed.simulate(testbed.build(**keys)).run
    assert run.metrics["tpot"] == pytest.approx(run.plan.details.token_time, rel=0.02)


def test_disk_does_not_count_dropped_windows() -> None:
    slept: list[float] = []

    class Clock:
        def now(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    def wait_seconds(*, after_restart: bool) -> float:
        device: Device = Clock()  # type: ignore[assignment]
        disk = Disk(device, disk_rate=1.0, memory=8.0, layer_bytes=1.0)
        if after_restart:
            disk.add_window(0, 4)
            disk.add_window(8, 4)
            disk.drop_window(0)
            disk.drop_window(8)
        # Two windows of 6 bytes exceed the memory of 8 bytes; dropped windows would exceed it further.
        disk.add_window(14, 6)
        disk.add_window(20, 6)
        asyncio.run(disk.wait_for_window(14))
        return slept.pop()

    assert wait_seconds(after_restart=True) == wait_seconds(after_restart=False)


def test_rounds_that_do_not_divide_layers_are_refused() -> None:
    with pytest.raises(InputError, match="6 layers do not divide into 4 rounds"):
        generate_texts(**{**RING, "rounds": 4})
