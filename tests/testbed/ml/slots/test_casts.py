"""Tests of casts: transmission strategies, acknowledgements, and the parts of a layer that have arrived in time."""

from __future__ import annotations

import asyncio

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import (
    CASTS,
    AcknowledgedCasts,
    CastAck,
    CastExchange,
    Losses,
    Outputs,
    RepeatedCasts,
)
from testbed.network.link import Link
from tests.helpers.worlds import events_of, make_world

LINK = Link(rate=8e6, delay=0.01)
ASSIGNMENT = NeuronAssignment(
    (range(2), range(2, 3)),
    (4, 3, 2),
    ({"a": range(4)}, {"a": range(3)}, {"b": (0,), "c": (1,)}),
)
"""Layers 0 and 1 at a; a neuron of the last layer each at b and c."""


def run(programs):
    """Run async functions of a mailbox, by device; return the world after the first one has ended."""

    def with_mailbox(program):
        async def run_program(device):
            async with Mailbox(device, {}, CASTS) as mailbox:
                await program(mailbox)

        return run_program

    programs_of_devices = {}
    for name, program in programs.items():
        programs_of_devices[name] = with_mailbox(program)
    world = make_world(programs_of_devices, link=LINK)
    world.run()
    return world


async def wait_forever():
    await asyncio.get_running_loop().create_future()


def receiver(*, acknowledges: bool, delay: float = 0.0):
    """Return a program receiving casts for ever, with or without acknowledgements after a delay."""

    async def receive(mailbox):
        transmit = AcknowledgedCasts(mailbox, 1.0)

        async def acknowledge(message):
            await mailbox.device.sleep(delay)
            transmit.on_arrival(message)

        def on_outputs(message):
            if acknowledges:
                mailbox.start(acknowledge(message))

        mailbox.on(Outputs, on_outputs)
        await wait_forever()

    return receive


def outputs_message(batch: int = 0) -> Outputs:
    return Outputs(batch, 1, torch.ones(2, 3))


def caster(make_transmit, until: float = 60.0):
    """Return a program casting one message to b and c, which stays for a while to receive acknowledgements."""

    async def send(mailbox):
        transmit = make_transmit(mailbox)
        await transmit(["b", "c"], outputs_message(), until)
        await mailbox.device.sleep(3.0)

    return send


def repeated(times):
    return lambda mailbox: RepeatedCasts(mailbox, times)


def acknowledged(mailbox):
    return AcknowledgedCasts(mailbox, 0.5)


def receivers_of_casts(world) -> list[list[str]]:
    """Return the receivers of each cast of device a."""
    return [event["peers"] for event in events_of(world, "cast", "a")]


@pytest.mark.parametrize("times", [1, 3])
def test_cast_is_repeated_the_configured_number_of_times(times):
    world = run(
        {
            "a": caster(repeated(times)),
            "b": receiver(acknowledges=True),
            "c": receiver(acknowledges=False),
        }
    )
    # Repetitions do not depend on acknowledgements, which only b sends.
    assert receivers_of_casts(world) == [["b", "c"]] * times


def test_cast_acknowledged_by_all_is_not_repeated():
    world = run(
        {
            "a": caster(acknowledged),
            "b": receiver(acknowledges=True),
            "c": receiver(acknowledges=True),
        }
    )
    assert receivers_of_casts(world) == [["b", "c"]]


def test_unacknowledged_cast_is_repeated_to_remaining_receivers_until_deadline():
    world = run(
        {
            "a": caster(acknowledged, until=2.0),
            "b": receiver(acknowledges=True),
            "c": receiver(acknowledges=False),
        }
    )
    # A cast takes well below a millisecond: at 0, 0.5, 1.0 and 1.5 s, when the next answer would come too late.
    assert receivers_of_casts(world) == [["b", "c"], ["c"], ["c"], ["c"]]
    times = [event["time"] for event in events_of(world, "cast", "a")]
    assert max(times) < 2.0


def test_message_is_cast_even_without_time_for_acknowledgement():
    world = run(
        {
            "a": caster(acknowledged, until=0.1),
            "b": receiver(acknowledges=True),
            "c": receiver(acknowledges=True),
        }
    )
    assert receivers_of_casts(world) == [["b", "c"]]


def test_late_acknowledgement_does_not_count_for_next_cast():
    async def send(mailbox):
        transmit = AcknowledgedCasts(mailbox, 1.0)
        await transmit(["b"], outputs_message(0), mailbox.device.now() + 0.5)
        await transmit(["b"], outputs_message(1), mailbox.device.now() + 10.0)

    # Answers come after 0.3 s: that of the first cast while the second one's is awaited, which is still on its way.
    world = run({"a": send, "b": receiver(acknowledges=True, delay=0.3)})
    assert receivers_of_casts(world) == [["b"], ["b"]]


def make_exchange(mailbox, assignment=ASSIGNMENT) -> CastExchange:
    """Return an exchange with at most two batches under way and one value for each neuron."""
    return CastExchange(
        mailbox, lambda: assignment, RepeatedCasts(mailbox), 2, values=(1, 1, 1)
    )


def check_after_casts(sender: str, messages, check):
    """Let a sender cast messages to a, then call ``check`` with the exchange of a."""

    async def receive(mailbox):
        exchange = make_exchange(mailbox)
        await mailbox.device.sleep(5.0)
        check(exchange)

    async def send(mailbox):
        for message in messages:
            await mailbox.cast(["a"], message)
        await wait_forever()

    run({"a": receive, sender: send})


def test_parts_are_in_order_of_assignment_and_missing_parts_are_counted():
    def check(exchange):
        received = exchange.take_outputs(2, 0, 2)
        of_b, of_c = received.parts
        assert (of_b.sender, list(of_b.neurons), of_b.tensor) == ("b", [0], None)
        assert (of_c.sender, list(of_c.neurons)) == ("c", [1])
        assert of_c.tensor is not None
        assert received.success_rate == 0.5
        sharing = exchange.tally["sharing"]
        assert (sharing.expected, sharing.received) == (2, 1)
        assert exchange.tally["forward"].expected == 0
        # Taking the outputs has removed them.
        assert exchange.take_outputs(2, 0, 2).success_rate == 0

    check_after_casts("c", [Outputs(0, 2, torch.ones(2, 1))], check)


def test_own_values_need_no_cast_and_are_not_counted():
    async def alone(mailbox):
        exchange = make_exchange(mailbox)
        own_values = Outputs(0, 0, torch.ones(2, 4), sender="a")
        await exchange.cast(1, own_values)
        received = exchange.take_outputs(0, 0, 2)
        assert received.is_complete
        assert received.joined_values().tolist() == [[1, 1, 1, 1]] * 2
        assert exchange.tally["forward"].expected == 0

    world = run(
        {
            "a": alone,
            "b": receiver(acknowledges=False),
            "c": receiver(acknowledges=False),
        }
    )
    assert receivers_of_casts(world) == []


def test_device_takes_losses_of_its_own_neurons():
    # Neurons 0 and 2 of layer 1 are at a.
    assignment = NeuronAssignment(
        (range(2), range(2, 3)),
        (2, 3, 2),
        ({"a": range(2)}, {"a": (0, 2), "d": (1,)}, {"b": range(2)}),
    )

    async def receive(mailbox):
        exchange = make_exchange(mailbox, assignment)
        await mailbox.device.sleep(1.0)
        received = exchange.take_losses(1, 0, 1)
        assert received.parts[0].tensor.tolist() == [[1.0, 3.0]]
        assert received.layer == 2

    async def send(mailbox):
        await mailbox.cast(["a"], Losses(0, 2, torch.tensor([[1.0, 2.0, 3.0]])))
        await wait_forever()

    run({"a": receive, "b": send, "d": receiver(acknowledges=False)})


def test_outputs_are_dropped_once_no_layer_can_need_them():
    def check(exchange):
        exchange.take_outputs(2, 5, 2)
        # Two batches may be under way, so those from batch 2 on still count.
        assert exchange.take_outputs(2, 1, 2).success_rate == 0
        assert exchange.take_outputs(2, 2, 2).success_rate == 1 / 2

    messages = [Outputs(batch, 2, torch.ones(2, 1)) for batch in (1, 2)]
    check_after_casts("c", messages, check)


def test_empty_message_announces_missing_part():
    def check(exchange):
        received = exchange.take_outputs(2, 0, 2)
        assert [part.tensor for part in received.parts] == [None, None]
        # The message itself was received.
        assert exchange.tally["sharing"].received == 1

    check_after_casts("c", [Outputs(0, 2, None)], check)


def test_every_arrival_is_acknowledged():
    world = run(
        {
            "a": caster(repeated(2)),
            "b": receiver(acknowledges=True),
            "c": receiver(acknowledges=False),
        }
    )
    # The cast of a arrives twice.
    kinds = [event["message"] for event in events_of(world, "cast", "b")]
    assert kinds == [CastAck.kind] * 2
