"""What EdgePipe does about what has not arrived."""

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
    Usable,
)
from testbed.ml.training.schema import OptimizerPart
from testbed_edgepipe.program import TreatedAsNull

NEW, NOTHING = Usable(None, "new"), Usable(None, "nothing")


def arrived(*parts, neurons=5):
    return ReceivedParts(
        1,
        7,
        2,
        neurons,
        tuple(SenderPart(f"d{number}", *each) for number, each in enumerate(parts)),
    )


def test_missing_outputs_are_zeros_for_ranges_and_single_neurons():
    found = arrived(
        (range(1, 3), torch.ones(2, 2)),
        ((0, 3), torch.full((2, 2), 2.0)),
        (range(4, 5), None),
    )
    assert found.joined_values().tolist() == [[2, 1, 1, 2, 0]] * 2
    assert not found.is_complete
    assert found.success_rate == pytest.approx(2 / 3)


def test_losses_are_summed_and_usable_only_if_complete():
    whole = arrived(
        (range(2), torch.ones(2, 3)), (range(2, 5), torch.full((2, 3), 2.0))
    )
    usable = asyncio.run(TreatedAsNull().usable_losses(whole))
    assert usable.values.tolist() == [[3, 3, 3]] * 2
    assert usable.gradient_source == "new"
    lacking = arrived((range(2), torch.ones(2, 3)), (range(2, 5), None))
    assert asyncio.run(TreatedAsNull().usable_losses(lacking)) == (None, "nothing")
    with pytest.raises(ValueError, match="no part of layer 1 has arrived for batch 7"):
        arrived((range(5), None)).summed_losses()


def test_learning_is_an_update_at_once_or_nothing():
    model = create("mlp", {"hidden": [3]}, (1, 2, 2), 2)
    layer = graph_of(model).layers[0]
    part = Slice(range(1, 3), range(4), range(1, 3))
    state = cut_tensors(layer, part, model.build(0, len(model.units), 1).state_dict())
    shard = LayerShard(layer, part, state, OptimizerPart(learning_rate=0.5))
    learn, outputs = TreatedAsNull().learn, shard.forward(7, torch.ones(1, 4))
    before = shard.state()
    assert learn(shard, 2, 7, None, NOTHING) is None
    learning = learn(shard, 2, 7, torch.ones_like(outputs), NEW)
    inputs = learning()
    assert inputs.shape == (1, 4)
    active = (outputs[0] > 0).float()
    for name, tensor in shard.state().items():
        lowered = (
            0.5 * active if tensor.dim() == 1 else 0.5 * active[:, None].expand(2, 4)
        )
        assert torch.equal(tensor, before[name] - lowered)
    shard.forward(8, torch.ones(1, 4))
    learning = learn(shard, 1, 8, torch.ones_like(outputs), NEW)
    assert learning is not None
    assert learning() is None, (
        "the first layer's inputs are the samples, to which nobody passes a loss"
    )


def test_tests_of_a_policy_use_received_parts_by_default():
    class Policy(MissingDataPolicy):
        pass

    received = arrived((range(2), torch.ones(2, 2)), (range(2, 5), None))
    assert Policy().test_values(received) is received
