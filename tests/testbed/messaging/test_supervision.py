"""Waiting for others, and the three ways in which it turns out to be in vain."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import SLACK, Mailbox
from testbed.messaging.membership import MEMBERSHIP_KINDS, Presence, Status
from testbed.messaging.supervision import (
    MAX_RETRIES,
    MAX_RETRIES_WITH_LOST,
    MOST_ARRIVING,
    Lost,
    Supervisor,
    Timeouts,
    run_with_recovery,
)
from testbed.messaging.typed_messages import ConfigurationMessage
from testbed.network.link import Link
from testbed.plan import Assignment
from testbed.wire.message import size_around
from tests.helpers.simulated import LINK, simulate_programs

NAMES = ("lead", "one", "two")
PARTS = [
    Assignment(device=name, start=index, stop=index + 1, memory=0)
    for index, name in enumerate(NAMES)
]


class PlanningProblem:
    class Device:
        def __init__(self, name):
            self.name = name

    devices = tuple(map(Device, NAMES))


def supervised(
    lead,
    status=lambda mailbox: Status(mailbox.configuration),
    faults=(),
    stall_timeout=1,
):
    async def coordinate(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            timeouts = Timeouts(
                stall_timeout=stall_timeout, rejoin_timeout=5, standstill=3, startup=1
            )
            presence = Presence(mailbox, "lead", lambda: Status(mailbox.configuration))
            supervisor = Supervisor(
                mailbox, presence, PlanningProblem, timeouts, lambda part: 0
            )
            supervisor.start(PARTS)
            await lead(supervisor)

    async def answer(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            mailbox.open(1)
            Presence(mailbox, "lead", lambda: status(mailbox)).greet()
            while True:
                await mailbox.changed()

    return simulate_programs(
        {"lead": coordinate, "one": answer, "two": answer}, faults=faults
    )


async def wait_in_vain(supervisor):
    await supervisor.until(lambda: False)


def lost(outcome):
    found = []

    async def lead(supervisor):
        try:
            await wait_in_vain(supervisor)
        except Lost as error:
            found.append((supervisor.device.now(), error))

    outcome(lead)
    ((when, error),) = found
    return when, error


def test_silent_device_is_lost_after_its_stall_timeout():
    when, error = lost(
        lambda lead: supervised(lead, faults=[{"kill": "two", "at": "500ms"}])
    )
    assert error.missing == ["two"]
    assert not error.cut
    assert 2 <= when < 2.5  # of waiting, and of asking


@dataclass(frozen=True)
class State(ConfigurationMessage, kind="state"):
    """A large message of the role."""

    tensor: torch.Tensor


def seconds_until_lost(rate, faults=()):
    """Return when a device counts as lost that sends 1 MB where a link of 1 MB/s is planned; None: it never does."""
    kinds, planned = (
        (*MEMBERSHIP_KINDS, State),
        dict.fromkeys((("lead", "one"), ("one", "lead")), LINK),
    )
    found = []

    async def coordinate(device):
        async with Mailbox(device, planned, kinds) as mailbox:
            timeouts = Timeouts(
                stall_timeout=1, rejoin_timeout=5, standstill=3, startup=1
            )
            presence = Presence(mailbox, "lead", Status)
            supervisor = Supervisor(
                mailbox, presence, PlanningProblem, timeouts, lambda part: 1e6
            )
            supervisor.start(PARTS[:2])
            try:
                await supervisor.take(State)
            except Lost:
                found.append(device.now())

    async def send(device):
        async with Mailbox(device, planned, kinds) as mailbox:
            mailbox.open(1)
            Presence(mailbox, "lead", lambda: Status(1))
            await mailbox.post("lead", State(1, torch.zeros(250_000)))
            await device.receive()

    simulate_programs(
        {"lead": coordinate, "one": send},
        link=Link(rate=rate, delay=0.01),
        faults=faults,
    )
    return found[0] if found else None


def test_a_device_whose_message_arrives_later_than_planned_is_waited_for():
    assert seconds_until_lost(8e6 / 7) is None


def test_a_device_that_dies_while_its_message_arrives_is_lost_when_its_time_is_over():
    assert seconds_until_lost(8e6 / 7, [{"kill": "one", "at": "2s"}]) == pytest.approx(
        4, abs=0.5
    )


def test_a_device_whose_message_hardly_arrives_is_lost():
    planned = LINK.transmission_time(size_around(1e6)) + 2 * LINK.delay
    waited, asked = 1, 1
    assert seconds_until_lost(8e3) == pytest.approx(
        waited + asked + MOST_ARRIVING * SLACK * planned, abs=0.1
    )


def test_restarted_device_is_lost_as_soon_as_it_greets():
    faults = [{"kill": "two", "at": "500ms", "for": "100ms"}]
    when, error = lost(lambda lead: supervised(lead, faults=faults, stall_timeout=9))
    assert error.back == {"two"}
    assert when == pytest.approx(2.61, abs=0.01)  # it takes 2 s to boot


def test_device_without_its_role_is_lost():
    _, error = lost(lambda lead: supervised(lead, lambda mailbox: Status(0)))
    assert error.missing == ["one", "two"]


def test_standstill_is_detected_although_all_answer():
    when, error = lost(lambda lead: supervised(lead))
    assert str(error) == "no progress"
    assert 4 <= when < 6


def test_computing_device_is_waited_for():
    async def lead(supervisor):
        await supervisor.until(lambda: supervisor.device.now() > 20)

    async def tick(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            mailbox.open(1)
            presence = Presence(mailbox, "lead", lambda: Status(1, 0, True))
            while True:
                await device.sleep(10)
                presence.greet()

    supervised(lead, lambda mailbox: Status(mailbox.configuration, 0, True))


def test_slow_device_makes_it_more_patient():
    async def lead(supervisor):
        supervisor.membership.answers["one"] = None
        supervisor.membership.present["one"] = 0.0
        for stall_timeout in (2, 4, 8, 8):
            supervisor.learn_stall_timeout(Lost(["one"]), {"one": 0.0})
            assert supervisor.stall_timeout == stall_timeout
        supervisor.learn_stall_timeout(
            Lost(["one"]), {"one": 0.5}
        )  # it started again, so it was not slow

    supervised(lead)


class Plan:
    """A work and a recovery that note what is asked of them; each run of the work ends as the next outcome says."""

    start = 5

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.calls = []
        self.excluded = set()
        self.supervisor = SimpleNamespace(
            progress=0,
            stages=[],
            device=SimpleNamespace(
                record=lambda event, **fields: self.calls.append(fields["phase"])
            ),
            membership=SimpleNamespace(exclude=self.excluded.update),
        )

    async def run(self):
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, int):
            self.supervisor.progress += outcome
            outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def establish(self):
        self.calls.append("establish")

    async def recover(self, lost, start):
        self.calls.append(("recover", lost.missing, start))

    def run_with_recovery(self):
        asyncio.run(run_with_recovery(self, self, self.supervisor))


def test_work_resumes_after_a_loss():
    plan = Plan(Lost(["one"]))
    plan.run_with_recovery()
    assert plan.calls == ["establish", ("recover", ["one"], 5), "establish", "resumed"]
    assert not plan.excluded


def test_losses_and_recoveries_are_logged(caplog):
    caplog.set_level(logging.INFO, "testbed.messaging.supervision")
    Plan(Lost(["one"])).run_with_recovery()
    assert caplog.messages == [
        "lost: one; recovering from 5",
        "recovered: resuming at 5 with []",
    ]


def test_devices_cut_off_are_left_out():
    plan = Plan(Lost(["one", "two"], ["two"]))
    plan.run_with_recovery()
    assert plan.excluded == {"two"}


def test_device_lost_again_and_again_is_left_out_though_it_answers():
    plan = Plan(*(Lost(["one"]) for _ in range(MAX_RETRIES_WITH_LOST)))
    plan.run_with_recovery()
    assert plan.excluded == {"one"}


def test_run_fails_after_recoveries_without_progress():
    plan = Plan(*(Lost(["one"]) for _ in range(MAX_RETRIES)))
    with pytest.raises(
        TestbedError,
        match=r"20 consecutive recoveries .*last: one.*raise method.stall_timeout",
    ):
        plan.run_with_recovery()


def test_progress_in_between_counts():
    outcomes = [
        outcome for _ in range(2 * MAX_RETRIES) for outcome in (1, Lost(["one"]))
    ]
    plan = Plan(*outcomes)
    plan.run_with_recovery()
    assert not plan.excluded
