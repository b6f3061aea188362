"""Failure detection while waiting for devices, and the loop that recovers from failures."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import OVERDUE_FACTOR, Mailbox
from testbed.messaging.membership import MEMBERSHIP_KINDS, Presence, Status
from testbed.messaging.supervision import (
    MAX_ARRIVING_FACTOR,
    MAX_RETRIES,
    MAX_RETRIES_WITH_LOST,
    Lost,
    Supervisor,
    Timeouts,
    run_with_recovery,
)
from testbed.messaging.typed_messages import ConfigurationMessage
from testbed.network.link import Link
from testbed.plan import Assignment
from testbed.wire.message import size_around
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.worlds import LINK

NAMES = ("coordinator", "one", "two")
LAYOUT = [
    Assignment(device=name, start=index, stop=index + 1, memory=0)
    for index, name in enumerate(NAMES)
]
PROBLEM = SimpleNamespace(devices=[SimpleNamespace(name=name) for name in NAMES])
"""The part of a planning problem that a supervisor reads."""


def report_role(mailbox):
    return Status(holds=mailbox.configuration)


def run_supervisor(supervise, status=report_role, faults=(), stall_timeout=1):
    """Run a function of a supervisor beside two devices with a given status in replies to probes."""

    async def coordinate(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            timeouts = Timeouts(
                stall_timeout=stall_timeout, rejoin_timeout=5, standstill=3, startup=1
            )
            presence = Presence(mailbox, "coordinator", lambda: report_role(mailbox))
            supervisor = Supervisor(
                mailbox, presence, PROBLEM, timeouts, backlog=lambda part: 0
            )
            supervisor.start(LAYOUT)
            await supervise(supervisor)

    async def answer_probes(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            # The supervisor opens configuration 1 at time 0.
            mailbox.open(1)
            Presence(mailbox, "coordinator", lambda: status(mailbox)).greet()
            while True:
                await mailbox.changed()

    programs = {"coordinator": coordinate, "one": answer_probes, "two": answer_probes}
    return simulate_programs(programs, faults=faults)


def wait_for_loss(**options):
    """Wait for a condition that is never true; return the time of the loss and the exception."""
    losses = []

    async def supervise(supervisor):
        try:
            await supervisor.until(lambda: False)
        except Lost as error:
            losses.append((supervisor.device.now(), error))

    run_supervisor(supervise, **options)
    ((time, error),) = losses
    return time, error


def test_silent_device_is_lost_after_stall_timeout():
    time, error = wait_for_loss(faults=[{"kill": "two", "at": "500ms"}])
    assert error.missing == ["two"]
    assert not error.unreachable
    # A second without news, and a second without a reply to the probe.
    assert 2 <= time < 2.5


@dataclass(frozen=True)
class State(ConfigurationMessage, kind="state"):
    """A large message of a role."""

    tensor: torch.Tensor


def time_of_loss_while_sending(rate, faults=()):
    """Return when a device is lost while sending 1 MB over a link of ``rate`` bit/s; None without a loss.

    The planned rate is 1 MB/s.
    """
    kinds = (*MEMBERSHIP_KINDS, State)
    planned_links = {("coordinator", "one"): LINK, ("one", "coordinator"): LINK}
    loss_times = []

    async def receive_state(device):
        async with Mailbox(device, planned_links, kinds) as mailbox:
            timeouts = Timeouts(
                stall_timeout=1, rejoin_timeout=5, standstill=3, startup=1
            )
            presence = Presence(mailbox, "coordinator", Status)
            supervisor = Supervisor(
                mailbox, presence, PROBLEM, timeouts, backlog=lambda part: 1e6
            )
            supervisor.start(LAYOUT[:2])
            try:
                await supervisor.take(State)
            except Lost:
                loss_times.append(device.now())

    async def send_state(device):
        async with Mailbox(device, planned_links, kinds) as mailbox:
            mailbox.open(1)
            Presence(mailbox, "coordinator", lambda: Status(holds=1))
            # 250,000 values of four bytes.
            await mailbox.post("coordinator", State(1, torch.zeros(250_000)))
            await device.receive()

    simulate_programs(
        {"coordinator": receive_state, "one": send_state},
        link=Link(rate=rate, delay=0.01),
        faults=faults,
    )
    return loss_times[0] if loss_times else None


SLOW_RATE = 8e6 / 7
"""A seventh of the planned rate in bit/s, within the eight times that an arriving message may take."""


def test_device_is_waited_for_while_message_arrives_slowly():
    assert time_of_loss_while_sending(SLOW_RATE) is None


def test_device_killed_while_sending_is_lost_after_allowed_time():
    faults = [{"kill": "one", "at": "2s"}]
    # A second without news, a second for the reply, and twice the planned second for the message before it.
    expected = 1 + 1 + OVERDUE_FACTOR * 1
    loss_time = time_of_loss_while_sending(SLOW_RATE, faults)
    assert loss_time == pytest.approx(expected, abs=0.5)


def test_device_is_lost_while_message_arrives_too_slowly():
    planned = LINK.transmission_time(size_around(1e6)) + 2 * LINK.delay
    # A second without news, a second for the reply, and the longest time for the message.
    expected = 1 + 1 + MAX_ARRIVING_FACTOR * OVERDUE_FACTOR * planned
    assert time_of_loss_while_sending(8e3) == pytest.approx(expected, abs=0.1)


def test_restarted_device_is_lost_on_greeting():
    faults = [{"kill": "two", "at": "500ms", "for": "100ms"}]
    time, error = wait_for_loss(faults=faults, stall_timeout=9)
    assert error.restarted == {"two"}
    # 0.6 s until the restart, 2 s of booting, and the delay of the greeting.
    assert time == pytest.approx(2.61, abs=0.01)


def test_device_without_assigned_role_is_lost():
    _, error = wait_for_loss(status=lambda mailbox: Status(holds=0))
    assert error.missing == ["one", "two"]


def test_standstill_is_detected_although_all_devices_reply():
    time, error = wait_for_loss()
    assert str(error) == "no progress"
    # The first probe after a second starts the three seconds of a standstill; probes follow each second.
    assert 4 <= time < 6


def test_computing_device_is_waited_for():
    async def supervise(supervisor):
        await supervisor.until(lambda: supervisor.device.now() > 20)

    run_supervisor(
        supervise, lambda mailbox: Status(mailbox.configuration, 0, computing=True)
    )


def test_slow_device_increases_stall_timeout_up_to_maximum():
    async def supervise(supervisor):
        supervisor.membership.answers["one"] = None
        supervisor.membership.present["one"] = 0.0
        # It doubles with each loss, up to eight times the configured second.
        for stall_timeout in (2, 4, 8, 8):
            supervisor.learn_stall_timeout(Lost(["one"]), {"one": 0.0})
            assert supervisor.stall_timeout == stall_timeout

    run_supervisor(supervise)


def test_restarted_device_does_not_increase_stall_timeout():
    async def supervise(supervisor):
        supervisor.membership.answers["one"] = None
        supervisor.membership.present["one"] = 0.0
        # Another incarnation than at the assignment of roles means a restart.
        supervisor.learn_stall_timeout(Lost(["one"]), {"one": 0.5})
        assert supervisor.stall_timeout == 1

    run_supervisor(supervise)


class ScriptedRecovery:
    """Work and recovery policy in one; each run of the work ends with the next outcome, and calls are recorded.

    An outcome is an exception, or a number of completed tasks before the exception that follows.
    """

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


def lose_device_one(times):
    return [Lost(["one"]) for _ in range(times)]


def test_work_resumes_after_loss():
    script = ScriptedRecovery(Lost(["one"]))
    script.run_with_recovery()
    recovery = ("recover", ["one"], 5)
    assert script.calls == ["establish", recovery, "establish", "resumed"]
    assert not script.excluded


def test_losses_and_recoveries_are_logged(caplog):
    caplog.set_level(logging.INFO, "testbed.messaging.supervision")
    ScriptedRecovery(Lost(["one"])).run_with_recovery()
    assert caplog.messages == [
        "lost: one; recovering from 5",
        "recovered: resuming at 5 with []",
    ]


def test_device_without_contact_to_neighbour_is_excluded():
    script = ScriptedRecovery(Lost(["one", "two"], unreachable=["two"]))
    script.run_with_recovery()
    assert script.excluded == {"two"}


def test_repeatedly_lost_device_is_excluded():
    script = ScriptedRecovery(*lose_device_one(MAX_RETRIES_WITH_LOST))
    script.run_with_recovery()
    assert script.excluded == {"one"}


def test_run_fails_after_too_many_recoveries_without_progress():
    script = ScriptedRecovery(*lose_device_one(MAX_RETRIES))
    with pytest.raises(
        TestbedError,
        match=r"20 consecutive recoveries .*last: one.*raise method.stall_timeout",
    ):
        script.run_with_recovery()


def test_progress_resets_count_of_recoveries():
    outcomes = []
    for loss in lose_device_one(2 * MAX_RETRIES):
        outcomes += [1, loss]
    script = ScriptedRecovery(*outcomes)
    script.run_with_recovery()
    assert not script.excluded
