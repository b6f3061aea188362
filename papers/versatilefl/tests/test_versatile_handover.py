"""Neurons and filters of a convolutional network on their way from device to device, with all that they have learnt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import values_per_neuron
from testbed_versatilefl.handover import Arrange, Handover, Moved
from testbed_versatilefl.planner import initial_assignment, plan
from testbed_versatilefl.program import KINDS
from testbed_versatilefl.rearrangement import (
    add_device,
    rearrange_group,
    remove_device,
)
from tests.helpers.runs import make_scenario, problem_of
from tests.helpers.simulated_programs import LINK, simulate_programs

CNN = {"model": {"name": "cnn", "channels": [6, 7, 8], "hidden": [10, 8]}}


def rows(devices):
    """Return by layer and neuron who holds it, and its tensors with momentum; one that two devices hold is refused."""
    found = {}
    for device, neurons in devices.items():
        for layer, shard in neurons.shards.items():
            for at, neuron in enumerate(shard.part.rows):
                assert (layer, neuron) not in found
                found[layer, neuron] = (
                    device,
                    {name: tensor[at] for name, tensor in shard.state().items()},
                )
    return found


def learn(neurons, inputs):
    """Take a step, so that no weight is the first one and each has momentum."""
    for layer, shard in neurons.shards.items():
        draws = torch.Generator().manual_seed(layer)
        values = shard.forward(0, torch.rand(2, inputs[layer - 1], generator=draws))
        shard.backward(0, torch.ones_like(values))
        shard.update()


async def arrange(mailbox, handover, now, devices):
    """Tell an arrangement to all, and give what is on its way ten seconds."""
    layers = [
        {name: list(held) for name, held in layer.items()} for layer in now.layers
    ]
    for name in devices:
        if name != mailbox.device.name:
            mailbox.post(name, Arrange(now.version, layers))
    handover.apply(now)
    for _ in range(100):
        await mailbox.device.sleep(0.1)
        handover.apply_messages()


@pytest.mark.parametrize("allocation", ["horizontal", "hybrid"])
def test_filters_travel_as_devices_retire_join_and_are_rearranged(allocation):
    workload = {
        **CNN,
        "training": {"optimizer": {"learning_rate": 0.1, "momentum": 0.9}},
    }
    problem, _ = problem_of(
        make_scenario(
            5, workload=workload, method={"name": "versatile", "allocation": allocation}
        )
    )
    first = initial_assignment(problem, plan(problem).details)
    inputs = [
        size * values
        for size, values in zip(first.sizes, values_per_neuron(problem), strict=True)
    ]
    victim, lead = first.members(0)[:2]
    gone = remove_device(first, victim, {}, seed=1)
    back = add_device(gone, victim, seed=1)
    after = rearrange_group(
        back, 0, {name: 0.1 if name == lead else 1.0 for name in first.devices}, seed=1
    )
    devices, seen = {}, []

    async def program(device):
        async with Mailbox(
            device, dict.fromkeys(problem.links, LINK), KINDS
        ) as mailbox:
            own = devices[device.name] = Neurons(device, problem)
            handover = Handover(mailbox, own, first, lambda layer: None)
            handover.apply(first)
            learn(own, inputs)
            while device.name != lead:
                await mailbox.changed()
                handover.apply_messages()
            for now in (first, gone, back, after):
                await arrange(mailbox, handover, now, devices)
                seen.append((now, rows(devices)))

    simulate_programs(dict.fromkeys((lead, *first.devices), program))
    _, before = seen[0]
    assert len(before) == sum(first.sizes[1:])
    for now, found in seen:
        assert found.keys() == before.keys()
        for (layer, neuron), (holder, tensors) in found.items():
            assert neuron in now.neurons_of(holder, layer)
            _, expected = before[layer, neuron]
            assert tensors.keys() == expected.keys()
            assert all(
                torch.equal(tensor, expected[name]) for name, tensor in tensors.items()
            )


def test_neurons_passed_on_wait_for_the_assignment_that_moved_them():
    posted = []

    class Recording:
        device = SimpleNamespace(name="b", record=lambda *event, **fields: None)

        def on(self, kind, handler):
            pass

        def post(self, peer, message):
            posted.append((peer, message.version, message.neurons))

    assignment = NeuronAssignment(
        groups=(range(2),),
        sizes=(1, 2),
        layers=({"c": [0]}, {"c": [0, 1]}),
        version=5,
    )
    handover = Handover(
        Recording(), SimpleNamespace(shards={}), assignment, lambda layer: None
    )
    handover.apply(assignment)
    handover._moved_messages.append(Moved(4, 1, [1], {}))
    handover.apply_messages()
    assert posted == [("c", 5, [1])], "with version 4, c would return them to b"


def test_assignments_that_arrive_together_are_all_known_and_the_newest_is_applied():
    class Silent:
        device = SimpleNamespace(name="b", record=lambda *event, **fields: None)

        def on(self, kind, handler):
            setattr(self, kind.__name__, handler)

    planned = NeuronAssignment(
        groups=(range(2),), sizes=(1, 2), layers=({"c": [0]}, {"c": [0, 1]})
    )
    mailbox = Silent()
    handover = Handover(
        mailbox, SimpleNamespace(shards={}), planned, lambda layer: None
    )
    mailbox.Arrange(Arrange(2, [{"c": [0]}, {"c": [0], "d": [1]}]))
    mailbox.Arrange(Arrange(1, [{"c": [0]}, {"d": [0, 1]}]))
    handover.apply_messages()
    assert handover.assignment.version == 2
    # A device that had not received version 2 yet cast under version 1.
    assert list(handover.by_version[1].neurons_of("d", 1)) == [0, 1]


def test_delivered_messages_are_not_kept():
    class Delivered:
        device = SimpleNamespace(name="b", record=lambda *event, **fields: None)

        def on(self, kind, handler):
            pass

        def post(self, peer, message):
            return SimpleNamespace(done=lambda: True)

    layers = ({"c": [0]}, {"c": [0, 1]})
    assignment = NeuronAssignment(
        groups=(range(2),), sizes=(1, 2), layers=layers, version=5
    )
    handover = Handover(
        Delivered(), SimpleNamespace(shards={}), assignment, lambda layer: None
    )
    handover.apply(assignment)
    for _ in range(3):
        handover._moved_messages.append(Moved(4, 1, [1], {}))
        handover.apply_messages()
    assert len(handover._sends) == 1
