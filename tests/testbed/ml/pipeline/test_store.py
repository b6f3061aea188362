"""Tests of the replicas on a device: fetching, freeing, and points that are safe on all stages."""

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

DEVICES = ("coordinator", "keeper")


def state_of(unit):
    return {f"{unit}.weight": torch.full((2,), float(unit))}


def run_with_store(coordinate, prepare=lambda mailbox: None):
    """Run ``coordinate`` with a mailbox, beside a device with a replica store; return the store's replicas.

    ``prepare`` registers further handlers on the mailbox of the keeper.
    """
    stores = []

    async def coordinator(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            mailbox.open(1)
            await coordinate(mailbox)

    async def keeper(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            mailbox.open(1)
            stores.append(ReplicaStore(mailbox))
            prepare(mailbox)
            await device.sleep(1000)

    simulate_programs({"coordinator": coordinator, "keeper": keeper})
    return stores[0].replicas


def replica(step, unit):
    return Replica(configuration=1, step=step, unit=unit, state=state_of(unit))


FETCH = Fetch(configuration=1, made=1, step=8, units=[0, 1])
REPLICATED = Replicated(configuration=1, step=8)


async def send(mailbox, *messages):
    for message in messages:
        await mailbox.post("keeper", message)


def test_fetched_replicas_arrive_in_one_message_per_unit():
    async def coordinate(mailbox):
        await send(
            mailbox,
            replica(8, 0),
            replica(8, 1),
            FETCH,
        )
        for unit in (0, 1):
            fetched = await mailbox.take(FetchedUnit)
            assert (fetched.made, fetched.step, fetched.unit) == (1, 8, unit)
            name = f"{unit}.weight"
            assert torch.equal(fetched.state[name], state_of(unit)[name])

    assert run_with_store(coordinate).units(Point(1, 8)) == {0, 1}


def test_request_for_missing_replica_is_not_answered():
    async def coordinate(mailbox):
        # Unit 1 is missing, so unit 0 is not sent either.
        await send(mailbox, replica(8, 0), FETCH)
        deadline = mailbox.device.now() + 5
        assert await mailbox.take(FetchedUnit, deadline=deadline) is None

    run_with_store(coordinate)


def test_keep_message_frees_older_points():
    async def coordinate(mailbox):
        for step in (4, 8, 12):
            await send(mailbox, replica(step, 0))
        await send(mailbox, Keep(configuration=1, keep=[(1, 8)]))

    # Newer points stay, since their replication may be under way.
    assert run_with_store(coordinate).points() == [Point(1, 8), Point(1, 12)]


def test_older_points_are_freed_once_all_stages_have_replicated_point():
    keep_messages = []
    safe_points = []

    async def coordinate(mailbox):
        store = ReplicaStore(mailbox)
        layout = []
        for unit, name in enumerate(DEVICES):
            layout.append(Assignment(device=name, start=unit, stop=unit + 1, memory=0))
        supervisor = SimpleNamespace(
            mailbox=mailbox,
            device=mailbox.device,
            membership=SimpleNamespace(assigned=frozenset(DEVICES)),
            layout=layout,
        )
        points = ReplicaIndex(supervisor, store, 2)
        points.branch(0)
        for unit in (0, 1):
            store.replicas.put(Point(1, 8), state_of(unit), [unit])
        mailbox.post("coordinator", REPLICATED)
        safe_points.append(points.safe_point)
        # The greeting makes the keeper report its replication too.
        await mailbox.post("keeper", Hello(0.0))
        await mailbox.device.sleep(1)
        safe_points.append(points.safe_point)
        assert points.has_all_units(8)
        assert sorted(points.weights()) == ["0.weight", "1.weight"]

    def prepare(mailbox):
        def on_keep(message):
            keep_messages.append([tuple(point) for point in message.keep])

        mailbox.on(Hello, lambda _: mailbox.post("coordinator", REPLICATED))
        mailbox.on(Keep, on_keep)

    run_with_store(coordinate, prepare)
    assert safe_points == [BEGINNING, Point(1, 8)]
    assert keep_messages == [[(1, 8)]]
