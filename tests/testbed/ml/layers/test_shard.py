"""Numerics of shards without devices: splits, micro-batches, states, and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from testbed.ml.data.batches import cut_batch
from testbed.ml.layers.shard import Shard, restrict, unit_of, weights_of
from testbed.ml.models import Model, create
from testbed.ml.models.chain import chain
from testbed.ml.models.layers import Dropout, Flatten, Linear, ReLU
from testbed.ml.schedule import SCHEDULES, actions_by_stage, simulate_schedule
from tests.helpers.training import sgd_config

SEED = 7
SGD = sgd_config(learning_rate=0.1, momentum=0.9, weight_decay=0.01)
MODELS = {
    "mlp": create("mlp", {"hidden": [9, 8, 7]}, (1, 5, 5), 4),
    "cnn": create("cnn", {"channels": [3, 4, 5], "hidden": [8]}, (1, 8, 8), 4),
}
Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and labels."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for torch, as on a device: several threads are slower for small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw_batches(model: Model, sizes: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for size in sizes:
        images = torch.rand((size, *model.input), generator=generator)
        labels = torch.randint(model.classes, (size,), generator=generator)
        batches.append((images, labels))
    return batches


def train_with_torch(
    model: Model, sizes: Sequence[int]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Train the undivided model with torch alone and return the weights, and the gradients of each batch."""
    network = model.build(0, len(model.units), SEED)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    gradients = []
    for images, labels in draw_batches(model, sizes):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        batch_gradients = {}
        for name, parameter in network.named_parameters():
            batch_gradients[name] = parameter.grad.clone()
        gradients.append(batch_gradients)
        optimizer.step()
    return network.state_dict(), gradients


def train_stages(
    model: Model,
    sizes: Sequence[int],
    cuts: Sequence[int],
    schedule: str,
    micro_batches: int,
) -> dict[str, torch.Tensor]:
    """Train the stages between cuts, with all operations in the order of the schedule, and return their state."""
    bounds = itertools.pairwise((0, *cuts, len(model.units)))
    shards = [Shard(model, first, last, SEED, SGD) for first, last in bounds]
    last_stage = len(shards) - 1
    actions = actions_by_stage(SCHEDULES[schedule], len(shards), micro_batches)
    # Every action takes one second.
    slots = list(simulate_schedule(actions, lambda _stage, _action: 1.0))
    for step, (images, labels) in enumerate(draw_batches(model, sizes)):
        rows = cut_batch(len(labels), micro_batches)
        # By stage and micro-batch: inputs of the forward, and gradients for the backward.
        inputs = {(0, micro): images[part] for micro, part in enumerate(rows)}
        gradients: dict[tuple[int, int], torch.Tensor | None] = {}
        for slot in slots:
            stage = slot.stage
            micro = slot.action.micro
            shard = shards[stage]
            key = (step, micro)
            if slot.action.kind == "backward":
                received = None
                if stage != last_stage:
                    received = gradients.pop((stage, micro))
                gradients[stage - 1, micro] = shard.backward(key, received)
            elif stage == last_stage:
                samples = inputs.pop((stage, micro))
                shard.forward_loss(key, samples, labels[rows[micro]], len(labels))
            else:
                samples = inputs.pop((stage, micro))
                inputs[stage + 1, micro] = shard.forward(key, samples)
        for micro in range(micro_batches):
            # Samples need no gradient.
            assert gradients.pop((-1, micro)) is None
        for shard in shards:
            shard.update(step)
    state: dict[str, torch.Tensor] = {}
    for shard in shards:
        state |= shard.state()
    return state


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_stages_have_weights_of_undivided_model(
    name: str, micro_batches: int, schedule: str
) -> None:
    model = MODELS[name]
    # Neither size is a multiple of all numbers of micro-batches.
    sizes = [10, 7]
    expected, _ = train_with_torch(model, sizes)
    for stages in range(1, 4):
        for cuts in itertools.combinations(range(1, len(model.units)), stages - 1):
            state = train_stages(model, sizes, cuts, schedule, micro_batches)
            weights = weights_of(state)
            assert weights.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-6)


def test_gradients_of_micro_batches_sum_to_gradient_of_batch() -> None:
    model = MODELS["mlp"]
    samples = 11
    _, (expected,) = train_with_torch(model, [samples])
    # With a rate of 1 and neither momentum nor decay, an update subtracts the gradient.
    training = sgd_config(learning_rate=1.0)
    shard = Shard(model, 0, len(model.units), SEED, training)
    before = shard.state()
    ((images, labels),) = draw_batches(model, [samples])
    for micro, rows in enumerate(cut_batch(samples, 4)):
        shard.forward_loss(micro, images[rows], labels[rows], samples)
        shard.backward(micro)
    # The loss of each micro-batch was divided by the samples of the whole batch.
    shard.update(0)
    after = shard.state()
    for key, gradient in expected.items():
        change = before[key] - after[key]
        torch.testing.assert_close(change, gradient, rtol=0, atol=2e-7)


def train_batches(shard: Shard, batches: Sequence[Batch]) -> None:
    for step, (images, labels) in enumerate(batches):
        shard.forward_loss(step, images, labels, len(labels))
        shard.backward(step)
        shard.update(0)


def test_loaded_state_continues_training_bitwise_equally() -> None:
    model = MODELS["cnn"]
    count = len(model.units)
    batches = draw_batches(model, [6, 6, 6, 6])
    shard = Shard(model, 0, count, SEED, SGD)
    train_batches(shard, batches[:2])
    checkpoint = shard.state()
    train_batches(shard, batches[2:])

    restored = Shard(model, 0, count, SEED + 1, SGD)
    # Loading must replace momentum and gradients of an earlier training.
    train_batches(restored, batches[:1])
    restored.load(checkpoint)
    train_batches(restored, batches[2:])
    for name, tensor in shard.state().items():
        assert torch.equal(restored.state()[name], tensor), name


def test_training_does_not_modify_saved_state() -> None:
    model = MODELS["cnn"]
    batches = draw_batches(model, [6, 6, 6])
    shard = Shard(model, 0, len(model.units), SEED, SGD)
    train_batches(shard, batches[:2])
    checkpoint = shard.state()
    copies = {name: tensor.clone() for name, tensor in checkpoint.items()}
    train_batches(shard, batches[2:])
    restored = Shard(model, 0, len(model.units), SEED, SGD)
    restored.load(checkpoint)
    train_batches(restored, batches[2:])
    for name, tensor in copies.items():
        assert torch.equal(checkpoint[name], tensor), name


def test_state_is_restricted_to_units() -> None:
    shard = Shard(MODELS["mlp"], 1, 3, SEED, SGD)
    shard.forward(0, torch.rand(2, 9))
    shard.backward(0, torch.rand(2, 7))
    shard.update(0)
    state = shard.state()
    assert {unit_of(name) for name in state} == {1, 2}
    restricted = restrict(state, 2, 3)
    assert {unit_of(name) for name in restricted} == {2}
    # Weight and bias, each with momentum.
    assert len(restricted) == 4
    # Weight and bias of two units.
    assert len(weights_of(state)) == 4


def test_incomplete_state_is_rejected() -> None:
    shard = Shard(MODELS["mlp"], 0, 2, SEED, SGD)
    with pytest.raises(RuntimeError, match="Missing key"):
        shard.load({})


def test_inference_keeps_pending_forward() -> None:
    model = MODELS["mlp"]
    shard = Shard(model, 0, len(model.units), SEED, SGD)
    ((images, labels),) = draw_batches(model, [4])
    loss = shard.forward_loss(0, images, labels, 4)
    outputs = shard.infer(images)
    inference_loss = torch.nn.functional.cross_entropy(outputs, labels).item()
    assert inference_loss == pytest.approx(loss)
    assert not outputs.requires_grad
    shard.backward(0)


def test_dropout_is_independent_of_cuts_and_global_generator() -> None:
    layers = [
        ("a", [Flatten(), Linear(20), ReLU(), Dropout(0.5)]),
        ("b", [Linear(20), Dropout(0.5)]),
        ("c", [Linear(3)]),
    ]
    model = chain("dropping", (1, 3, 3), 3, layers)
    images = torch.rand(4, 1, 3, 3)
    key = (2, 1)
    expected = Shard(model, 0, 3, SEED, SGD).forward(key, images)
    torch.manual_seed(99)
    generator_state = torch.random.get_rng_state()
    sent = Shard(model, 0, 1, SEED, SGD).forward(key, images)
    outputs = Shard(model, 1, 3, SEED, SGD).forward(key, sent)
    assert torch.equal(outputs, expected)
    assert torch.equal(torch.random.get_rng_state(), generator_state)
    # Another micro-batch draws other numbers.
    other_outputs = Shard(model, 0, 3, SEED, SGD).forward((2, 2), images)
    assert not torch.equal(other_outputs, expected)
