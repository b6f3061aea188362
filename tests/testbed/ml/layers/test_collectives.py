"""Collective operations on the virtual clock: results of all members, and traffic on links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.collectives import Contribution, Group
from testbed.simulation.world import World
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.worlds import LINK

NAMES = ("a", "b", "c", "d", "e")
Operation = Callable[[Group, int], Awaitable[Any]]
"""Takes the group and the rank of the member."""


def draw_values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def to_lists(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


async def wait_for_all(group: Group) -> None:
    """Return on the first member, which ends the run, after all others are done.

    Mailboxes withdraw unsent messages as they close, so the other members keep waiting.
    """
    if await group.gather(torch.zeros(1), NAMES[0]) is None:
        await asyncio.get_running_loop().create_future()


def run_group(size: int, operation: Operation) -> tuple[list[Any], World]:
    """Run an operation on all members of a group and return their results by rank, and the world."""
    names = NAMES[:size]
    links = dict.fromkeys(permutations(names, 2), LINK)
    results = {}

    async def program(device: Device) -> None:
        async with Mailbox(device, links, (Contribution,)) as mailbox:
            group = Group(mailbox, names, 0)
            results[device.name] = await operation(group, group.rank)
            await wait_for_all(group)

    world = simulate_programs(dict.fromkeys(names, program))
    return [results[name] for name in names], world


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1,), (4, 7), (3, 2, 5)])
def test_all_reduce_gives_all_members_equal_sum(
    size: int, shape: tuple[int, ...]
) -> None:
    async def operation(group: Group, rank: int) -> torch.Tensor:
        return await group.all_reduce(draw_values(rank, *shape))

    results, _ = run_group(size, operation)
    # Bitwise equal, or replicas of weights would drift apart.
    for result in results:
        assert torch.equal(result, results[0])
    expected = sum(draw_values(rank, *shape) for rank in range(size))
    torch.testing.assert_close(results[0], expected)


async def all_reduce_4000_values(group: Group, rank: int) -> torch.Tensor:
    return await group.all_reduce(draw_values(rank, 4000))


def test_all_reduce_sends_equal_shares_around_ring() -> None:
    _, world = run_group(4, all_reduce_4000_values)
    sent: dict[tuple[str, str], int] = {}
    for event in world.events:
        # Smaller messages belong to wait_for_all.
        if event.event == "send" and event.fields["bytes"] > 1000:
            link = event.device, event.fields["peer"]
            sent[link] = sent.get(link, 0) + event.fields["bytes"]
    assert set(sent) == {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")}
    # Three steps of reduction and three of distribution, each with a quarter of 16,000 bytes.
    for size in sent.values():
        assert 6 * 4000 < size < 6 * 4600


def test_all_reduce_is_charged_for_additions() -> None:
    _, world = run_group(4, all_reduce_4000_values)
    computations = []
    for event in world.events:
        if event.event == "compute":
            computations.append((event.fields["span"], event.fields["flops"]))
    # Each of four members adds a quarter of 4000 values in three steps.
    assert computations == [("all-reduce", 1000)] * 4 * 3


def test_all_reduce_does_not_modify_its_input() -> None:
    inputs = [draw_values(rank, 6) for rank in range(3)]

    async def operation(group: Group, rank: int) -> None:
        await group.all_reduce(inputs[rank])

    run_group(3, operation)
    for rank, tensor in enumerate(inputs):
        assert torch.equal(tensor, draw_values(rank, 6))


roots = pytest.mark.parametrize("root", ["a", "c"])


@roots
def test_broadcast_gives_tensor_of_root_to_all_members(root: str) -> None:
    async def operation(group: Group, rank: int) -> torch.Tensor:
        is_root = group.device.name == root
        return await group.broadcast(draw_values(9, 2, 3) if is_root else None, root)

    results, _ = run_group(3, operation)
    for result in results:
        assert torch.equal(result, draw_values(9, 2, 3))


@roots
def test_gather_gives_tensors_of_all_members_to_root(root: str) -> None:
    async def operation(group: Group, rank: int) -> list[torch.Tensor] | None:
        # The members' tensors may have different shapes.
        return await group.gather(draw_values(rank, rank + 1), root)

    results, _ = run_group(3, operation)
    expected = [draw_values(rank, rank + 1).tolist() for rank in range(3)]
    for name, result in zip(NAMES, results, strict=False):
        if name == root:
            assert to_lists(result) == expected
        else:
            assert result is None


@roots
def test_scatter_gives_each_member_its_tensors_of_root(root: str) -> None:
    parts = [{"w": draw_values(5 + rank, 4)} for rank in range(3)]

    async def operation(group: Group, rank: int) -> dict[str, torch.Tensor]:
        is_root = group.device.name == root
        return await group.scatter(parts if is_root else None, root)

    results, _ = run_group(3, operation)
    for rank, result in enumerate(results):
        assert torch.equal(result["w"], draw_values(5 + rank, 4))


def test_all_gather_returns_tensors_of_all_members() -> None:
    async def operation(group: Group, rank: int) -> list[torch.Tensor]:
        return await group.all_gather(draw_values(rank, 2))

    results, _ = run_group(3, operation)
    expected = [draw_values(rank, 2).tolist() for rank in range(3)]
    for result in results:
        assert to_lists(result) == expected


def test_groups_with_different_numbers_are_independent() -> None:
    names = NAMES[:2]
    links = dict.fromkeys(permutations(names, 2), LINK)
    results: dict[str, list[list[torch.Tensor]]] = {}

    def values_of(number: int, rank: int) -> torch.Tensor:
        return draw_values(10 * number + rank, 3)

    async def program(device: Device) -> None:
        async with Mailbox(device, links, (Contribution,)) as mailbox:
            groups = [Group(mailbox, names, number) for number in range(2)]
            rank = groups[0].rank
            # The order of the operations differs, so neither may wait for the other.
            order = (0, 1) if device.name == "a" else (1, 0)
            tasks = {}
            for number in order:
                values = values_of(number, rank)
                tasks[number] = mailbox.start(groups[number].all_gather(values))
            results[device.name] = [await tasks[0], await tasks[1]]
            await wait_for_all(groups[0])

    simulate_programs(dict.fromkeys(names, program))
    for name in names:
        for number in range(2):
            expected = [values_of(number, rank).tolist() for rank in range(2)]
            assert to_lists(results[name][number]) == expected
