"""Handover of neurons between devices, with their weights and momentum."""

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
from tests.helpers.simulated_programs import simulate_programs
from tests.helpers.worlds import LINK

CNN = {"model": {"name": "cnn", "channels": [6, 7, 8], "hidden": [10, 8]}}


def rows_by_neuron(devices):
    """Return the holder and the tensors of each neuron, and reject a neuron with two holders."""
    holders = {}
    for device, neurons in devices.items():
        for layer, shard in neurons.shards.items():
            for at, neuron in enumerate(shard.part.rows):
                assert (layer, neuron) not in holders
                tensors = {name: tensor[at] for name, tensor in shard.state().items()}
                holders[layer, neuron] = (device, tensors)
    return holders


def train_once(neurons, inputs):
    """Take one training step to change the initial weights and give each weight momentum."""
    for layer, shard in neurons.shards.items():
        draws = torch.Generator().manual_seed(layer)
        values = shard.forward(0, torch.rand(2, inputs[layer - 1], generator=draws))
        shard.backward(0, torch.ones_like(values))
        shard.update()


async def apply_assignment(mailbox, handover, assignment, devices):
    """Send an assignment to all devices and wait ten seconds for messages in transit."""
    layers = []
    for layer in assignment.layers:
        layers.append({name: list(neurons) for name, neurons in layer.items()})
    for name in devices:
        if name != mailbox.device.name:
            mailbox.post(name, Arrange(assignment.version, layers))
    handover.apply(assignment)
    for _ in range(100):
        await mailbox.device.sleep(0.1)
        handover.apply_messages()


@pytest.mark.parametrize("allocation", ["horizontal", "hybrid"])
def test_neurons_keep_weights_and_momentum_when_moved(allocation):
    workload = {
        **CNN,
        "training": {"optimizer": {"learning_rate": 0.1, "momentum": 0.9}},
    }
    method = {"name": "versatile", "allocation": allocation}
    problem, _ = problem_of(make_scenario(5, workload=workload, method=method))
    first = initial_assignment(problem, plan(problem).details)
    sizes = zip(first.sizes, values_per_neuron(problem), strict=True)
    inputs = [neurons * values for neurons, values in sizes]
    victim, coordinator = first.members(0)[:2]
    without_victim = remove_device(first, victim, {}, seed=1)
    with_victim = add_device(without_victim, victim, seed=1)
    # The low credibility of the coordinator moves most of its neurons to the other devices of its group.
    credibility = dict.fromkeys(first.devices, 1.0) | {coordinator: 0.1}
    rearranged = rearrange_group(with_victim, 0, credibility, seed=1)
    devices, snapshots = {}, []

    async def program(device):
        async with Mailbox(
            device, dict.fromkeys(problem.links, LINK), KINDS
        ) as mailbox:
            neurons = devices[device.name] = Neurons(device, problem)
            handover = Handover(mailbox, neurons, first, lambda layer: None)
            handover.apply(first)
            train_once(neurons, inputs)
            while device.name != coordinator:
                await mailbox.changed()
                handover.apply_messages()
            for assignment in (first, without_victim, with_victim, rearranged):
                await apply_assignment(mailbox, handover, assignment, devices)
                snapshots.append((assignment, rows_by_neuron(devices)))

    simulate_programs(dict.fromkeys((coordinator, *first.devices), program))
    _, before = snapshots[0]
    assert len(before) == sum(first.sizes[1:])
    for assignment, rows in snapshots:
        assert rows.keys() == before.keys()
        for (layer, neuron), (holder, tensors) in rows.items():
            assert neuron in assignment.neurons_of(holder, layer)
            _, expected = before[layer, neuron]
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[name])


def test_forwarded_neurons_carry_current_assignment_version():
    posted = []

    class RecordingMailbox:
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
        RecordingMailbox(), SimpleNamespace(shards={}), assignment, lambda layer: None
    )
    handover.apply(assignment)
    handover._moved_messages.append(Moved(4, 1, [1], {}))
    handover.apply_messages()
    assert posted == [("c", 5, [1])], "with version 4, c would return them to b"


def test_newest_of_several_assignments_is_applied():
    class SilentMailbox:
        device = SimpleNamespace(name="b", record=lambda *event, **fields: None)

        def on(self, kind, handler):
            setattr(self, kind.__name__, handler)

    planned = NeuronAssignment(
        groups=(range(2),), sizes=(1, 2), layers=({"c": [0]}, {"c": [0, 1]})
    )
    mailbox = SilentMailbox()
    handover = Handover(
        mailbox, SimpleNamespace(shards={}), planned, lambda layer: None
    )
    mailbox.Arrange(Arrange(2, [{"c": [0]}, {"c": [0], "d": [1]}]))
    mailbox.Arrange(Arrange(1, [{"c": [0]}, {"d": [0, 1]}]))
    handover.apply_messages()
    assert handover.assignment.version == 2
    # A device that had not received version 2 yet cast under version 1.
    assert list(handover.by_version[1].neurons_of("d", 1)) == [0, 1]


def test_delivered_messages_are_discarded():
    class DeliveringMailbox:
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
        DeliveringMailbox(), SimpleNamespace(shards={}), assignment, lambda layer: None
    )
    handover.apply(assignment)
    for _ in range(3):
        handover._moved_messages.append(Moved(4, 1, [1], {}))
        handover.apply_messages()
    assert len(handover._sends) == 1
