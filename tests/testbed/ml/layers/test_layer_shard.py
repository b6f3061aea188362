"""Parts of a layer under training beside torch on the undivided layer: forward, gradients, updates, moving neurons."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.graph import GraphLayer, graph_of
from testbed.ml.models.layers import (
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    ReLU,
)
from testbed.ml.models.sliced import cut_tensors, draw_tensors
from testbed.ml.models.slices import (
    NONE,
    Channels,
    Slice,
    as_channels,
    elements_of,
    pick,
)
from testbed.ml.training.schema import OptimizerPart

OPTIMIZERS = [
    OptimizerPart(learning_rate=0.1, momentum=0, weight_decay=0),
    OptimizerPart(learning_rate=0.05, momentum=0.9, weight_decay=0.01),
]
SAMPLES = 3


@st.composite
def layers(draw: st.DrawFn) -> tuple[Model, int]:
    """Return a model and which of its found is divided: a dense one, behind a map or not, or a convolution."""
    kind = draw(st.sampled_from(["dense", "dense behind a map", "convolution"]))
    wide, narrow = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    if kind == "dense":
        return chain(
            "m", (narrow,), 2, [("a", [Linear(wide), ReLU()]), ("b", [Linear(2)])]
        ), 0
    norm = [BatchNorm2d()] * draw(st.booleans())
    stride, kernel = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3]))
    convolution = [
        Conv2d(wide, kernel, stride, kernel // 2, bias=not norm),
        *norm,
        LeakyReLU(0.1),
    ]
    units = [
        ("a", [*convolution, Flatten()]),
        ("b", [Linear(3), ReLU()]),
        ("c", [Linear(2)]),
    ]
    return chain("m", (narrow, 5, 4), 2, units), int(kind == "dense behind a map")


@st.composite
def divisions(draw: st.DrawFn, size: int, others: int = 0) -> list[Channels]:
    """Divide channels over one to four devices: anyhow, or in a row."""
    count = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
    owners = sorted(owners) if draw(st.booleans()) else owners
    parts = [
        as_channels(n for n, owner in enumerate(owners) if owner == device)
        for device in range(count)
    ]
    return [part for part in parts if len(part)]


class Whole:
    """An layer undivided, in torch alone."""

    def __init__(
        self, model: Model, layer: GraphLayer, optimizer: OptimizerPart
    ) -> None:
        unit = model.build(layer.unit, layer.unit + 1, seed=5)[0]
        self.modules = [unit[int(name)] for name in layer.modules]
        for module in self.modules:
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
        self.layer = layer
        own = torch.nn.Sequential(*self.modules)
        if any(True for _ in own.parameters()):
            self.optimizer = torch.optim.SGD(
                own.parameters(),
                lr=optimizer.learning_rate,
                momentum=optimizer.momentum,
                weight_decay=optimizer.weight_decay,
            )

    def state(self) -> dict[str, torch.Tensor]:
        pairs = zip(self.layer.names, self.modules, strict=True)
        return {
            f"{name}.{key}": value
            for name, module in pairs
            for key, value in module.state_dict().items()
        }

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs.reshape(len(inputs), *self.layer.entering)
        for module in self.modules:
            values = module(values)
        return values.flatten(1)

    def train(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and the gradient of the inputs; update."""
        inputs = inputs.clone().requires_grad_()
        outputs = self.forward(inputs)
        self.optimizer.zero_grad()
        outputs.backward(gradient)
        self.optimizer.step()
        assert inputs.grad is not None
        return outputs.detach(), inputs.grad


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def same_state(shards: list[LayerShard], whole: Whole) -> None:
    state = whole.state()
    for shard in shards:
        for name, tensor in cut_tensors(whole.layer, shard.part, state).items():
            assert close(shard.state()[name], tensor), name


def in_order(
    parts: list[Channels], values: list[torch.Tensor], each: int
) -> torch.Tensor:
    """Put values of channels, (samples, elements), into the order of the channels."""
    order = [element for part in parts for element in elements_of(part, each)]
    places = torch.empty(len(order), dtype=torch.long)
    places[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(values, dim=1)[:, places]


@settings(max_examples=20, deadline=None)
@given(layers())
def test_a_first_layer_learns_the_same_without_the_gradient_of_its_inputs(
    case: tuple[Model, int],
) -> None:
    model, index = case
    layer = graph_of(model).layers[index]
    whole = Whole(model, layer, OPTIMIZERS[0])
    state = cut_tensors(layer, layer.whole, whole.state())
    inputs, gradient = (
        torch.randn(SAMPLES, layer.inputs),
        torch.randn(SAMPLES, layer.outputs),
    )
    found = []
    for learn in (LayerShard.backward, LayerShard.learn):
        shard = LayerShard(layer, layer.whole, state, OPTIMIZERS[0])
        shard.forward(0, inputs)
        learn(shard, 0, gradient)
        found.append(shard.gradients())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


@settings(max_examples=40, deadline=None)
@given(layers(), st.sampled_from(OPTIMIZERS), st.data())
def test_neurons_divided_by_outputs_train_as_the_undivided_layer_does(
    case: tuple[Model, int], optimizer: OptimizerPart, data: st.DataObject
) -> None:
    model, index = case
    layer = graph_of(model).layers[index]
    whole = Whole(model, layer, optimizer)
    parts = data.draw(divisions(layer.output_channels))
    every = range(layer.input_channels)
    shards = [
        LayerShard(layer, part, cut_tensors(layer, part, whole.state()), optimizer)
        for part in (Slice(part, every, part) for part in parts)
    ]
    for step in range(3):
        inputs, gradient = (
            torch.randn(SAMPLES, layer.inputs),
            torch.randn(SAMPLES, layer.outputs),
        )
        outputs = [shard.forward(step, inputs) for shard in shards]
        sent = [
            shard.backward(step, pick(gradient, 1, elements_of(part, layer.pixels)))
            for shard, part in zip(shards, parts, strict=True)
        ]
        for shard in shards:
            shard.update()
        wanted, wanted_gradient = whole.train(inputs, gradient)
        assert close(in_order(parts, outputs, layer.pixels), wanted)
        assert close(torch.stack(sent).sum(0), wanted_gradient)
        same_state(shards, whole)


def dense(optimizer: OptimizerPart = OPTIMIZERS[0]) -> tuple[GraphLayer, Whole]:
    model = chain("m", (6,), 2, [("a", [Linear(8), ReLU()]), ("b", [Linear(2)])])
    layer = graph_of(model).layers[0]
    return layer, Whole(model, layer, optimizer)


@settings(deadline=None)
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 7), min_size=1))
def test_missing_inputs_count_as_zero(arrived: set[int], neurons: set[int]) -> None:
    layer, whole = dense()
    held, here = as_channels(neurons), as_channels(arrived)
    part = Slice(held, range(6), held)
    shard = LayerShard(
        layer, part, cut_tensors(layer, part, whole.state()), OPTIMIZERS[0]
    )
    inputs, gradient = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, len(held))
    with_zeros = torch.zeros_like(inputs)
    with_zeros[:, sorted(arrived)] = inputs[:, sorted(arrived)]
    outputs = shard.forward("some", pick(inputs, 1, here), here)
    assert close(outputs, pick(whole.forward(with_zeros), 1, held))
    assert close(outputs, shard.forward("zeros", with_zeros))
    assert close(outputs, shard.infer(with_zeros))
    found, wanted = shard.backward("some", gradient), shard.backward("zeros", gradient)
    assert close(found, pick(wanted, 1, here))


def test_a_backward_uses_the_weights_of_its_forward_and_gradients_add_up_until_the_update() -> (
    None
):
    layer, whole = dense()
    shard = LayerShard(layer, layer.whole, whole.state(), OPTIMIZERS[0])
    first, second = torch.randn(2, SAMPLES, 6)
    gradient = torch.randn(SAMPLES, 8)
    before = shard.state()
    expected = LayerShard(layer, layer.whole, before, OPTIMIZERS[0])
    expected.forward(1, second)
    wanted = expected.backward(1, gradient)
    shard.forward(0, first)
    shard.forward(1, second)
    shard.backward(0, gradient)
    shard.update()
    assert not torch.equal(shard.state()["0.0.weight"], before["0.0.weight"])
    assert torch.equal(shard.backward(1, gradient), wanted)
    for scale in (1.0, 0.5):
        one, two = (
            LayerShard(layer, layer.whole, before, OPTIMIZERS[0]) for _ in range(2)
        )
        for key, inputs in enumerate((first, second)):
            one.forward(key, inputs)
            one.backward(key, scale * gradient)
            two.forward(key, inputs)
            two.backward(key, gradient)
        one.update()
        two.update(scale)
        assert all(
            close(tensor, two.state()[name]) for name, tensor in one.state().items()
        )


def test_what_was_handed_out_and_in_does_not_change() -> None:
    layer, whole = dense(OPTIMIZERS[1])
    given = whole.state()
    kept = {name: tensor.clone() for name, tensor in given.items()}
    shard = LayerShard(layer, layer.whole, given, OPTIMIZERS[1])
    outputs = shard.forward(0, torch.randn(SAMPLES, 6))
    before, state = outputs.clone(), shard.state()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    shard.backward(0, torch.randn(SAMPLES, 8))
    shard.update()
    assert torch.equal(outputs, before)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in given.items())
    assert all(torch.equal(tensor, copies[name]) for name, tensor in state.items())
    shard.forward(1, torch.randn(SAMPLES, 6))
    shard.forget(1)
    with pytest.raises(KeyError):
        shard.backward(1, torch.randn(SAMPLES, 8))


@settings(max_examples=40, deadline=None)
@given(layers(), st.sampled_from(OPTIMIZERS), st.data())
def test_neurons_move_with_weights_and_momentum_and_training_goes_on_as_if_they_had_not(
    case: tuple[Model, int], optimizer: OptimizerPart, data: st.DataObject
) -> None:
    model, index = case
    layer = graph_of(model).layers[index]
    whole = Whole(model, layer, optimizer)
    every, owners = (
        range(layer.input_channels),
        [set(range(layer.output_channels)), set[int]()],
    )
    shards = []
    for owned in owners:
        part = Slice(as_channels(owned), every, as_channels(owned))
        state = {
            name: tensor
            for name, tensor in whole.state().items()
            if not name.endswith("tracked")
        }
        held = {name: pick(tensor, 0, part.rows) for name, tensor in state.items()}
        shards.append(LayerShard(layer, part, held, optimizer))
    for step in range(3):
        inputs, gradient = (
            torch.randn(SAMPLES, layer.inputs),
            torch.randn(SAMPLES, layer.outputs),
        )
        for shard in shards:
            if len(shard.part.rows):
                shard.forward(step, inputs)
                shard.backward(
                    step, pick(gradient, 1, elements_of(shard.part.rows, layer.pixels))
                )
                shard.update()
        whole.train(inputs, gradient)
        same_state(shards, whole)
        giver = data.draw(st.integers(0, 1))
        if len(shards[giver].part.rows):
            moved = as_channels(
                data.draw(st.sets(st.sampled_from(list(shards[giver].part.rows))))
            )
            shards[1 - giver].take(moved, shards[giver].give(moved))
        assert sorted([*shards[0].part.rows, *shards[1].part.rows]) == list(
            range(layer.output_channels)
        )


def test_what_cannot_be_moved_or_divided_is_refused() -> None:
    layer, whole = dense()
    state = whole.state()
    shard = LayerShard(layer, layer.whole, state, OPTIMIZERS[0])
    with pytest.raises(ValueError, match="held already"):
        shard.take(range(2), shard.state())
    shard.give(range(2))
    with pytest.raises(ValueError, match="not all among"):
        shard.give(range(2))
    by_inputs = Slice(range(8), range(3), NONE)
    with pytest.raises(ValueError, match="divided by inputs"):
        LayerShard(
            layer, by_inputs, cut_tensors(layer, by_inputs, state), OPTIMIZERS[0]
        )
    units = [
        ("a", [Conv2d(2, 1), MaxPool2d(), Flatten()]),
        ("b", [Linear(2), Dropout()]),
    ]
    pool, dropped = graph_of(chain("m", (1, 2, 2), 2, units)).layers[1:]
    for other in (pool, dropped):
        with pytest.raises(ValueError, match=other.name):
            LayerShard(other, other.whole, {}, OPTIMIZERS[0])


@settings(max_examples=30, deadline=None)
@given(layers(), st.data())
def test_a_slice_is_drawn_from_the_seed_as_it_is_cut_from_the_whole(
    case: tuple[Model, int], data: st.DataObject
) -> None:
    model, index = case
    state = model.build(0, len(model.units), seed=9).state_dict()
    found = graph_of(model).layers
    rows = data.draw(divisions(found[index].output_channels))[0]
    columns = data.draw(divisions(found[index].input_channels))[0]
    part = Slice(rows, columns, rows)
    drawn, wanted = (
        draw_tensors(model, [(found[index], part)], 9),
        cut_tensors(found[index], part, state),
    )
    assert drawn.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in drawn.items())


@given(st.sets(st.integers(0, 20)), st.integers(1, 4))
def test_channels_are_ranges_where_they_can_be(numbers: set[int], each: int) -> None:
    channels = as_channels(numbers)
    assert list(channels) == sorted(numbers)
    wanted = [
        number * each + value for number in sorted(numbers) for value in range(each)
    ]
    assert list(elements_of(channels, each)) == wanted
    row = torch.arange(100)
    assert pick(row, 0, channels).tolist() == sorted(numbers)
    if isinstance(channels, range) and channels:
        assert pick(row, 0, channels).data_ptr() == row[channels[0] :].data_ptr()
    assert pick(row[: len(channels)], 0, channels[1:], channels).tolist() == list(
        range(1, len(channels))
    )
