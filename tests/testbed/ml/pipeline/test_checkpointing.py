"""Checkpoints are put together unit by unit, and after a loss those that are there go on from the last one."""

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


def test_checkpoint_is_complete_with_its_last_unit():
    collector = Collector(2)
    early, late = {"0.w": torch.tensor(1.0)}, {"1.w": torch.tensor(2.0)}
    assert collector.add(4, 1, late) is None
    assert collector.add(8, 1, late) is None
    assert collector.add(4, 1, late) is None
    done = collector.add(4, 0, early)
    assert done is not None
    assert done.step == 4
    assert done.state == early | late
    collector.clear()
    assert collector.add(8, 0, early) is None


def test_older_checkpoint_is_dropped_when_a_newer_one_is_complete():
    collector = Collector(2)
    collector.add(4, 0, {})
    collector.add(8, 0, {})
    assert collector.add(8, 1, {}).step == 8
    assert collector.add(4, 1, {}) is None


NAMES = ("lead", "one", "two")


def plan_over(names):
    """A unit for each device; two devices are the least."""
    if len(names) < 2:
        raise InputError("it takes two devices")
    order = [name for name in NAMES if name in names]
    return [
        Assignment(device=name, start=at, stop=at + 1, memory=0)
        for at, name in enumerate(order)
    ]


class Stage:
    computing = True
    actions = 1

    async def prepare(self):
        pass

    async def serve(self):
        pass


def recovering(lead, faults=(), window=2.0):
    """Run ``lead`` with a policy over three devices; return who was configured, in turn, and with which state."""
    configured = []

    async def run_device(device):
        async with Mailbox(device, {}, SYNCHRONOUS_KINDS) as mailbox:
            holder = RoleHolder(mailbox, "lead")

            def role_of(configure):
                configured.append(
                    (device.name, configure.given, sorted(configure.state))
                )
                return Stage()

            holder.follow(Configure, role_of)
            if device.name != "lead":
                await holder.serve()
            timeouts = Timeouts(
                stall_timeout=1, rejoin_timeout=window, standstill=3, startup=1
            )
            problem = SimpleNamespace(
                devices=[SimpleNamespace(name=name) for name in NAMES]
            )
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

            policy = CheckpointRecovery(supervisor, configure, plan_over, 2, None)
            supervisor.start(plan_over(NAMES))
            await policy.establish()
            await lead(policy, supervisor)

    simulate_programs(dict.fromkeys(NAMES, run_device), faults=faults)
    return configured


async def checkpoint(policy, supervisor):
    """Complete a checkpoint of step 4."""
    for unit in (0, 1):
        state = {f"{unit}.w": torch.tensor(float(unit))}
        supervisor.mailbox.post(
            "lead", UnitState(supervisor.mailbox.configuration, 4, unit, state)
        )
    assert policy.checkpoint.step == 4


async def lose(supervisor):
    with pytest.raises(Lost) as raised:
        await supervisor.until(lambda: False)
    return raised.value


def test_those_left_go_on_from_the_last_checkpoint():
    async def lead(policy, supervisor):
        await checkpoint(policy, supervisor)
        await policy.recover(await lose(supervisor), 6)
        await policy.establish()
        assert [part.device for part in supervisor.layout] == ["lead", "one"]

    configured = recovering(lead, [{"kill": "two", "at": "1s"}])
    assert sorted(configured[:3]) == [(name, False, []) for name in NAMES]
    assert sorted(configured[3:]) == [
        (name, True, ["0.w", "1.w"]) for name in ("lead", "one")
    ]


def test_a_device_that_is_back_in_time_has_its_part_again():
    async def lead(policy, supervisor):
        await policy.recover(await lose(supervisor), 0)
        await policy.establish()

    configured = recovering(
        lead, [{"kill": "two", "at": "1s", "for": "100ms"}], window=9
    )
    assert sorted(name for name, *_ in configured[3:]) == [*NAMES]


def test_a_device_that_comes_later_is_taken_in_at_a_checkpoint():
    async def lead(policy, supervisor):
        await policy.recover(await lose(supervisor), 0)
        await policy.establish()
        while not supervisor.membership.joiners:
            await supervisor.mailbox.changed()
        await checkpoint(policy, supervisor)
        await policy.admit_joiners()
        assert [part.device for part in supervisor.layout] == [*NAMES]

    configured = recovering(lead, [{"kill": "two", "at": "1s", "for": "8s"}])
    assert sorted(configured[5:]) == [(name, True, ["0.w", "1.w"]) for name in NAMES]


def test_too_few_devices_end_the_run_with_a_reason():
    async def lead(policy, supervisor):
        await policy.recover(await lose(supervisor), 0)

    with pytest.raises(TestbedError, match="not enough devices: it takes two devices"):
        recovering(lead, [{"kill": name, "at": "1s"} for name in ("one", "two")])
