"""Reuse of saved gradients at each granularity, against a numpy reference on random message losses."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.models.chain import chain
from testbed.ml.models.graph import graph_of
from testbed.ml.models.layers import Linear
from testbed.ml.models.sliced import draw_tensors
from testbed.ml.slots.missing import ReceivedParts, SenderPart, UsableValues
from testbed.ml.slots.planner import slice_of
from testbed.ml.training.schema import OptimizerPart
from testbed_versatilefl.maintenance import DynamicUpdate, Maintenance
from testbed_versatilefl.planner import VersatileOptions

RATE, SAMPLES, INPUTS, SENDERS, STEPS = 0.1, 3, 4, 3, 60
SEED = 7
NEURONS = (range(3), range(3, 5))
"""Neurons of the layer that each of the two devices holds."""


class ReferenceLayer:
    """The undivided layer in numpy, with a saved gradient for each neuron."""

    def __init__(self, weight, bias, limit):
        self.weight, self.bias, self.limit = weight, bias, limit
        self.saved = [None] * 5
        self.used = [0] * 5

    def learn(self, neuron, inputs, gradient, fresh):
        if fresh:
            self.saved[neuron] = (gradient @ inputs, gradient.sum())
            self.used[neuron] = 0
        elif self.saved[neuron] is None or self.used[neuron] >= self.limit:
            return
        else:
            self.used[neuron] += 1
        rows, bias = self.saved[neuron]
        self.weight[neuron] -= RATE * rows
        self.bias[neuron] -= RATE * bias


def make_shards(model, layer):
    """Return the parts of the layer on both devices."""
    shards = []
    for neurons in NEURONS:
        part = slice_of(layer, neurons)
        tensors = draw_tensors(model, [(layer, part)], SEED)
        optimizer = OptimizerPart(learning_rate=RATE)
        shards.append(LayerShard(layer, part, tensors, optimizer))
    return shards


def draw_parameters(model, layer):
    """Return the initial weight and bias of the undivided layer as numpy arrays."""
    tensors = draw_tensors(model, [(layer, slice_of(layer, range(5)))], SEED)
    arrays = {
        tensor.dim(): tensor.detach().numpy().copy().astype(np.float64)
        for tensor in tensors.values()
    }
    return arrays[2], arrays[1]


def make_sender_parts(losses, is_received):
    """Return the parts of all senders, (senders, samples, neurons), without the lost ones."""
    parts = []
    for sender, values in enumerate(losses):
        tensor = torch.from_numpy(values) if is_received[sender] else None
        parts.append(SenderPart(f"s{sender}", range(1), tensor))
    return tuple(parts)


def has_new_gradient(granularity, is_received):
    """Return a flag for each device with a new saved gradient, from receptions (senders, devices)."""
    if granularity == "layer":
        return [is_received.all()] * 2
    if granularity == "neuron":
        return is_received.all(axis=0)
    return is_received.any(axis=0)


def concatenate_states(shards, dimensions):
    """Return the weights (2 dimensions) or the biases (1 dimension) of all shards."""
    tensors = []
    for shard in shards:
        for tensor in shard.state().values():
            if tensor.dim() == dimensions:
                tensors.append(tensor.numpy())
    return np.concatenate(tensors)


@pytest.mark.parametrize("granularity", ["layer", "neuron", "link"])
@pytest.mark.parametrize(("limit", "place"), [(0, 2), (1, 2), (4, 2), (4, 1)])
def test_gradients_match_numpy(granularity, limit, place):
    # Place 1 is the first layer, whose inputs are samples, so it returns no gradient.
    model = chain("m", (INPUTS,), 2, [("a", [Linear(5)]), ("b", [Linear(2)])])
    layer = graph_of(model).layers[0]
    shards = make_shards(model, layer)
    expected = ReferenceLayer(*draw_parameters(model, layer), limit)
    options = VersatileOptions(backward_granularity=granularity, grad_reuse_bw=limit)
    is_complete = [True, True]

    def make_maintenance(index):
        async def confirm(layer, arrived):
            return is_complete[1 - index]

        return Maintenance(DynamicUpdate(options), confirm)

    devices = [make_maintenance(index) for index in range(2)]
    draws = np.random.default_rng(limit)
    for step in range(STEPS):
        inputs = draws.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
        losses = draws.normal(size=(SENDERS, SAMPLES, 5)).astype(np.float32)
        # A whole layer needs the losses of all senders on both devices, which 0.5 would hardly ever give.
        rate = 0.75 if granularity == "layer" else 0.5
        is_received = draws.random((SENDERS, 2)) < rate
        before = expected.weight.copy()
        for index, (shard, maintenance, neurons) in enumerate(
            zip(shards, devices, NEURONS, strict=True)
        ):
            shard.forward(step, torch.from_numpy(inputs))
            own_losses = losses[:, :, neurons.start : neurons.stop]
            sender_parts = make_sender_parts(own_losses, is_received[:, index])
            is_complete[1 - index] = bool(is_received[:, 1 - index].all())
            received = ReceivedParts(place + 1, step, SAMPLES, 2, sender_parts)
            usable = asyncio.run(maintenance.usable_losses(received))
            work = maintenance.learn(shard, place, step, usable.values, usable)
            passed = None if work is None else work()
            passes_gradient = is_received[:, index].any() and place > 1
            assert (passed is not None) == passes_gradient
            if passes_gradient:
                received_losses = own_losses * is_received[:, index, None, None]
                gradient = (
                    received_losses.sum(axis=0) @ before[neurons.start : neurons.stop]
                )
                assert passed.numpy() == pytest.approx(gradient, abs=1e-4)
        fresh = has_new_gradient(granularity, is_received)
        for index, neurons in enumerate(NEURONS):
            for neuron in neurons:
                received_losses = losses[:, :, neuron] * is_received[:, index, None]
                gradient = received_losses.sum(axis=0)
                expected.learn(neuron, inputs, gradient, fresh[index])
        weights = concatenate_states(shards, dimensions=2)
        biases = concatenate_states(shards, dimensions=1)
        assert weights == pytest.approx(expected.weight, abs=1e-4)
        assert biases == pytest.approx(expected.bias, abs=1e-4)
    assert max(expected.used) <= limit


def test_incomplete_results_and_dropped_batches_give_no_new_gradients():
    options = VersatileOptions(thres_fw="40%")
    maintenance = Maintenance(DynamicUpdate(options), None)
    mine = SenderPart("a", range(1), torch.ones(2, 1), {"rates": [1.0, 1.0]})
    lost = SenderPart("b", range(1, 2), None)
    assert asyncio.run(
        maintenance.usable_results(ReceivedParts(2, 0, 2, 2, (mine, lost)))
    ) == UsableValues(None, "saved")
    other = SenderPart("b", range(1, 2), torch.ones(2, 1), {"rates": [0.5, 0.5]})
    usable = asyncio.run(
        maintenance.usable_results(ReceivedParts(2, 1, 2, 2, (mine, other)))
    )
    assert (usable.values.tolist(), usable.gradient_source) == ([[1, 1], [1, 1]], "new")
    lossy_parts = tuple(
        SenderPart(name, range(1), torch.ones(2, 1), {"rates": [1.0, 0.25]})
        for name in "ab"
    )
    unusable = asyncio.run(
        maintenance.usable_results(ReceivedParts(2, 2, 2, 2, lossy_parts))
    )
    assert unusable == UsableValues(None, "nothing")
    assert maintenance.learn(None, 2, 2, None, unusable) is None


def test_past_outputs_replace_missing_parts_and_values():
    maintenance = Maintenance(
        DynamicUpdate(VersatileOptions(substitute_past_outputs=True)), None
    )
    mine = SenderPart("a", range(1), torch.ones(2, 1), {"rates": []})

    def inputs(batch, tensor, gaps=None):
        other = SenderPart("b", range(1, 3), tensor, {"rates": []}, gaps)
        return maintenance.inputs(ReceivedParts(0, batch, 2, 3, (mine, other))).tolist()

    assert inputs(0, None) == [[1, 0, 0]] * 2, "no past outputs exist yet"
    assert inputs(1, torch.tensor([[2.0, 3.0], [4.0, 7.0]])) == [[1, 2, 3], [1, 4, 7]]
    assert inputs(2, None) == [[1, 3, 5]] * 2
    gaps = torch.tensor([[True, False], [False, False]])
    assert inputs(3, torch.tensor([[0.0, 8.0], [9.0, 9.0]]), gaps) == [
        [1, 3, 8],
        [1, 9, 9],
    ]
    assert inputs(4, None) == [[1, 3, 5]] * 2, "partly received outputs are not saved"
