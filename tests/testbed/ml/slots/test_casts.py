"""Who hears which cast, how often it is made, and what of it has arrived in time."""

from __future__ import annotations

import asyncio

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import (
    CASTS,
    Acknowledged,
    CastAck,
    CastExchange,
    Losses,
    Outputs,
    Repeated,
)
from testbed.network.link import Link
from tests.helpers.worlds import events_of, make_world

LINK = Link(rate=8e6, delay=0.01)
ARRANGEMENT = NeuronAssignment(
    (range(2), range(2, 3)),
    (4, 3, 2),
    ({"a": range(4)}, {"a": range(3)}, {"b": (0,), "c": (1,)}),
)
"""Layers 0 and 1 at a; a neuron of the last layer each at b and c."""


def run(programs, **options):
    """Run async functions of a mailbox, by device; return the world after the first one has ended."""

    def with_mailbox(program):
        async def whole(device):
            async with Mailbox(device, {}, CASTS) as mailbox:
                await program(mailbox)

        return whole

    made = make_world(
        {name: with_mailbox(program) for name, program in programs.items()},
        link=LINK,
        **options,
    )
    made.run()
    return made


def ear(answering: bool, after: float = 0.0):
    """Return a program that hears casts for ever; it may acknowledge them, a while later."""

    async def listen(mailbox):
        transmit = Acknowledged(mailbox, 1.0)

        async def answer(message):
            await mailbox.device.sleep(after)
            transmit.on_arrival(message)

        mailbox.on(
            Outputs, lambda message: answering and mailbox.start(answer(message))
        )
        await asyncio.get_running_loop().create_future()

    return listen


def message(batch: int = 0) -> Outputs:
    return Outputs(batch, 1, torch.ones(2, 3))


def cast(make, *messages: Outputs, until: float = 60.0):
    """Return a program that casts to b and c, one message after the other, and stays a while."""

    async def speak(mailbox):
        transmit = make(mailbox)
        for each in messages:
            await transmit(["b", "c"], each, until)
        await mailbox.device.sleep(3.0)

    return speak


def casts(made) -> list[list[str]]:
    return [each["peers"] for each in events_of(made, "cast", "a")]


@pytest.mark.parametrize("times", [1, 3])
def test_repeated_casts_have_the_configured_number(times):
    made = run(
        {
            "a": cast(lambda mailbox: Repeated(mailbox, times), message()),
            "b": ear(True),
            "c": ear(False),
        }
    )
    assert casts(made) == [["b", "c"]] * times


def test_a_cast_acknowledged_by_all_is_not_repeated():
    made = run(
        {
            "a": cast(lambda mailbox: Acknowledged(mailbox, 0.5), message()),
            "b": ear(True),
            "c": ear(True),
        }
    )
    assert casts(made) == [["b", "c"]]


def test_unacknowledged_casts_are_repeated_to_the_remaining_receivers():
    def transmit(mailbox):
        return Acknowledged(mailbox, 0.5)

    made = run(
        {"a": cast(transmit, message(), until=2.0), "b": ear(True), "c": ear(False)}
    )
    # A cast takes well below a millisecond: at 0, 0.5, 1.0 and 1.5 s, when the next answer would come too late.
    assert casts(made) == [["b", "c"], ["c"], ["c"], ["c"]]
    assert max(each["time"] for each in events_of(made, "cast", "a")) < 2.0


def test_a_cast_is_made_even_without_time_for_an_acknowledgement():
    def transmit(mailbox):
        return Acknowledged(mailbox, 0.5)

    made = run(
        {"a": cast(transmit, message(), until=0.1), "b": ear(True), "c": ear(True)}
    )
    assert casts(made) == [["b", "c"]]


def test_a_late_acknowledgement_does_not_count_for_the_next_cast():
    async def speak(mailbox):
        transmit = Acknowledged(mailbox, 1.0)
        await transmit(["b"], message(0), mailbox.device.now() + 0.5)
        await transmit(["b"], message(1), mailbox.device.now() + 10.0)

    # Answers come after 0.3 s: that of the first cast while the second one's is awaited, which is still on its way.
    made = run({"a": speak, "b": ear(True, after=0.3)})
    assert casts(made) == [["b"], ["b"]]


def exchange(mailbox, under_way=2, values=(1, 1, 1)) -> CastExchange:
    return CastExchange(
        mailbox, lambda: ARRANGEMENT, Repeated(mailbox), under_way, values
    )


def heard_by(name: str, *casts_of_others, check):
    """Let others cast, a while apart; then call ``check`` with the exchange of a device."""

    async def listen(mailbox):
        own = exchange(mailbox)
        await mailbox.device.sleep(5.0)
        check(own)

    def speaking(sent):
        async def speak(mailbox):
            for each in sent:
                await mailbox.cast([name], each)
            await asyncio.get_running_loop().create_future()

        return speak

    speakers = {
        sender: speaking([each for by, each in casts_of_others if by == sender])
        for sender, _ in casts_of_others
    }
    run({name: listen, **speakers})


def test_parts_follow_their_holders_and_missing_ones_are_counted():
    def check(own):
        found = own.take_outputs(2, 0, 2)
        assert [
            (part.sender, list(part.neurons), part.tensor is None)
            for part in found.parts
        ] == [
            ("b", [0], True),
            ("c", [1], False),
        ]
        assert found.success_rate == 0.5
        assert (own.tally["sharing"].expected, own.tally["sharing"].received) == (2, 1)
        assert own.tally["forward"].expected == 0
        assert own.take_outputs(2, 0, 2).success_rate == 0, "what was taken is gone"

    heard_by("a", ("c", Outputs(0, 2, torch.ones(2, 1))), check=check)


def test_own_values_cost_no_cast_and_are_not_counted():
    async def alone(mailbox):
        own = exchange(mailbox)
        await own.cast(1, Outputs(0, 0, torch.ones(2, 4), sender="a"))
        found = own.take_outputs(0, 0, 2)
        assert found.is_complete
        assert found.joined_values().tolist() == [[1, 1, 1, 1]] * 2
        assert own.tally["forward"].expected == 0

    assert casts(run({"a": alone, "b": ear(False), "c": ear(False)})) == []


def test_a_device_takes_the_losses_of_its_own_neurons():
    arranged = NeuronAssignment(
        (range(2), range(2, 3)),
        (2, 3, 2),
        ({"a": range(2)}, {"a": (0, 2), "d": (1,)}, {"b": range(2)}),
    )

    async def listen(mailbox):
        own = CastExchange(mailbox, lambda: arranged, Repeated(mailbox), 2, (1, 1, 1))
        await mailbox.device.sleep(1.0)
        found = own.take_losses(1, 0, 1)
        assert found.parts[0].tensor.tolist() == [[1.0, 3.0]]
        assert found.layer == 2

    async def speak(mailbox):
        await mailbox.cast(["a"], Losses(0, 2, torch.tensor([[1.0, 2.0, 3.0]])))
        await asyncio.get_running_loop().create_future()

    run({"a": listen, "b": speak, "d": ear(False)})


def test_outputs_are_dropped_when_no_layer_can_need_them_any_more():
    def check(own):
        own.take_outputs(2, 5, 2)
        # Two batches may be under way, so those from batch 2 on still count.
        assert own.take_outputs(2, 1, 2).success_rate == 0
        assert own.take_outputs(2, 2, 2).success_rate == 1 / 2

    heard_by(
        "a",
        *(("c", Outputs(batch, 2, torch.ones(2, 1))) for batch in (1, 2)),
        check=check,
    )


def test_an_empty_message_announces_a_missing_part():
    def check(own):
        found = own.take_outputs(2, 0, 2)
        assert [part.tensor for part in found.parts] == [None, None]
        assert own.tally["sharing"].received == 1, "the message itself was received"

    heard_by("a", ("c", Outputs(0, 2, None)), check=check)


def test_every_arrival_is_acknowledged():
    made = run(
        {
            "a": cast(lambda mailbox: Repeated(mailbox, 2), message()),
            "b": ear(True),
            "c": ear(False),
        }
    )
    assert [each["message"] for each in events_of(made, "cast", "b")] == [
        CastAck.kind
    ] * 2
