"""A device has the role that it is told, for as long as its configuration lasts."""

import asyncio
from dataclasses import dataclass

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import MEMBERSHIP_KINDS, Configured
from testbed.kits.messaging.roles import RoleHolder
from testbed.kits.messaging.typed import Typed
from tests.helpers.simulated import simulate


@dataclass(frozen=True)
class Be(Typed, kind="be", opens=True):
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
            mailbox.on(Configured, lambda configured: said.append(configured.configuration))
            await lead(mailbox)

    async def serve(device):
        async with Mailbox(device, {}, (*MEMBERSHIP_KINDS, Be)) as mailbox:
            holder = RoleHolder(mailbox, "lead")
            holder.follow(Be, lambda be: Noted(be.what, notes))
            await holder.serve()

    simulate({"lead": coordinate, "one": serve})
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
    notes, said = notes_of(lambda mailbox: tell(mailbox, (1, "first"), (1, "late"), (2, "second")))
    assert notes[:5] == ["first prepares", "first serves", "first ends", "second prepares", "second serves"]
    assert said[-1] == 2
