"""Saved gradients of each granularity beside numpy, neuron by neuron, on random patterns of losses."""

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
from testbed.ml.slots.missing import ReceivedParts, SenderPart, Usable
from testbed.ml.slots.planner import slice_of
from testbed.ml.training.schema import OptimizerPart
from testbed_versatilefl.maintenance import DynamicUpdate, Maintenance
from testbed_versatilefl.planner import VersatileOptions

RATE, SAMPLES, INPUTS, SENDERS, STEPS = 0.1, 3, 4, 3, 60
NEURONS = (range(3), range(3, 5))
"""Of the layer, by device."""


class Expected:
    """The layer undivided, each neuron with its saved gradient."""

    def __init__(self, weight, bias, limit):
        self.weight, self.bias, self.limit = weight, bias, limit
        self.saved = [None] * 5
        self.used = [0] * 5

    def learn(self, neuron, inputs, gradient, fresh):
        if fresh:
            self.saved[neuron], self.used[neuron] = (
                (gradient @ inputs, gradient.sum()),
                0,
            )
        elif self.saved[neuron] is None or self.used[neuron] >= self.limit:
            return
        else:
            self.used[neuron] += 1
        rows, bias = self.saved[neuron]
        self.weight[neuron] -= RATE * rows
        self.bias[neuron] -= RATE * bias


@pytest.mark.parametrize("granularity", ["layer", "neuron", "link"])
@pytest.mark.parametrize(("limit", "place"), [(0, 2), (1, 2), (4, 2), (4, 1)])
def test_gradients_equal_those_of_numpy(granularity, limit, place):
    """The first layer, whose inputs are the samples, passes nothing on."""
    model = chain("m", (INPUTS,), 2, [("a", [Linear(5)]), ("b", [Linear(2)])])
    layer = graph_of(model).layers[0]
    parts = [slice_of(layer, neurons) for neurons in NEURONS]
    shards = [
        LayerShard(
            layer,
            part,
            draw_tensors(model, [(layer, part)], 7),
            OptimizerPart(learning_rate=RATE),
        )
        for part in parts
    ]
    whole = draw_tensors(model, [(layer, slice_of(layer, range(5)))], 7)
    named = {
        tensor.dim(): tensor.detach().numpy().copy().astype(np.float64)
        for tensor in whole.values()
    }
    expected = Expected(named[2], named[1], limit)
    options = VersatileOptions(backward_granularity=granularity, grad_reuse_bw=limit)
    complete = [True, True]

    def maintained(at):
        async def confirm(layer, arrived):
            return complete[1 - at]

        return Maintenance(DynamicUpdate(options), confirm)

    devices = [maintained(at) for at in range(2)]
    draws = np.random.default_rng(limit)
    for step in range(STEPS):
        inputs = draws.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
        losses = draws.normal(size=(SENDERS, SAMPLES, 5)).astype(np.float32)
        heard = draws.random((SENDERS, 2)) < (0.75 if granularity == "layer" else 0.5)
        before = expected.weight.copy()
        for at, (shard, missing, neurons) in enumerate(
            zip(shards, devices, NEURONS, strict=True)
        ):
            shard.forward(step, torch.from_numpy(inputs))
            sent = tuple(
                SenderPart(
                    f"s{s}",
                    range(1),
                    torch.from_numpy(losses[s][:, neurons.start : neurons.stop])
                    if heard[s, at]
                    else None,
                )
                for s in range(SENDERS)
            )
            complete[1 - at] = bool(heard[:, 1 - at].all())
            usable = asyncio.run(
                missing.usable_losses(ReceivedParts(place + 1, step, SAMPLES, 2, sent))
            )
            work = missing.learn(shard, place, step, usable.values, usable)
            passed = None if work is None else work()
            some = heard[:, at].any() and place > 1
            assert (passed is not None) == some
            if some:
                own = (losses * heard[:, at, None, None]).sum(axis=0)[
                    :, neurons.start : neurons.stop
                ]
                assert passed.numpy() == pytest.approx(
                    own @ before[neurons.start : neurons.stop], abs=1e-4
                )
        fresh = {
            "layer": [heard.all()] * 2,
            "neuron": heard.all(axis=0),
            "link": heard.any(axis=0),
        }[granularity]
        for at, neurons in enumerate(NEURONS):
            for neuron in neurons:
                gradient = (losses[:, :, neuron] * heard[:, at, None]).sum(axis=0)
                expected.learn(neuron, inputs, gradient, fresh[at])
        found = [
            {tensor.dim(): tensor.numpy() for tensor in shard.state().values()}
            for shard in shards
        ]
        assert np.concatenate([each[2] for each in found]) == pytest.approx(
            expected.weight, abs=1e-4
        )
        assert np.concatenate([each[1] for each in found]) == pytest.approx(
            expected.bias, abs=1e-4
        )
    assert max(expected.used) <= limit


def test_incomplete_results_and_dropped_batches_give_no_new_gradients():
    options = VersatileOptions(thres_fw="50%")
    missing = Maintenance(DynamicUpdate(options), None)
    mine = SenderPart("a", range(1), torch.ones(2, 1), {"rates": [1.0, 1.0]})
    lost = SenderPart("b", range(1, 2), None)
    assert asyncio.run(
        missing.usable_results(ReceivedParts(2, 0, 2, 2, (mine, lost)))
    ) == Usable(None, "saved")
    other = SenderPart("b", range(1, 2), torch.ones(2, 1), {"rates": [0.5, 0.5]})
    usable = asyncio.run(
        missing.usable_results(ReceivedParts(2, 1, 2, 2, (mine, other)))
    )
    assert (usable.values.tolist(), usable.gradient_source) == ([[1, 1], [1, 1]], "new")
    poor = tuple(
        SenderPart(name, range(1), torch.ones(2, 1), {"rates": [1.0, 0.25]})
        for name in "ab"
    )
    nothing = asyncio.run(missing.usable_results(ReceivedParts(2, 2, 2, 2, poor)))
    assert nothing == Usable(None, "nothing")
    assert missing.learn(None, 2, 2, None, nothing) is None


def test_past_outputs_replace_missing_parts_and_missing_values():
    missing = Maintenance(
        DynamicUpdate(VersatileOptions(substitute_past_outputs=True)), None
    )
    mine = SenderPart("a", range(1), torch.ones(2, 1), {"rates": []})

    def inputs(batch, tensor, gaps=None):
        other = SenderPart("b", range(1, 3), tensor, {"rates": []}, gaps)
        return missing.inputs(ReceivedParts(0, batch, 2, 3, (mine, other))).tolist()

    assert inputs(0, None) == [[1, 0, 0]] * 2, "nothing is known of the past"
    assert inputs(1, torch.tensor([[2.0, 3.0], [4.0, 7.0]])) == [[1, 2, 3], [1, 4, 7]]
    assert inputs(2, None) == [[1, 3, 5]] * 2
    gaps = torch.tensor([[True, False], [False, False]])
    assert inputs(3, torch.tensor([[0.0, 8.0], [9.0, 9.0]]), gaps) == [
        [1, 3, 8],
        [1, 9, 9],
    ]
    assert inputs(4, None) == [[1, 3, 5]] * 2, "what came in part is not kept"
