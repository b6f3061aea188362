"""The numerics of a shard, without devices."""

import itertools

import pytest
import torch

from testbed.ml.data.batches import cut_batch
from testbed.ml.layers.shard import Shard, restrict, unit_of, weights_of
from testbed.ml.models import create
from testbed.ml.models.chain import chain
from testbed.ml.models.layers import Dropout, Flatten, Linear, ReLU
from testbed.ml.schedule import SCHEDULES, actions_by_stage, simulate_schedule
from tests.helpers.training import sgd_config

SGD = sgd_config(learning_rate=0.1, momentum=0.9, weight_decay=0.01)
SMALL = {
    "mlp": create("mlp", {"hidden": [9, 8, 7]}, (1, 5, 5), 4),
    "cnn": create("cnn", {"channels": [3, 4, 5], "hidden": [8]}, (1, 8, 8), 4),
}


@pytest.fixture(autouse=True)
def one_thread():
    """As devices compute; several threads only get in each other's way with tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches(model, sizes):
    generator = torch.Generator().manual_seed(5)
    for size in sizes:
        images = torch.rand((size, *model.input), generator=generator)
        yield images, torch.randint(model.classes, (size,), generator=generator)


def train_plain(model, sizes):
    whole = model.build(0, len(model.units), 7)
    optimizer = torch.optim.SGD(
        whole.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    gradients = []
    for images, labels in batches(model, sizes):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(whole(images), labels).backward()
        gradients.append(
            {
                name: parameter.grad.clone()
                for name, parameter in whole.named_parameters()
            }
        )
        optimizer.step()
    return whole.state_dict(), gradients


def train_split(model, sizes, cuts, schedule, count):
    """Do what the stages do in the order in which the schedule has them run."""
    bounds = list(itertools.pairwise((0, *cuts, len(model.units))))
    shards = [Shard(model, first, last, 7, SGD) for first, last in bounds]
    for step, (images, labels) in enumerate(batches(model, sizes)):
        parts = cut_batch(len(labels), count)
        passing = {(0, micro): images[part] for micro, part in enumerate(parts)}
        back = {}
        for slot in simulate_schedule(
            actions_by_stage(schedule, len(shards), count), lambda _stage, _action: 1.0
        ):
            stage, micro = slot.stage, slot.action.micro
            key, last = (step, micro), slot.stage == len(shards) - 1
            if slot.action.kind == "backward":
                gradient = None if last else back.pop((stage, micro))
                back[stage - 1, micro] = shards[stage].backward(key, gradient)
            elif last:
                shards[stage].forward_loss(
                    key, passing.pop((stage, micro)), labels[parts[micro]], len(labels)
                )
            else:
                passing[stage + 1, micro] = shards[stage].forward(
                    key, passing.pop((stage, micro))
                )
        assert all(back.pop((-1, micro)) is None for micro in range(count))
        for shard in shards:
            shard.update(step)
    return {name: tensor for shard in shards for name, tensor in shard.state().items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("name", SMALL)
def test_every_split_equals_the_undivided_model(name, count, schedule):
    model, sizes = SMALL[name], [10, 7]
    expected, _ = train_plain(model, sizes)
    for stages in range(1, 4):
        for cuts in itertools.combinations(range(1, len(model.units)), stages - 1):
            found = weights_of(
                train_split(model, sizes, cuts, SCHEDULES[schedule], count)
            )
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)


def test_gradients_equal_those_of_the_whole_batch():
    model = SMALL["mlp"]
    _, (expected, *_) = train_plain(model, [11])
    shard = Shard(model, 0, len(model.units), 7, sgd_config(learning_rate=1.0))
    before = shard.state()
    ((images, labels),) = batches(model, [11])
    for micro, part in enumerate(cut_batch(11, 4)):
        shard.forward_loss(micro, images[part], labels[part], 11)
        shard.backward(micro)
    shard.update(0)
    after = shard.state()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            before[key] - after[key], gradient, rtol=0, atol=2e-7
        )


def test_state_goes_on_bit_for_bit_in_another_shard():
    model = SMALL["cnn"]
    data = list(batches(model, [6, 6, 6, 6]))

    def train(shard, chosen):
        for step, (images, labels) in enumerate(chosen):
            shard.forward_loss(step, images, labels, len(labels))
            shard.backward(step)
            shard.update(0)

    one = Shard(model, 0, len(model.units), 7, SGD)
    train(one, data[:2])
    kept = one.state()
    untouched = {name: tensor.clone() for name, tensor in kept.items()}
    train(one, data[2:])

    other = Shard(model, 0, len(model.units), 8, SGD)
    train(other, data[:1])  # has momentum and gradients of its own to forget
    other.load(kept)
    train(other, data[2:])
    for name, tensor in one.state().items():
        assert torch.equal(other.state()[name], tensor), name
    for name, tensor in untouched.items():
        assert torch.equal(kept[name], tensor), f"{name} changed in the checkpoint"


def test_state_restricts_to_units():
    shard = Shard(SMALL["mlp"], 1, 3, 7, SGD)
    shard.forward(0, torch.rand(2, 9))
    shard.backward(0, torch.rand(2, 7))
    shard.update(0)
    state = shard.state()
    assert {unit_of(name) for name in state} == {1, 2}
    assert {unit_of(name) for name in restrict(state, 2, 3)} == {2}
    assert len(restrict(state, 2, 3)) == 4  # weight and bias, each with momentum
    assert len(weights_of(state)) == 4


def test_wrong_state_is_refused():
    shard = Shard(SMALL["mlp"], 0, 2, 7, SGD)
    with pytest.raises(RuntimeError, match="Missing key"):
        shard.load({})


def test_inference_leaves_training_alone():
    model = SMALL["mlp"]
    shard = Shard(model, 0, len(model.units), 7, SGD)
    ((images, labels),) = batches(model, [4])
    loss = shard.forward_loss(0, images, labels, 4)
    outputs = shard.infer(images)
    assert torch.nn.functional.cross_entropy(outputs, labels).item() == pytest.approx(
        loss
    )
    assert not outputs.requires_grad
    shard.backward(0)


def test_dropout_depends_neither_on_the_cut_nor_on_the_generator():
    layers = [
        ("a", [Flatten(), Linear(20), ReLU(), Dropout(0.5)]),
        ("b", [Linear(20), Dropout(0.5)]),
        ("c", [Linear(3)]),
    ]
    model = chain("dropping", (1, 3, 3), 3, layers)
    images = torch.rand(4, 1, 3, 3)
    whole = Shard(model, 0, 3, 7, SGD).forward((2, 1), images)
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    split = Shard(model, 0, 1, 7, SGD).forward((2, 1), images)
    split = Shard(model, 1, 3, 7, SGD).forward((2, 1), split)
    assert torch.equal(whole, split)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(whole, Shard(model, 0, 3, 7, SGD).forward((2, 2), images))
