"""Waiting for others, and the three ways in which it turns out to be in vain."""

import pytest

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import MEMBERSHIP_KINDS, Presence, Status
from testbed.kits.messaging.supervision import Lost, Supervisor, Timeouts
from testbed.plan import Piece
from tests.helpers.simulated import simulate

NAMES = ("lead", "one", "two")
PARTS = [Piece(device=name, first=index, last=index + 1, memory=0) for index, name in enumerate(NAMES)]


class Problem:
    class Device:
        def __init__(self, name):
            self.name = name

    devices = tuple(map(Device, NAMES))


def supervised(lead, status=lambda mailbox: Status(mailbox.configuration), faults=(), patience=1):
    async def coordinate(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            timeouts = Timeouts(patience=patience, return_window=5, standstill=3, startup=1)
            presence = Presence(mailbox, "lead", lambda: Status(mailbox.configuration))
            supervisor = Supervisor(mailbox, presence, Problem, timeouts, lambda part: 0)
            supervisor.start(PARTS)
            await lead(supervisor)

    async def answer(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            mailbox.open(1)
            Presence(mailbox, "lead", lambda: status(mailbox)).greet()
            while True:
                await mailbox.changed()

    return simulate({"lead": coordinate, "one": answer, "two": answer}, faults=faults)


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


def test_silent_device_is_lost_after_its_patience():
    when, error = lost(lambda lead: supervised(lead, faults=[{"kill": "two", "at": "500ms"}]))
    assert error.missing == ["two"]
    assert not error.cut
    assert 2 <= when < 2.5  # of waiting, and of asking


def test_restarted_device_is_lost_as_soon_as_it_greets():
    faults = [{"kill": "two", "at": "500ms", "for": "100ms"}]
    when, error = lost(lambda lead: supervised(lead, faults=faults, patience=9))
    assert error.back == {"two"}
    assert when == pytest.approx(2.61, abs=0.01)  # it takes 2 s to boot


def test_device_without_its_role_is_lost():
    _, error = lost(lambda lead: supervised(lead, lambda mailbox: Status(0)))
    assert error.missing == ["one", "two"]


def test_standstill_is_noticed_though_all_answer():
    when, error = lost(lambda lead: supervised(lead))
    assert str(error) == "nothing moves"
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
        for patience in (2, 4, 8, 8):
            supervisor.learn_patience(Lost(["one"]), {"one": 0.0})
            assert supervisor.patience == patience
        supervisor.learn_patience(Lost(["one"]), {"one": 0.5})  # it started again, so it was not slow

    supervised(lead)
