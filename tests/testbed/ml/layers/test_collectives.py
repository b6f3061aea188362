"""Collective operations on the virtual clock: what every member has afterwards, and what goes over the links."""

import asyncio

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.collectives import Contribution, Group
from tests.helpers.simulated_programs import LINK, simulate_programs

NAMES = ("a", "b", "c", "d", "e")


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


async def all_done(group):
    """End with the first member, which ends the run, once all others are done: mailboxes withdraw as they close."""
    if await group.gather(torch.zeros(1), NAMES[0]) is None:
        await asyncio.get_running_loop().create_future()


def together(size, operation, number=0):
    """Run an operation of (group, rank) on so many members; return what each has of it, and the world."""
    names = NAMES[:size]
    links = {(one, other): LINK for one in names for other in names if one != other}
    found = {}

    async def program(device):
        async with Mailbox(device, links, (Contribution,)) as mailbox:
            group = Group(mailbox, names, number)
            found[device.name] = await operation(group, group.rank)
            await all_done(group)

    world = simulate_programs(dict.fromkeys(names, program))
    return [found[name] for name in names], world


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1,), (4, 7), (3, 2, 5)])
def test_an_all_reduce_gives_everybody_the_same_sum(size, shape):
    async def operation(group, rank):
        return await group.all_reduce(values(rank, *shape))

    found, _ = together(size, operation)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(
        found[0], sum(values(rank, *shape) for rank in range(size))
    )


def test_an_all_reduce_sends_its_share_over_each_link_of_the_ring_and_takes_time_for_additions():
    async def operation(group, rank):
        return await group.all_reduce(values(rank, 4000))

    _, world = together(4, operation)
    sent = {}
    for event in world.events:
        if event.event == "send" and event.fields["bytes"] > 1000:
            way = event.device, event.fields["peer"]
            sent[way] = sent.get(way, 0) + event.fields["bytes"]
    assert set(sent) == {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")}
    assert all(6 * 4000 < each < 6 * 4600 for each in sent.values())
    works = [event.fields for event in world.events if event.event == "compute"]
    assert [work["span"] for work in works] == ["all-reduce"] * 4 * 3
    assert {work["flops"] for work in works} == {1000}


def test_all_reduce_does_not_modify_its_input():
    given = [values(rank, 6) for rank in range(3)]

    async def operation(group, rank):
        await group.all_reduce(given[rank])

    together(3, operation)
    assert all(torch.equal(each, values(rank, 6)) for rank, each in enumerate(given))


@pytest.mark.parametrize("root", ["a", "c"])
def test_broadcast_gather_and_scatter_have_a_root(root):
    async def operation(group, rank):
        is_root = group.device.name == root
        everywhere = await group.broadcast(values(9, 2, 3) if is_root else None, root)
        gathered = await group.gather(values(rank, rank + 1), root)
        own = await group.scatter(
            [{"w": values(5 + to, 4)} for to in range(3)] if is_root else None, root
        )
        return everywhere, gathered, own

    found, _ = together(3, operation)
    for rank, (everywhere, gathered, own) in enumerate(found):
        assert torch.equal(everywhere, values(9, 2, 3))
        assert torch.equal(own["w"], values(5 + rank, 4))
        if NAMES[rank] != root:
            assert gathered is None
        else:
            assert [each.tolist() for each in gathered] == [
                values(of, of + 1).tolist() for of in range(3)
            ]


def test_all_gather_returns_the_tensors_of_all_members():
    async def operation(group, rank):
        return await group.all_gather(values(rank, 2))

    found, _ = together(3, operation)
    for each in found:
        assert [part.tolist() for part in each] == [
            values(rank, 2).tolist() for rank in range(3)
        ]


def test_groups_of_different_numbers_do_not_meet():
    names = NAMES[:2]
    links = {(one, other): LINK for one in names for other in names if one != other}
    found = {}

    async def program(device):
        async with Mailbox(device, links, (Contribution,)) as mailbox:
            groups = [Group(mailbox, names, number) for number in range(2)]
            rank, order = groups[0].rank, (0, 1) if device.name == "a" else (1, 0)
            # The two begin in another order on each device, so neither may wait for the other.
            tasks = {
                at: mailbox.start(groups[at].all_gather(values(10 * at + rank, 3)))
                for at in order
            }
            found[device.name] = [await tasks[at] for at in range(2)]
            await all_done(groups[0])

    simulate_programs(dict.fromkeys(names, program))
    for name in names:
        for at in range(2):
            wanted = [values(10 * at + rank, 3).tolist() for rank in range(2)]
            assert [each.tolist() for each in found[name][at]] == wanted
