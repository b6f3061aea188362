"""Tests of recovery from replicas, without any training: the stages that are set up, and the state they resume from."""

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

NAMES = ("coordinator", "one", "two")
UNITS = 3
STEPS = 100


def state_of(units):
    return {f"{unit}.weight": torch.full((2,), float(unit)) for unit in units}


class OneUnitPartitioner:
    """Assigns a unit to each device, and all remaining ones to the last device; needs at least two devices."""

    admits_devices = True

    def partition_for(self, names):
        if len(names) < 2:
            raise InputError("a pipeline has two stages")
        return StagePartition(tuple(names), (*range(len(names)), UNITS))

    def after_loss(self, old, there):
        return self.partition_for(there)

    def assignments(self, partition):
        assignments = []
        for name in partition.devices:
            units = partition.of(name)
            assignments.append(
                Assignment(device=name, start=units.start, stop=units.stop, memory=0)
            )
        return tuple(assignments)


class IdleStage:
    """A stage without computations, which is never stalled."""

    computing = True
    actions = 1

    async def prepare(self):
        pass

    async def serve(self):
        pass


def take_part(mailbox, run):
    """Answer the coordinator as a device with a replica store; note the coordinator's messages in ``run``."""
    store = ReplicaStore(mailbox)
    name = mailbox.device.name

    def with_replicas(status):
        inventory = store.replicas.inventory()
        return Status(status.holds, status.actions, status.computing, inventory)

    def role_of(message):
        run.prepared.append((name, message.step, message.seeded, message.fetch))
        return IdleStage()

    holder = RoleHolder(mailbox, "coordinator", with_replicas)
    holder.follow(Prepare, role_of)
    mailbox.on(Commit, lambda message: run.committed.append(name))
    return holder, store


def make_problem():
    return SimpleNamespace(
        devices=tuple(SimpleNamespace(name=name) for name in NAMES),
        model=SimpleNamespace(units=range(UNITS)),
        options=SimpleNamespace(
            join_timeout=2.0, redistribution="local-first", resume="last-replica"
        ),
    )


def run_recovery(coordinate, faults=(), silent=(), rejoin_timeout=4.0):
    """Run ``coordinate`` with a recovery policy over three stages of a unit each.

    Devices in ``silent`` never answer. Return the policy, the world, and the messages of all devices: (device, step,
    whether units come from the seed, units to fetch by source) of each preparation, and the device of each commit.
    """
    partitioner = OneUnitPartitioner()
    assignments = partitioner.assignments(partitioner.partition_for(NAMES))
    run = SimpleNamespace(prepared=[], committed=[])

    async def coordinator(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            holder, store = take_part(mailbox, run)
            timeouts = Timeouts(
                stall_timeout=1,
                rejoin_timeout=rejoin_timeout,
                standstill=3,
                startup=1,
            )
            problem = make_problem()
            supervisor = Supervisor(
                mailbox, holder.presence, problem, timeouts, lambda part: 0
            )
            plan = SimpleNamespace(assignments=assignments)
            context = SimpleNamespace(problem=problem, plan=plan, weights=None)
            run.policy = ReplicaRecovery(supervisor, store, partitioner, context, STEPS)
            run.supervisor = supervisor
            run.replicas = store.replicas
            await coordinate(run)

    async def worker(device):
        async with Mailbox(device, {}, ASYNCHRONOUS_KINDS) as mailbox:
            if device.name in silent:
                await device.sleep(1000)
            holder, _ = take_part(mailbox, run)
            await holder.serve()

    programs = {"coordinator": coordinator, "one": worker, "two": worker}
    run.world = simulate_programs(programs, faults=faults)
    return run


async def begin(run):
    await run.policy.begin()
    await run.policy.establish()


async def wait_for_loss(run):
    with pytest.raises(Lost) as raised:
        await run.supervisor.until(lambda: False)
    return raised.value


async def recover(run, step):
    """Wait for a loss, and recover from it after ``step`` batches."""
    await run.policy.recover(await wait_for_loss(run), step)
    await run.policy.establish()


def put_replicas(run, step, units):
    """Keep replicas of units after ``step`` batches on the coordinator."""
    point = Point(run.supervisor.mailbox.configuration, step)
    run.replicas.put(point, state_of(units), units)


def recovery_events(run, phase):
    fields_of_phase = []
    for event in run.world.events.of("recovery"):
        if event.fields["phase"] == phase:
            fields_of_phase.append(event.fields)
    return fields_of_phase


def test_planned_partition_begins_from_seed_and_is_committed_when_all_are_ready():
    async def coordinate(run):
        await begin(run)
        await run.supervisor.device.sleep(1)

    run = run_recovery(coordinate)
    assert run.policy.partition == StagePartition(NAMES, (0, 1, 2, 3))
    assert sorted(run.prepared) == [(name, 0, True, {}) for name in NAMES]
    assert sorted(run.committed) == sorted(NAMES)
    assert not run.policy.recovering


def test_device_not_answering_in_time_is_left_out_of_first_partition():
    # The coordinator waits for `join_timeout` and begins without the device.
    run = run_recovery(begin, silent=["one"])
    assert run.policy.partition == StagePartition(("coordinator", "two"), (0, 1, 3))
    assert {name for name, *_ in run.prepared} == {"coordinator", "two"}


def test_remaining_devices_resume_from_newest_complete_state_and_fetch_missing_units():
    async def coordinate(run):
        await begin(run)
        put_replicas(run, 8, range(UNITS))
        # After step 12 the units of the other devices are missing.
        put_replicas(run, 12, [0])
        run.supervisor.progress = 13
        await recover(run, 13)
        assert run.policy.start == 8

    run = run_recovery(coordinate, faults=[{"kill": "two", "at": "1s"}])
    assert run.policy.partition == StagePartition(("coordinator", "one"), (0, 1, 3))
    # The remaining device lacks both its units; the coordinator has all of them.
    assert ("one", 8, False, {"coordinator": [1, 2]}) in run.prepared
    (detected,) = recovery_events(run, "detected")
    assert detected["missing"] == ["two"]
    (repartitioned,) = recovery_events(run, "repartitioned")
    assert repartitioned["case"] == "redistribute"
    assert repartitioned["step"] == 8


def test_training_restarts_from_seed_without_replica():
    async def coordinate(run):
        await begin(run)
        await recover(run, 5)

    run = run_recovery(coordinate, faults=[{"kill": "two", "at": "1s"}])
    assert run.policy.start == 0
    # After the three preparations at the beginning.
    assert ("one", 0, True, {}) in run.prepared[3:]


def test_device_returning_without_memory_within_timeout_keeps_its_units():
    async def coordinate(run):
        await begin(run)
        put_replicas(run, 8, range(UNITS))
        await recover(run, 9)

    fault = {"kill": "two", "at": "1s", "for": "100ms"}
    # The coordinator waits for the device, although two would be enough for a pipeline.
    run = run_recovery(coordinate, faults=[fault], rejoin_timeout=9)
    assert run.policy.partition == StagePartition(NAMES, (0, 1, 2, 3))
    assert ("two", 8, False, {"coordinator": [2]}) in run.prepared
    (repartitioned,) = recovery_events(run, "repartitioned")
    assert repartitioned["case"] == "refill"


def test_paused_device_continues_with_its_memory():
    returned = []

    async def coordinate(run):
        await begin(run)
        lost = await wait_for_loss(run)
        assert lost.missing == ["two"]
        returned.append(await run.policy.await_return(lost))

    # Longer than the stall timeout of 1 s, so the coordinator misses the device.
    fault = {"pause": "two", "at": "1s", "for": "4s"}
    run = run_recovery(coordinate, faults=[fault])
    assert returned == [True]
    # No device was prepared again.
    assert len(run.prepared) == 3
    (repartitioned,) = recovery_events(run, "repartitioned")
    assert repartitioned["case"] == "restart"


def test_restarted_device_does_not_continue_with_its_memory():
    returned = []

    async def coordinate(run):
        await begin(run)
        returned.append(await run.policy.await_return(await wait_for_loss(run)))

    run_recovery(coordinate, faults=[{"kill": "two", "at": "1s", "for": "100ms"}])
    assert returned == [False]


def test_too_few_devices_fail_run_with_reason_of_partitioner():
    async def coordinate(run):
        await begin(run)
        await run.policy.recover(await wait_for_loss(run), 1)

    faults = [{"kill": "one", "at": "1s"}, {"kill": "two", "at": "1s"}]
    with pytest.raises(
        TestbedError, match="not enough devices: a pipeline has two stages"
    ):
        run_recovery(coordinate, faults=faults, rejoin_timeout=0)


def test_restarted_coordinator_resumes_from_its_disk():
    starts = []

    async def coordinate(run):
        await run.policy.begin()
        starts.append(run.policy.start)
        await run.policy.establish()
        # Only the first program writes replicas, and waits for the fault.
        if len(starts) == 1:
            put_replicas(run, 8, range(UNITS))
            await run.supervisor.device.save("replicas", run.replicas.dump())
            await run.supervisor.device.sleep(1000)

    fault = {"kill": "coordinator", "at": "3s", "for": "100ms"}
    run = run_recovery(coordinate, faults=[fault])
    assert starts == [0, 8]
    (detected,) = recovery_events(run, "detected")
    assert detected["missing"] == ["coordinator"]
