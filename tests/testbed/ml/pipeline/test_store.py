"""What a device keeps for the others, and hands out to those that lack it."""

from types import SimpleNamespace

import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import Hello
from testbed.ml.pipeline.messages import (
    ASYNCHRONOUS_KINDS,
    Fetch,
    FetchedUnit,
    Keep,
    Replica,
    Replicated,
)
from testbed.ml.pipeline.placement import BEGINNING, Point, ReplicaStore
from testbed.ml.pipeline.recovery import ReplicaIndex
from testbed.plan import Assignment
from tests.helpers.simulated_programs import simulate_programs

DEVICES = ("lead", "keeper")


def state_of(unit):
    return {f"{unit}.weight": torch.full((2,), float(unit))}


def with_store(lead, also=lambda mailbox: None):
    """Run ``lead`` with its mailbox beside a device that has a store; return that store."""
    stores = []

    async def ask(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            mailbox.open(1)
            await lead(mailbox)

    async def keep(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            mailbox.open(1)
            stores.append(ReplicaStore(mailbox))
            also(mailbox)
            await device.sleep(1000)

    simulate_programs(dict(zip(DEVICES, (ask, keep), strict=True)))
    return stores[0].replicas


async def send(mailbox, *messages):
    for message in messages:
        await mailbox.post("keeper", message)


def test_replicas_are_handed_out_a_message_a_unit():
    async def lead(mailbox):
        await send(
            mailbox,
            *(Replica(1, 8, unit, state_of(unit)) for unit in (0, 1)),
            Fetch(1, 1, 8, [0, 1]),
        )
        for unit in (0, 1):
            found = await mailbox.take(FetchedUnit)
            assert (found.made, found.step, found.unit) == (1, 8, unit)
            assert torch.equal(
                found.state[f"{unit}.weight"], state_of(unit)[f"{unit}.weight"]
            )

    assert with_store(lead).units(Point(1, 8)) == {0, 1}


def test_what_is_not_here_is_not_answered():
    async def lead(mailbox):
        await send(mailbox, Replica(1, 8, 0, state_of(0)), Fetch(1, 1, 8, [0, 1]))
        assert (
            await mailbox.take(FetchedUnit, deadline=mailbox.device.now() + 5) is None
        )

    with_store(lead)


def test_points_that_nobody_needs_are_freed():
    async def lead(mailbox):
        await send(
            mailbox,
            *(Replica(1, step, 0, state_of(0)) for step in (4, 8, 12)),
            Keep(1, [(1, 8)]),
        )

    assert with_store(lead).points() == [Point(1, 8), Point(1, 12)]


def test_a_point_is_safe_once_all_stages_say_so_and_older_ones_are_freed_then():
    told, known = [], []

    async def lead(mailbox):
        store = ReplicaStore(mailbox)
        membership = SimpleNamespace(assigned=frozenset({"lead", "keeper"}))
        layout = [
            Assignment(device=name, start=unit, stop=unit + 1, memory=0)
            for unit, name in enumerate(DEVICES)
        ]
        supervisor = SimpleNamespace(
            mailbox=mailbox, device=mailbox.device, membership=membership, layout=layout
        )
        points = ReplicaIndex(supervisor, store, 2)
        points.branch(0)
        for unit in (0, 1):
            store.replicas.put(Point(1, 8), state_of(unit), [unit])
        mailbox.post("lead", Replicated(1, 8))
        known.append(points.safe)
        await mailbox.post(
            "keeper", Hello(0.0)
        )  # which makes it say that it has replicated, too
        await mailbox.device.sleep(1)
        known.append(points.safe)
        assert points.has_all(8)
        assert sorted(points.weights()) == ["0.weight", "1.weight"]

    def answer(mailbox):
        mailbox.on(Hello, lambda _: mailbox.post("lead", Replicated(1, 8)))
        mailbox.on(Keep, lambda keep: told.append([*map(tuple, keep.keep)]))

    with_store(lead, answer)
    assert known == [BEGINNING, Point(1, 8)]
    assert told == [[(1, 8)]]
