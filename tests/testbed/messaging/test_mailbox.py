"""Posting without waiting, taking with a deadline, and what becomes of old configurations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from testbed.messaging.mailbox import Mailbox, MailboxFullError, Tasks, transfer_time
from testbed.messaging.typed_messages import TypedMessage
from testbed.network.link import Link
from testbed.wire.message import Message, WireError
from tests.helpers.simulated import LINK, simulate_programs


@dataclass(frozen=True)
class Word(TypedMessage, kind="word", key=("number",)):
    configuration: int
    number: int


@dataclass(frozen=True)
class Shout(TypedMessage, kind="shout"):
    text: str


@dataclass(frozen=True)
class Opening(TypedMessage, kind="opening", opens=True):
    configuration: int


KINDS = (Word, Shout, Opening)


def talk(speak, listen, **options):
    """Run ``listen`` on the device that ends the run, ``speak`` on the other, each with a mailbox."""

    def program(of):
        async def run(device):
            async with Mailbox(device, {}, KINDS, **options) as mailbox:
                await of(mailbox)

        return run

    async def forever(mailbox):
        await speak(mailbox)
        await asyncio.get_running_loop().create_future()

    return simulate_programs({"ear": program(listen), "mouth": program(forever)})


async def count(mailbox):
    for number in range(3):
        mailbox.post("ear", Word(0, number))


def test_messages_are_taken_by_key_in_any_order():
    async def listen(mailbox):
        last = await mailbox.take(Word, 2)
        assert (last.number, last.sender) == (2, "mouth")
        assert (await mailbox.take(Word)).number == 0
        assert (await mailbox.take((Shout, Word))).number == 1
        assert not mailbox.holds(Word)

    talk(count, listen)


def test_take_returns_none_after_its_deadline():
    async def listen(mailbox):
        assert await mailbox.take(Word, 7, deadline=0.5) is None
        assert mailbox.device.now() == 0.5
        assert await mailbox.take(Word, 7, deadline=0.2) is None
        assert (
            await mailbox.take(Word, 1, deadline=0.2) is not None
        )  # it is here already
        waiting = asyncio.create_task(mailbox.take(Word, 9))
        await mailbox.device.sleep(1)
        assert not waiting.done()
        waiting.cancel()

    talk(count, listen)


def test_a_message_that_comes_too_late_can_be_dropped():
    async def speak(mailbox):
        for number in (4, 5):
            await mailbox.device.sleep(1)
            mailbox.post("ear", Word(0, number))

    async def listen(mailbox):
        assert await mailbox.take(Word, 4, deadline=0.5) is None
        mailbox.discard_before(Word, 5)
        assert (await mailbox.take(Word)).number == 5

    talk(speak, listen)


def test_peeking_leaves_the_message_there():
    async def listen(mailbox):
        assert (await mailbox.peek(Word)).number == 0
        assert (await mailbox.take(Word)).number == 0

    talk(count, listen)


def test_second_message_of_a_key_is_dropped():
    async def speak(mailbox):
        for text in ("a", "b"):
            mailbox.post("ear", Word(0, 1))
            mailbox.post("ear", Shout(text))

    async def listen(mailbox):
        await mailbox.device.sleep(1)
        assert mailbox.pop(Word, 1) is not None
        assert mailbox.pop(Word, 1) is None
        assert [mailbox.pop(Shout).text for _ in range(2)] == ["a", "b"]

    talk(speak, listen)


def test_cast_arrives_like_any_message():
    async def speak(mailbox):
        await mailbox.cast(["ear"], Word(0, 3))

    async def listen(mailbox):
        assert (await mailbox.take(Word, 3, deadline=1.0)).sender == "mouth"

    talk(speak, listen)


def test_handler_gets_every_message_of_its_kind():
    heard = []

    async def listen(mailbox):
        mailbox.on(Word, lambda word: heard.append(word.number))
        while len(heard) < 3:
            assert await mailbox.changed(1.0)
        assert not await mailbox.changed(1.0)

    talk(count, listen)
    assert heard == [0, 1, 2]


def test_only_messages_of_the_present_configuration_count():
    async def speak(mailbox):
        for configuration in (1, 2, 3):
            mailbox.post("ear", Word(configuration, configuration))

    async def listen(mailbox):
        mailbox.open(2)
        await mailbox.device.sleep(1)
        assert [mailbox.holds(Word, number) for number in (1, 2, 3)] == [
            False,
            True,
            False,
        ]
        assert mailbox.arrived == 1

    talk(speak, listen)


def test_newer_configuration_discards_older_state():
    opened = []

    async def speak(mailbox):
        mailbox.post("ear", Word(0, 1))
        mailbox.post("ear", Opening(5))
        mailbox.post("ear", Word(5, 1))

    async def listen(mailbox):
        mailbox.on(Opening, lambda opening: mailbox.open(opening.configuration))
        mailbox.on_open(lambda: opened.append(mailbox.configuration))
        lost = mailbox.post("mouth", Shout("never sent"))
        while not opened:
            await mailbox.changed()
        assert not mailbox.holds(Word, 1)
        mailbox.open(4)
        assert opened == [5]
        assert (await mailbox.take(Word, 1)).configuration == 5
        assert lost.done()

    talk(speak, listen)


def test_message_to_the_sender_is_delivered_at_once():
    async def listen(mailbox):
        mailbox.post("ear", Shout("me"))
        assert mailbox.pop(Shout).sender == "ear"

    talk(count, listen)


def test_messages_in_transit_and_overdue_are_counted():
    async def listen(mailbox):
        mailbox.links = {}
        sends = mailbox.sends
        word = mailbox.post("mouth", Shout("hello"))
        assert not sends.overdue()
        assert sends.is_busy()
        await mailbox.device.sleep(0.005)
        assert sends.overdue() == {
            "mouth": pytest.approx(0.005)
        }  # without links it should have been there at once
        await word
        assert not sends.overdue()
        assert not sends.is_busy()

    talk(count, listen)


@pytest.mark.parametrize("taker", [True, False])
def test_mailbox_is_bounded(taker):
    async def flood(mailbox):
        for number in range(6):
            mailbox.post("ear", Word(0, number))
            if not taker:
                await mailbox.device.sleep(0.1)

    async def listen(mailbox):
        await mailbox.device.sleep(2)

    with pytest.raises(
        MailboxFullError, match=r"unacknowledged" if taker else r"wait to be taken"
    ):
        talk(flood, listen, limit=4)


def test_unknown_kind_fails_the_program():
    async def stranger(device):
        await device.send("ear", Message("riddle"))

    async def listen(device):
        async with Mailbox(device, {}, KINDS) as mailbox:
            await mailbox.take(Word)

    with pytest.raises(WireError, match=r"'riddle' from mouth"):
        simulate_programs({"ear": listen, "mouth": stranger}, link=LINK)


def test_transfer_time_is_there_and_back():
    links = {("a", "b"): Link(8e6, 0.01), ("b", "a"): Link(1e6, 0.02)}
    assert transfer_time(links, "a", "b", 1000) == pytest.approx(1000 / 1e6 + 0.03)
    assert transfer_time(links, "a", "c", 1000) == 0


def test_failure_of_a_task_fails_the_program():
    ended = []

    async def patient():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("patient")

    async def failing():
        await asyncio.sleep(0)
        raise KeyError("lost")

    async def program():
        async with Tasks() as tasks:
            tasks.start(patient())
            tasks.start(failing())
            await asyncio.sleep(60)

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(program())
    assert ended == ["patient"]


def test_exception_of_the_program_is_raised():
    async def program():
        async with Tasks() as tasks:
            tasks.start(asyncio.sleep(60))
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        asyncio.run(program())


def test_tasks_end_with_the_program():
    async def program():
        async with Tasks() as tasks:
            left = tasks.start(asyncio.sleep(60))
        assert left.cancelled()

    asyncio.run(program())
