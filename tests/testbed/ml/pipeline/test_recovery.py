"""Recovery from replicas, without any training: who is set up to be what, and where it goes on from."""

from types import SimpleNamespace

import pytest
import torch

from testbed.common.errors import InputError, TestbedError
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import RoleHolder, Status
from testbed.messaging.supervision import Lost, Supervisor, Timeouts
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.messages import ASYNCHRONOUS_KINDS, Commit, Prepare
from testbed.ml.pipeline.placement import Point, ReplicaStore
from testbed.ml.pipeline.recovery import ReplicaRecovery
from testbed.plan import Assignment
from tests.helpers.simulated_programs import simulate_programs

NAMES = ("lead", "one", "two")
UNITS = 3
STEPS = 100


def state_of(units):
    return {f"{unit}.weight": torch.full((2,), float(unit)) for unit in units}


class EvenPartitioner:
    """A unit for each device, the last ones' together where devices are missing; two devices are the least."""

    admits_devices = True

    def partition_for(self, names):
        if len(names) < 2:
            raise InputError("a pipeline has two stages")
        return StagePartition(tuple(names), (*range(len(names)), UNITS))

    def after_loss(self, old, there):
        return self.partition_for(there)

    def assignments(self, partition):
        ends = zip(partition.devices, partition.cuts, partition.cuts[1:], strict=False)
        return tuple(
            Assignment(device=name, start=first, stop=last, memory=0)
            for name, first, last in ends
        )


class Stage:
    """Gets on for as long as its device is on."""

    computing = True
    actions = 1

    async def prepare(self):
        pass

    async def serve(self):
        pass


def recovering(lead, faults=(), silent=(), window=4.0):
    """Run ``lead`` with a policy over three stages of a unit each; return it, and what the others were sent."""
    partitioner = EvenPartitioner()
    assignments = partitioner.assignments(partitioner.partition_for(NAMES))
    found = SimpleNamespace(prepared=[], committed=[])

    def take_part(mailbox):
        store = ReplicaStore(mailbox)

        def with_replicas(status):
            return Status(
                status.holds,
                status.actions,
                status.computing,
                store.replicas.inventory(),
            )

        holder = RoleHolder(mailbox, "lead", with_replicas)

        def role_of(prepare):
            found.prepared.append(
                (mailbox.device.name, prepare.step, prepare.seeded, prepare.fetch)
            )
            return Stage()

        holder.follow(Prepare, role_of)
        mailbox.on(Commit, lambda commit: found.committed.append(mailbox.device.name))
        return holder, store

    async def coordinate(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            holder, store = take_part(mailbox)
            timeouts = Timeouts(
                stall_timeout=1, rejoin_timeout=window, standstill=3, startup=1
            )
            specs = tuple(SimpleNamespace(name=name) for name in NAMES)
            problem = SimpleNamespace(
                devices=specs,
                model=SimpleNamespace(units=range(UNITS)),
                options=SimpleNamespace(
                    join_timeout=2.0,
                    redistribution="local-first",
                    resume="last-replica",
                ),
            )
            supervisor = Supervisor(
                mailbox, holder.presence, problem, timeouts, lambda part: 0
            )
            context = SimpleNamespace(
                problem=problem,
                plan=SimpleNamespace(assignments=assignments),
                weights=None,
            )
            found.policy = ReplicaRecovery(
                supervisor, store, partitioner, context, STEPS
            )
            found.supervisor, found.replicas = supervisor, store.replicas
            await lead(found)

    async def serve(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            if device.name in silent:
                await device.sleep(1000)
            holder, _ = take_part(mailbox)
            await holder.serve()

    programs = {"lead": coordinate, "one": serve, "two": serve}
    found.world = simulate_programs(programs, faults=faults)
    return found


async def begin(run):
    await run.policy.begin()
    await run.policy.establish()


async def lose(run):
    """Wait until somebody is lost; return that loss."""
    with pytest.raises(Lost) as raised:
        await run.supervisor.until(lambda: False)
    return raised.value


def phases(run, name):
    return [
        event.fields
        for event in run.world.events
        if event.event == "recovery" and event.fields["phase"] == name
    ]


def test_a_beginning_is_the_planned_partition_from_the_seed_and_committed_once_all_are_ready():
    async def lead(run):
        await begin(run)
        await run.supervisor.device.sleep(1)

    run = recovering(lead)
    assert run.policy.partition == StagePartition(NAMES, (0, 1, 2, 3))
    assert sorted(run.prepared) == [(name, 0, True, {}) for name in NAMES]
    assert sorted(run.committed) == sorted(NAMES)
    assert not run.policy.recovering


def test_a_device_that_does_not_answer_in_time_is_left_out_of_the_beginning():
    run = recovering(begin, silent=["one"])
    assert run.policy.partition == StagePartition(("lead", "two"), (0, 1, 3))
    assert {name for name, *_ in run.prepared} == {"lead", "two"}


def test_after_a_loss_the_others_go_on_from_the_newest_state_that_is_whole_and_fetch_what_they_lack():
    async def lead(run):
        await begin(run)
        configuration = run.supervisor.mailbox.configuration
        run.replicas.put(Point(configuration, 8), state_of(range(UNITS)), range(UNITS))
        run.replicas.put(
            Point(configuration, 12), state_of([0]), [0]
        )  # of the others' there is nothing
        run.supervisor.progress = 13
        await run.policy.recover(await lose(run), 13)
        await run.policy.establish()
        assert run.policy.start == 8

    run = recovering(lead, faults=[{"kill": "two", "at": "1s"}])
    assert run.policy.partition == StagePartition(("lead", "one"), (0, 1, 3))
    # The device that is left lacks both its units; the lead has all of them.
    assert ("one", 8, False, {"lead": [1, 2]}) in run.prepared
    (detected,) = phases(run, "detected")
    assert detected["missing"] == ["two"]
    (repartitioned,) = phases(run, "repartitioned")
    assert (repartitioned["case"], repartitioned["step"]) == ("redistribute", 8)


def test_without_a_replica_it_begins_again_from_the_seed():
    async def lead(run):
        await begin(run)
        await run.policy.recover(await lose(run), 5)
        await run.policy.establish()

    run = recovering(lead, faults=[{"kill": "two", "at": "1s"}])
    assert run.policy.start == 0
    assert ("one", 0, True, {}) in run.prepared[3:]


def test_a_device_that_comes_back_empty_within_the_window_keeps_its_units():
    async def lead(run):
        await begin(run)
        configuration = run.supervisor.mailbox.configuration
        run.replicas.put(Point(configuration, 8), state_of(range(UNITS)), range(UNITS))
        await run.policy.recover(await lose(run), 9)
        await run.policy.establish()

    run = recovering(
        lead, faults=[{"kill": "two", "at": "1s", "for": "100ms"}], window=9
    )
    assert run.policy.partition == StagePartition(NAMES, (0, 1, 2, 3))
    assert ("two", 8, False, {"lead": [2]}) in run.prepared
    (repartitioned,) = phases(run, "repartitioned")
    assert repartitioned["case"] == "refill"


def test_a_device_that_only_stood_still_goes_on_as_it_was():
    answers = []

    async def lead(run):
        await begin(run)
        lost = await lose(run)
        assert lost.missing == ["two"]
        answers.append(await run.policy.await_return(lost))

    run = recovering(lead, faults=[{"pause": "two", "at": "1s", "for": "4s"}])
    assert answers == [True]
    assert len(run.prepared) == 3  # nobody was set up again
    assert [fields["case"] for fields in phases(run, "repartitioned")] == ["restart"]


def test_a_device_that_died_does_not_go_on_as_it_was_though_it_is_there_again():
    answers = []

    async def lead(run):
        await begin(run)
        answers.append(await run.policy.await_return(await lose(run)))

    recovering(lead, faults=[{"kill": "two", "at": "1s", "for": "100ms"}])
    assert answers == [False]


def test_too_few_devices_end_the_run_with_a_reason():
    async def lead(run):
        await begin(run)
        await run.policy.recover(await lose(run), 1)

    faults = [{"kill": "one", "at": "1s"}, {"kill": "two", "at": "1s"}]
    with pytest.raises(
        TestbedError, match="not enough devices: a pipeline has two stages"
    ):
        recovering(lead, faults=faults, window=0)


def test_a_restarted_coordinator_goes_on_from_its_disk():
    steps = []

    async def lead(run):
        await run.policy.begin()
        steps.append(run.policy.start)
        await run.policy.establish()
        if len(steps) == 1:
            point = Point(run.supervisor.mailbox.configuration, 8)
            run.replicas.put(point, state_of(range(UNITS)), range(UNITS))
            await run.supervisor.device.save("replicas", run.replicas.dump())
            await run.supervisor.device.sleep(1000)

    run = recovering(lead, faults=[{"kill": "lead", "at": "3s", "for": "100ms"}])
    assert steps == [0, 8]
    assert [fields["missing"] for fields in phases(run, "detected")] == [["lead"]]
