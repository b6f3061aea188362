"""Tests of checkpoints that are collected unit by unit, and of recovery from the last one."""

from types import SimpleNamespace

import pytest
import torch

from testbed.common.errors import InputError, TestbedError
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import RoleHolder
from testbed.messaging.supervision import Lost, Supervisor, Timeouts
from testbed.ml.pipeline.checkpointing import CheckpointRecovery, Collector
from testbed.ml.pipeline.messages import SYNCHRONOUS_KINDS, Configure, UnitState
from testbed.plan import Assignment
from tests.helpers.simulated_programs import simulate_programs


def test_checkpoint_is_complete_with_last_unit():
    collector = Collector(2)
    first_unit = {"0.w": torch.tensor(1.0)}
    second_unit = {"1.w": torch.tensor(2.0)}
    assert collector.add(4, 1, second_unit) is None
    assert collector.add(8, 1, second_unit) is None
    # A repeated unit does not complete the checkpoint.
    assert collector.add(4, 1, second_unit) is None
    checkpoint = collector.add(4, 0, first_unit)
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert checkpoint.state == first_unit | second_unit
    collector.clear()
    assert collector.add(8, 0, first_unit) is None


def test_older_checkpoint_is_dropped_when_newer_one_is_complete():
    collector = Collector(2)
    collector.add(4, 0, {})
    collector.add(8, 0, {})
    assert collector.add(8, 1, {}).step == 8
    assert collector.add(4, 1, {}) is None


NAMES = ("coordinator", "one", "two")


def assign_units(names):
    """Assign a unit to each device; raise `InputError` for fewer than two devices."""
    if len(names) < 2:
        raise InputError("it takes two devices")
    order = [name for name in NAMES if name in names]
    assignments = []
    for unit, name in enumerate(order):
        assignments.append(Assignment(device=name, start=unit, stop=unit + 1, memory=0))
    return assignments


class IdleStage:
    """A stage without computations, which is never stalled."""

    computing = True
    actions = 1

    async def prepare(self):
        pass

    async def serve(self):
        pass


def run_recovery(coordinate, faults=(), rejoin_timeout=2.0):
    """Run ``coordinate`` with a recovery policy over three devices.

    Return the configured devices in order: name, whether a state was given, and the names in the state.
    """
    configured = []

    async def run_device(device):
        async with Mailbox(device, {}, SYNCHRONOUS_KINDS) as mailbox:
            holder = RoleHolder(mailbox, "coordinator")

            def role_of(message):
                state_names = sorted(message.state)
                configured.append((device.name, message.given, state_names))
                return IdleStage()

            holder.follow(Configure, role_of)
            if device.name != "coordinator":
                await holder.serve()
            timeouts = Timeouts(
                stall_timeout=1,
                rejoin_timeout=rejoin_timeout,
                standstill=3,
                startup=1,
            )
            devices = [SimpleNamespace(name=name) for name in NAMES]
            problem = SimpleNamespace(devices=devices)
            supervisor = Supervisor(
                mailbox, holder.presence, problem, timeouts, lambda part: 0
            )

            def configure(part, state):
                return Configure(
                    mailbox.configuration,
                    supervisor.stages,
                    10,
                    state is not None,
                    state or {},
                )

            policy = CheckpointRecovery(supervisor, configure, assign_units, 2, None)
            supervisor.start(assign_units(NAMES))
            await policy.establish()
            await coordinate(policy, supervisor)

    simulate_programs(dict.fromkeys(NAMES, run_device), faults=faults)
    return configured


async def complete_checkpoint(policy, supervisor):
    """Complete a checkpoint of step 4."""
    configuration = supervisor.mailbox.configuration
    for unit in (0, 1):
        state = {f"{unit}.w": torch.tensor(float(unit))}
        message = UnitState(configuration, step=4, unit=unit, state=state)
        supervisor.mailbox.post("coordinator", message)
    assert policy.checkpoint.step == 4


async def wait_for_loss(supervisor):
    with pytest.raises(Lost) as raised:
        await supervisor.until(lambda: False)
    return raised.value


def stage_names(supervisor):
    return [part.device for part in supervisor.layout]


def test_remaining_devices_resume_from_last_checkpoint():
    async def coordinate(policy, supervisor):
        await complete_checkpoint(policy, supervisor)
        await policy.recover(await wait_for_loss(supervisor), 6)
        await policy.establish()
        assert stage_names(supervisor) == ["coordinator", "one"]

    configured = run_recovery(coordinate, [{"kill": "two", "at": "1s"}])
    # First all three from the seed, then the remaining two from the checkpoint.
    assert sorted(configured[:3]) == [(name, False, []) for name in NAMES]
    state = ["0.w", "1.w"]
    remaining = ("coordinator", "one")
    assert sorted(configured[3:]) == [(name, True, state) for name in remaining]


def test_device_returning_within_rejoin_timeout_keeps_its_units():
    async def coordinate(policy, supervisor):
        await policy.recover(await wait_for_loss(supervisor), 0)
        await policy.establish()

    fault = {"kill": "two", "at": "1s", "for": "100ms"}
    # The coordinator waits for the device, although two would be enough.
    configured = run_recovery(coordinate, [fault], rejoin_timeout=9)
    assert sorted(name for name, *_ in configured[3:]) == [*NAMES]


def test_device_returning_later_joins_at_checkpoint():
    async def coordinate(policy, supervisor):
        await policy.recover(await wait_for_loss(supervisor), 0)
        await policy.establish()
        while not supervisor.membership.joiners:
            await supervisor.mailbox.changed()
        await complete_checkpoint(policy, supervisor)
        await policy.admit_joiners()
        assert stage_names(supervisor) == [*NAMES]

    # Longer than the rejoin timeout of 2 s, so the other two devices continue first.
    fault = {"kill": "two", "at": "1s", "for": "8s"}
    configured = run_recovery(coordinate, [fault])
    # After three devices, and then the remaining two.
    state = ["0.w", "1.w"]
    assert sorted(configured[5:]) == [(name, True, state) for name in NAMES]


def test_too_few_devices_fail_run_with_reason_of_planner():
    async def coordinate(policy, supervisor):
        await policy.recover(await wait_for_loss(supervisor), 0)

    faults = [{"kill": name, "at": "1s"} for name in ("one", "two")]
    with pytest.raises(TestbedError, match="not enough devices: it takes two devices"):
        run_recovery(coordinate, faults)
