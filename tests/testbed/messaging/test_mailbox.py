"""The mailbox of a program: sending in the background, taking messages with deadlines, and configurations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from testbed.messaging.mailbox import Mailbox, MailboxFullError, Tasks, transfer_time
from testbed.messaging.typed_messages import TypedMessage
from testbed.network.link import Link
from testbed.wire.message import Message, WireError
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.worlds import LINK


@dataclass(frozen=True)
class Numbered(TypedMessage, kind="numbered", key=("number",)):
    configuration: int
    number: int


@dataclass(frozen=True)
class Text(TypedMessage, kind="text"):
    text: str


@dataclass(frozen=True)
class Opening(TypedMessage, kind="opening", opens=True):
    configuration: int


KINDS = (Numbered, Text, Opening)


def run_pair(send, receive, **options):
    """Run one function of a mailbox on each of two devices; the run ends with the receiver's function."""

    async def run_receiver(device):
        async with Mailbox(device, {}, KINDS, **options) as mailbox:
            await receive(mailbox)

    async def run_sender(device):
        async with Mailbox(device, {}, KINDS, **options) as mailbox:
            await send(mailbox)
            # The end of the program would withdraw messages that are not acknowledged.
            await asyncio.get_running_loop().create_future()

    simulate_programs({"receiver": run_receiver, "sender": run_sender})


async def send_three_numbers(mailbox):
    for number in range(3):
        mailbox.post("receiver", Numbered(0, number))


def test_messages_are_taken_by_key_in_any_order():
    async def receive(mailbox):
        last = await mailbox.take(Numbered, 2)
        assert (last.number, last.sender) == (2, "sender")
        assert (await mailbox.take(Numbered)).number == 0
        assert (await mailbox.take((Text, Numbered))).number == 1
        assert not mailbox.holds(Numbered)

    run_pair(send_three_numbers, receive)


def test_take_returns_none_at_deadline():
    async def receive(mailbox):
        assert await mailbox.take(Numbered, 7, deadline=0.5) is None
        assert mailbox.device.now() == 0.5
        # A deadline in the past is no error, and a stored message is still returned.
        assert await mailbox.take(Numbered, 7, deadline=0.2) is None
        assert await mailbox.take(Numbered, 1, deadline=0.2) is not None

    run_pair(send_three_numbers, receive)


def test_take_without_deadline_waits():
    async def receive(mailbox):
        waiting = asyncio.create_task(mailbox.take(Numbered, 9))
        await mailbox.device.sleep(1)
        assert not waiting.done()
        waiting.cancel()

    run_pair(send_three_numbers, receive)


def test_discarded_keys_are_ignored_on_arrival():
    async def send(mailbox):
        for number in (4, 5):
            await mailbox.device.sleep(1)
            mailbox.post("receiver", Numbered(0, number))

    async def receive(mailbox):
        # Message 4 is sent half a second after this deadline.
        assert await mailbox.take(Numbered, 4, deadline=0.5) is None
        mailbox.discard_before(Numbered, 5)
        assert (await mailbox.take(Numbered)).number == 5

    run_pair(send, receive)


def test_peek_does_not_remove_message():
    async def receive(mailbox):
        assert (await mailbox.peek(Numbered)).number == 0
        assert (await mailbox.take(Numbered)).number == 0

    run_pair(send_three_numbers, receive)


def test_second_message_with_same_key_is_dropped():
    async def send(mailbox):
        for text in ("a", "b"):
            mailbox.post("receiver", Numbered(0, 1))
            mailbox.post("receiver", Text(text))

    async def receive(mailbox):
        await mailbox.device.sleep(1)
        assert mailbox.pop(Numbered, 1) is not None
        assert mailbox.pop(Numbered, 1) is None
        # A text has no key, so that both are stored.
        assert mailbox.pop(Text).text == "a"
        assert mailbox.pop(Text).text == "b"

    run_pair(send, receive)


def test_cast_is_taken_like_other_messages():
    async def send(mailbox):
        await mailbox.cast(["receiver"], Numbered(0, 3))

    async def receive(mailbox):
        assert (await mailbox.take(Numbered, 3, deadline=1.0)).sender == "sender"

    run_pair(send, receive)


def test_handler_gets_every_message_of_registered_kind():
    numbers = []

    async def receive(mailbox):
        mailbox.on(Numbered, lambda message: numbers.append(message.number))
        while len(numbers) < 3:
            assert await mailbox.changed(1.0)
        assert not await mailbox.changed(1.0)

    run_pair(send_three_numbers, receive)
    assert numbers == [0, 1, 2]


def test_messages_of_other_configurations_are_dropped():
    async def send(mailbox):
        for configuration in (1, 2, 3):
            mailbox.post("receiver", Numbered(configuration, number=configuration))

    async def receive(mailbox):
        mailbox.open(2)
        await mailbox.device.sleep(1)
        assert not mailbox.holds(Numbered, 1)
        assert mailbox.holds(Numbered, 2)
        assert not mailbox.holds(Numbered, 3)
        assert mailbox.received_count == 1

    run_pair(send, receive)


def test_newer_configuration_discards_older_state():
    opened = []

    async def send(mailbox):
        mailbox.post("receiver", Numbered(0, 1))
        mailbox.post("receiver", Opening(5))
        mailbox.post("receiver", Numbered(5, 1))

    async def receive(mailbox):
        mailbox.on(Opening, lambda opening: mailbox.open(opening.configuration))
        mailbox.on_open(lambda: opened.append(mailbox.configuration))
        withdrawn = mailbox.post("sender", Text("never sent"))
        while not opened:
            await mailbox.changed()
        assert not mailbox.holds(Numbered, 1)
        # An older number has no effect.
        mailbox.open(4)
        assert opened == [5]
        assert (await mailbox.take(Numbered, 1)).configuration == 5
        assert withdrawn.done()

    run_pair(send, receive)


def test_message_to_own_device_is_delivered_at_once():
    async def receive(mailbox):
        mailbox.post("receiver", Text("me"))
        assert mailbox.pop(Text).sender == "receiver"

    run_pair(send_three_numbers, receive)


def test_outbox_reports_busy_and_overdue_messages():
    async def receive(mailbox):
        # Without links, a message is predicted to be acknowledged at once.
        mailbox.links = {}
        outbox = mailbox.outbox
        message = mailbox.post("sender", Text("hello"))
        assert not outbox.overdue()
        assert outbox.is_busy()
        await mailbox.device.sleep(0.005)
        assert outbox.overdue() == {"sender": pytest.approx(0.005)}
        await message
        assert not outbox.overdue()
        assert not outbox.is_busy()

    run_pair(send_three_numbers, receive)


@pytest.mark.parametrize(
    ("pause", "message"),
    [(0.0, "unacknowledged"), (0.1, "wait to be taken")],
    ids=["unacknowledged messages", "received messages"],
)
def test_mailbox_refuses_messages_beyond_limit(pause, message):
    # A pause of 0.1 s is longer than a message and its acknowledgement, so the receiver's mailbox fills instead.
    async def send_six_numbers(mailbox):
        for number in range(6):
            mailbox.post("receiver", Numbered(0, number))
            if pause:
                await mailbox.device.sleep(pause)

    async def receive_nothing(mailbox):
        await mailbox.device.sleep(2)

    with pytest.raises(MailboxFullError, match=message):
        run_pair(send_six_numbers, receive_nothing, limit=4)


def test_unknown_kind_of_message_fails_program():
    async def send_unknown(device):
        await device.send("receiver", Message("riddle"))

    async def receive(device):
        async with Mailbox(device, {}, KINDS) as mailbox:
            await mailbox.take(Numbered)

    programs = {"receiver": receive, "sender": send_unknown}
    with pytest.raises(WireError, match=r"'riddle' from sender"):
        simulate_programs(programs, link=LINK)


def test_transfer_time_includes_delay_of_acknowledgement():
    links = {("a", "b"): Link(8e6, 0.01), ("b", "a"): Link(1e6, 0.02)}
    # 1,000 bytes at a megabyte a second, and a delay of 10 + 20 ms; acknowledgements have no size.
    assert transfer_time(links, "a", "b", 1000) == pytest.approx(1000 / 1e6 + 0.03)


def test_transfer_time_without_link_is_zero():
    links = {("a", "b"): Link(8e6, 0.01), ("b", "a"): Link(1e6, 0.02)}
    assert transfer_time(links, "a", "c", 1000) == 0


def test_failed_task_fails_program_and_cancels_other_tasks():
    cancelled = []

    async def wait_long():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append("wait_long")

    async def fail_soon():
        await asyncio.sleep(0)
        raise KeyError("lost")

    async def run_tasks():
        async with Tasks() as tasks:
            tasks.start(wait_long())
            tasks.start(fail_soon())
            await asyncio.sleep(60)

    # The exception itself, not a group of exceptions, is raised.
    with pytest.raises(KeyError, match="lost"):
        asyncio.run(run_tasks())
    assert cancelled == ["wait_long"]


def test_exception_of_program_is_raised_despite_tasks():
    async def run_tasks():
        async with Tasks() as tasks:
            tasks.start(asyncio.sleep(60))
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        asyncio.run(run_tasks())


def test_end_of_program_cancels_tasks():
    async def run_tasks():
        async with Tasks() as tasks:
            unfinished = tasks.start(asyncio.sleep(60))
        assert unfinished.cancelled()

    asyncio.run(run_tasks())
