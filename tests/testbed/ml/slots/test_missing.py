"""Tests of parts of a layer that have not arrived, and of EdgePipe's policy for missing parts."""

import asyncio

import pytest
import torch

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.models import create
from testbed.ml.models.graph import graph_of
from testbed.ml.models.sliced import cut_tensors
from testbed.ml.models.slices import Slice
from testbed.ml.slots.missing import (
    MissingDataPolicy,
    ReceivedParts,
    SenderPart,
    UsableValues,
)
from testbed.ml.training.schema import OptimizerPart
from testbed_edgepipe.program import ZeroSubstitution

NEW_GRADIENT = UsableValues(None, "new")
NO_GRADIENT = UsableValues(None, "nothing")


def received_parts(*parts):
    """Return parts (neurons, tensor) of layer 1 with five neurons, for two samples of batch 7."""
    sender_parts = []
    for number, (neurons, tensor) in enumerate(parts):
        sender_parts.append(SenderPart(f"d{number}", neurons, tensor))
    return ReceivedParts(
        layer=1, batch=7, samples=2, neurons=5, parts=tuple(sender_parts)
    )


def test_missing_outputs_are_zeros_for_ranges_and_single_neurons():
    received = received_parts(
        (range(1, 3), torch.ones(2, 2)),
        ((0, 3), torch.full((2, 2), 2.0)),
        (range(4, 5), None),
    )
    assert received.joined_values().tolist() == [[2, 1, 1, 2, 0]] * 2
    assert not received.is_complete
    # Two of three parts have arrived.
    assert received.success_rate == pytest.approx(2 / 3)


def test_losses_are_summed_and_usable_only_if_complete():
    policy = ZeroSubstitution()
    first = (range(2), torch.ones(2, 3))
    complete = received_parts(first, (range(2, 5), torch.full((2, 3), 2.0)))
    usable = asyncio.run(policy.usable_losses(complete))
    assert usable.values.tolist() == [[3, 3, 3]] * 2
    assert usable.gradient_source == "new"
    incomplete = received_parts(first, (range(2, 5), None))
    assert asyncio.run(policy.usable_losses(incomplete)) == (None, "nothing")
    with pytest.raises(ValueError, match="no part of layer 1 has arrived for batch 7"):
        received_parts((range(5), None)).summed_losses()


def make_shard():
    """Return neurons 1 and 2 of the first layer of a small network, with learning rate 0.5."""
    model = create("mlp", {"hidden": [3]}, (1, 2, 2), 2)
    layer = graph_of(model).layers[0]
    part = Slice(range(1, 3), range(4), range(1, 3))
    weights = model.build(0, len(model.units), 1).state_dict()
    state = cut_tensors(layer, part, weights)
    return LayerShard(layer, part, state, OptimizerPart(learning_rate=0.5))


def test_edgepipe_updates_weights_at_once_or_learns_nothing():
    shard = make_shard()
    learn = ZeroSubstitution().learn
    outputs = shard.forward(7, torch.ones(1, 4))
    before = shard.state()
    assert learn(shard, 2, 7, None, NO_GRADIENT) is None
    work = learn(shard, 2, 7, torch.ones_like(outputs), NEW_GRADIENT)
    input_gradient = work()
    assert input_gradient.shape == (1, 4)
    # All inputs and gradients are ones, so each weight and bias of an active neuron falls by the learning rate.
    bias_change = 0.5 * (outputs[0] > 0).float()
    weight_change = bias_change[:, None].expand(2, 4)
    for name, tensor in shard.state().items():
        change = bias_change if tensor.dim() == 1 else weight_change
        assert torch.equal(tensor, before[name] - change)


def test_edgepipe_computes_no_input_gradient_for_layer_1():
    shard = make_shard()
    outputs = shard.forward(8, torch.ones(1, 4))
    learn = ZeroSubstitution().learn
    work = learn(shard, 1, 8, torch.ones_like(outputs), NEW_GRADIENT)
    assert work is not None
    # The inputs of layer 1 are the samples, to which no losses are sent.
    assert work() is None


def test_policy_uses_received_parts_in_tests_by_default():
    class Policy(MissingDataPolicy):
        pass

    received = received_parts((range(2), torch.ones(2, 2)), (range(2, 5), None))
    assert Policy().test_values(received) is received
