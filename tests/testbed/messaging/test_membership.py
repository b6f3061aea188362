"""Who answers, who started again, who is silent: information, and nothing done about it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import (
    MEMBERSHIP_KINDS,
    Configured,
    Membership,
    Presence,
    RoleHolder,
    Status,
)
from testbed.messaging.typed_messages import TypedMessage
from testbed.wire.message import Message
from tests.helpers.simulated import LINK, simulate_programs

NAMES = ("lead", "one", "two")


def led(lead, status=Status, faults=()):
    """Run a coordinator's code beside two devices that answer."""

    async def coordinate(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            await lead(mailbox, Membership(mailbox, NAMES))

    async def answer(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            presence = Presence(mailbox, "lead", status)
            presence.greet()
            while True:
                await mailbox.changed()

    return simulate_programs(
        {"lead": coordinate, "one": answer, "two": answer}, faults=faults
    )


def test_devices_that_greet_are_present_and_may_join():
    async def lead(mailbox, members):
        members.assigned = frozenset({"one"})
        members.excluded = set()
        await mailbox.device.sleep(0.5)
        assert members.present == {"one": 0.0, "two": 0.0}
        assert members.joiners == {"two"}
        members.exclude(["two"])
        assert members.excluded == {"two"}

    world = led(lead)
    assert [event.fields["text"] for event in world.events if event.event == "log"] == [
        "two is excluded: it replies, but the other devices make no progress with it"
    ]


def test_answers_contain_the_status_of_a_device():
    async def lead(mailbox, members):
        mailbox.open(7)
        assert await members.ping_all({"one": 1.0, "two": 1.0}) == set()
        answer = members.answers["two"]
        assert (
            answer.configuration,
            answer.holds,
            answer.actions,
            answer.computing,
        ) == (7, 3, 9, True)
        assert answer.held == [[1, 2, [0]]]

    led(lead, lambda: Status(3, 9, True, ((1, 2, (0,)),)))


def test_silent_devices_are_named_at_the_deadline():
    async def lead(mailbox, members):
        await mailbox.device.sleep(0.5)
        assert await members.ping_all({"one": 1.0, "two": 1.0}) == {"one"}
        assert mailbox.device.now() == 1.5

    led(lead, faults=[{"kill": "one", "at": "200ms"}])


def test_restart_is_distinguished_from_a_slow_answer():
    async def lead(mailbox, members):
        await mailbox.device.sleep(0.5)
        members.mark_configured()
        await mailbox.device.sleep(5)
        assert members.restarted == {"one"}
        assert members.known["one"] == 0.0 < members.present["one"]
        members.mark_configured()
        assert members.restarted == set()
        mailbox.open(2)
        assert members.present == {}

    led(lead, faults=[{"kill": "one", "at": "1000ms", "for": "1000ms"}])


def test_a_cancelled_probe_takes_no_time_of_the_next_one():
    async def coordinate(device):
        links = {("lead", "one"): LINK, ("one", "lead"): LINK}
        async with Mailbox(device, links, MEMBERSHIP_KINDS) as mailbox:
            members = Membership(mailbox, ("lead", "one"))
            members.ask(["one"])
            due = mailbox.sends.due("one")
            members.ask(["one"])
            assert due > device.now()
            assert mailbox.sends.due("one") == due

    async def be_silent(device):
        await asyncio.get_running_loop().create_future()

    simulate_programs({"lead": coordinate, "one": be_silent})


def test_each_reason_against_joining_is_logged_once():
    async def lead(mailbox, members):
        for reason in ("a recovery is under way", "its units are another's"):
            members.refusal = reason
            for _ in range(2):
                await members.ping_all({"two": 1.0})

    world = led(lead)
    texts = [event.fields["text"] for event in world.events if event.event == "log"]
    assert [text for text in texts if text.startswith("two ")] == [
        "two cannot join: a recovery is under way",
        "two cannot join: its units are another's",
    ]


def test_gathering_waits_for_each_as_long_as_it_may_take():
    async def lead(mailbox, members):
        await mailbox.device.sleep(0.5)
        mailbox.open(2)
        await members.gather({"one": 1.0, "two": 3.0, "lead": 9.0})
        assert members.answers.keys() == {"two"}
        assert mailbox.device.now() == 1.0

    led(lead, faults=[{"kill": "one", "at": "200ms"}])


def test_ready_devices_are_known_until_the_next_configuration():
    async def lead(mailbox, members):
        mailbox.open(2)
        mailbox.post("lead", Configured(1, 0.0))
        assert members.ready == set()
        mailbox.post("lead", Configured(2, 0.0))
        assert members.ready == {"lead"}
        mailbox.open(3)
        assert members.ready == set()

    led(lead)


@dataclass(frozen=True)
class Be(TypedMessage, kind="be", opens=True):
    configuration: int
    what: str


class Noted:
    """A role that notes when it lives."""

    actions, computing = 7, False

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    async def prepare(self):
        self.notes.append(f"{self.name} prepares")

    async def serve(self):
        self.notes.append(f"{self.name} serves")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.notes.append(f"{self.name} ends")


def notes_of(lead):
    """Let ``lead`` tell one device what to be; return what its roles noted, and what it said of them."""
    notes, said = [], []

    async def coordinate(device):
        async with Mailbox(device, {}, (*MEMBERSHIP_KINDS, Be)) as mailbox:
            mailbox.on(
                Configured, lambda configured: said.append(configured.configuration)
            )
            await lead(mailbox)

    async def serve(device):
        async with Mailbox(device, {}, (*MEMBERSHIP_KINDS, Be)) as mailbox:
            holder = RoleHolder(mailbox, "lead")
            holder.follow(Be, lambda be: Noted(be.what, notes))
            await holder.serve()

    simulate_programs({"lead": coordinate, "one": serve})
    return notes, said


async def tell(mailbox, *roles):
    for configuration, what in roles:
        mailbox.open(configuration)
        await mailbox.post("one", Be(configuration, what))
    await mailbox.device.sleep(1)


def test_a_role_is_prepared_announced_and_served():
    notes, said = notes_of(lambda mailbox: tell(mailbox, (1, "stage")))
    assert notes[:2] == ["stage prepares", "stage serves"]
    assert said == [1]


def test_a_higher_configuration_ends_a_role_and_a_second_one_of_the_same_does_not():
    notes, said = notes_of(
        lambda mailbox: tell(mailbox, (1, "first"), (1, "late"), (2, "second"))
    )
    assert notes[:5] == [
        "first prepares",
        "first serves",
        "first ends",
        "second prepares",
        "second serves",
    ]
    assert said[-1] == 2


def test_a_role_that_sends_a_large_message_to_another_device_is_busy_while_it_may_take_so_long():
    answers = []

    async def coordinate(device):
        async with Mailbox(device, {}, MEMBERSHIP_KINDS) as mailbox:
            members = Membership(mailbox, NAMES)
            for _ in range(3):
                await device.sleep(1)
                await members.ping_all({"one": 1.0})
                answers.append(members.answers["one"].computing)

    async def serve(device):
        links = {("one", "two"): LINK, ("two", "one"): LINK}
        async with Mailbox(device, links, MEMBERSHIP_KINDS) as mailbox:
            holder = RoleHolder(mailbox, "lead")
            holder.assume(0, lambda: Noted("stage", []))
            mailbox.sends.post("two", Message("large", padding=1_200_000))
            await holder.serve()

    async def take(device):
        await device.receive()
        await device.receive()

    simulate_programs(
        {"lead": coordinate, "one": serve, "two": take},
        link=replace(LINK, rate=LINK.rate / 10),
    )
    assert answers == [True, True, False]
