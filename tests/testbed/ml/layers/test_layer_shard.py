"""Parts of a layer under training, against torch on the whole layer: outputs, gradients, updates, moved neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    NO_CHANNELS,
    Channels,
    Slice,
    as_channels,
    elements_of,
    pick,
)
from testbed.ml.training.schema import OptimizerPart

PLAIN = OptimizerPart(learning_rate=0.1, momentum=0, weight_decay=0)
MOMENTUM = OptimizerPart(learning_rate=0.05, momentum=0.9, weight_decay=0.01)
optimizers = st.sampled_from([PLAIN, MOMENTUM])
SAMPLES = 3


@dataclass(frozen=True)
class Case:
    """A model and the layer to divide."""

    model: Model
    layer: GraphLayer


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a fully connected layer, one with the values of a convolution as inputs, or a convolution."""
    kind = draw(st.sampled_from(["dense", "dense after convolution", "convolution"]))
    outputs = draw(st.integers(1, 9))
    inputs = draw(st.integers(1, 6))
    if kind == "dense":
        units = [("a", [Linear(outputs), ReLU()]), ("b", [Linear(2)])]
        model = chain("m", (inputs,), 2, units)
        return Case(model, graph_of(model).layers[0])
    stride = draw(st.integers(1, 2))
    kernel = draw(st.sampled_from([1, 3]))
    if draw(st.booleans()):
        # A normalisation replaces the bias.
        convolution = Conv2d(outputs, kernel, stride, kernel // 2, bias=False)
        first_unit = [convolution, BatchNorm2d(), LeakyReLU(0.1), Flatten()]
    else:
        convolution = Conv2d(outputs, kernel, stride, kernel // 2, bias=True)
        first_unit = [convolution, LeakyReLU(0.1), Flatten()]
    units = [("a", first_unit), ("b", [Linear(3), ReLU()]), ("c", [Linear(2)])]
    model = chain("m", (inputs, 5, 4), 2, units)
    index = 0 if kind == "convolution" else 1
    return Case(model, graph_of(model).layers[index])


@st.composite
def divisions(draw: st.DrawFn, size: int) -> list[Channels]:
    """Divide channels among one to four devices, each with consecutive or with arbitrary channels."""
    devices = draw(st.integers(1, 4))
    owner = st.integers(0, devices - 1)
    owners = draw(st.lists(owner, min_size=size, max_size=size))
    if draw(st.booleans()):
        owners = sorted(owners)
    parts = []
    for device in range(devices):
        owned = []
        for channel, channel_owner in enumerate(owners):
            if channel_owner == device:
                owned.append(channel)
        # A device without channels has no slice.
        if owned:
            parts.append(as_channels(owned))
    return parts


class WholeLayer:
    """An undivided layer with random parameters, trained by torch alone."""

    def __init__(
        self, model: Model, layer: GraphLayer, optimizer: OptimizerPart
    ) -> None:
        unit = model.build(layer.unit, layer.unit + 1, seed=5)[0]
        self.layer = layer
        self.modules = [unit[int(name)] for name in layer.modules]
        parameters = list(torch.nn.Sequential(*self.modules).parameters())
        for parameter in parameters:
            torch.nn.init.normal_(parameter)
        self.optimizer = torch.optim.SGD(
            parameters,
            lr=optimizer.learning_rate,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
        )

    def state(self) -> dict[str, torch.Tensor]:
        state = {}
        for name, module in zip(self.layer.names, self.modules, strict=True):
            for key, value in module.state_dict().items():
                state[f"{name}.{key}"] = value
        return state

    def cut_state(self, part: Slice) -> dict[str, torch.Tensor]:
        return cut_tensors(self.layer, part, self.state())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs.reshape(len(inputs), *self.layer.main_input)
        for module in self.modules:
            values = module(values)
        return values.flatten(1)

    def train(
        self, inputs: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step, and return the outputs and the gradient of the inputs."""
        inputs = inputs.clone().requires_grad_()
        outputs = self.forward(inputs)
        self.optimizer.zero_grad()
        outputs.backward(gradient)
        self.optimizer.step()
        assert inputs.grad is not None
        return outputs.detach(), inputs.grad


def draw_inputs_and_gradient(layer: GraphLayer) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, layer.inputs)
    gradient = torch.randn(SAMPLES, layer.outputs)
    return inputs, gradient


def are_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # Sums over parts of a layer round differently.
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def assert_states_match(shards: Sequence[LayerShard], reference: WholeLayer) -> None:
    for shard in shards:
        state = shard.state()
        for name, tensor in reference.cut_state(shard.part).items():
            assert are_close(state[name], tensor), name


def join_channels(
    parts: Sequence[Channels], values: Sequence[torch.Tensor], pixels: int
) -> torch.Tensor:
    """Join the values of all parts, (samples, elements of the part), in the order of channels."""
    elements: list[int] = []
    for part in parts:
        elements.extend(elements_of(part, pixels))
    joined = torch.cat(list(values), dim=1)
    return joined[:, torch.tensor(elements).argsort()]


# ------------------------------------------------------------------------------------------------------------- training


@settings(max_examples=20, deadline=None)
@given(cases())
def test_learn_has_parameter_gradients_of_backward(case: Case) -> None:
    layer = case.layer
    reference = WholeLayer(case.model, layer, PLAIN)
    state = reference.cut_state(layer.whole_slice)
    inputs, gradient = draw_inputs_and_gradient(layer)
    with_backward = LayerShard(layer, layer.whole_slice, state, PLAIN)
    with_backward.forward(0, inputs)
    with_backward.backward(0, gradient)
    with_learn = LayerShard(layer, layer.whole_slice, state, PLAIN)
    with_learn.forward(0, inputs)
    with_learn.learn(0, gradient)
    expected = with_backward.gradients()
    gradients = with_learn.gradients()
    assert gradients.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(gradients[name], tensor), name


@settings(max_examples=40, deadline=None)
@given(cases(), optimizers, st.data())
def test_shards_of_neurons_train_like_whole_layer(
    case: Case, optimizer: OptimizerPart, data: st.DataObject
) -> None:
    layer = case.layer
    reference = WholeLayer(case.model, layer, optimizer)
    all_inputs = range(layer.input_channels)
    parts = data.draw(divisions(layer.output_channels))
    shards = []
    for neurons in parts:
        part = Slice(neurons, all_inputs, neurons)
        shards.append(LayerShard(layer, part, reference.cut_state(part), optimizer))
    for step in range(3):
        inputs, gradient = draw_inputs_and_gradient(layer)
        outputs = [shard.forward(step, inputs) for shard in shards]
        input_gradient = torch.zeros(SAMPLES, layer.inputs)
        for shard, neurons in zip(shards, parts, strict=True):
            own_gradient = pick(gradient, 1, elements_of(neurons, layer.pixels))
            # Each shard uses all inputs, so their gradients are summed.
            input_gradient += shard.backward(step, own_gradient)
            shard.update()
        expected, expected_gradient = reference.train(inputs, gradient)
        assert are_close(join_channels(parts, outputs, layer.pixels), expected)
        assert are_close(input_gradient, expected_gradient)
        assert_states_match(shards, reference)


INPUTS = 6
NEURONS = 8


def make_dense(optimizer: OptimizerPart = PLAIN) -> tuple[GraphLayer, WholeLayer]:
    units = [("a", [Linear(NEURONS), ReLU()]), ("b", [Linear(2)])]
    model = chain("m", (INPUTS,), 2, units)
    layer = graph_of(model).layers[0]
    return layer, WholeLayer(model, layer, optimizer)


@settings(deadline=None)
@given(
    arrived=st.sets(st.integers(0, INPUTS - 1)),
    neurons=st.sets(st.integers(0, NEURONS - 1), min_size=1),
)
def test_missing_inputs_count_as_zero(arrived: set[int], neurons: set[int]) -> None:
    layer, reference = make_dense()
    rows = as_channels(neurons)
    columns = as_channels(arrived)
    part = Slice(rows, range(INPUTS), rows)
    shard = LayerShard(layer, part, reference.cut_state(part), PLAIN)
    inputs = torch.randn(SAMPLES, INPUTS)
    gradient = torch.randn(SAMPLES, len(rows))
    with_zeros = torch.zeros_like(inputs)
    with_zeros[:, list(columns)] = inputs[:, list(columns)]
    outputs = shard.forward("missing", pick(inputs, 1, columns), columns)
    assert are_close(outputs, pick(reference.forward(with_zeros), 1, rows))
    assert are_close(outputs, shard.forward("zeros", with_zeros))
    assert are_close(outputs, shard.infer(with_zeros))
    input_gradient = shard.backward("missing", gradient)
    expected = pick(shard.backward("zeros", gradient), 1, columns)
    assert are_close(input_gradient, expected)


def test_backward_uses_weights_of_its_forward() -> None:
    layer, reference = make_dense()
    state = reference.state()
    first, second = torch.randn(2, SAMPLES, INPUTS)
    gradient = torch.randn(SAMPLES, NEURONS)
    without_update = LayerShard(layer, layer.whole_slice, state, PLAIN)
    without_update.forward(1, second)
    expected = without_update.backward(1, gradient)
    shard = LayerShard(layer, layer.whole_slice, state, PLAIN)
    weight = shard.state()["0.0.weight"]
    shard.forward(0, first)
    shard.forward(1, second)
    shard.backward(0, gradient)
    shard.update()
    assert not torch.equal(shard.state()["0.0.weight"], weight)
    assert torch.equal(shard.backward(1, gradient), expected)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_update_scales_accumulated_gradients(scale: float) -> None:
    layer, reference = make_dense()
    state = reference.state()
    gradient = torch.randn(SAMPLES, NEURONS)
    scaled_gradients = LayerShard(layer, layer.whole_slice, state, PLAIN)
    scaled_update = LayerShard(layer, layer.whole_slice, state, PLAIN)
    for key in range(2):
        inputs = torch.randn(SAMPLES, INPUTS)
        scaled_gradients.forward(key, inputs)
        scaled_gradients.backward(key, scale * gradient)
        scaled_update.forward(key, inputs)
        scaled_update.backward(key, gradient)
    scaled_gradients.update()
    scaled_update.update(scale)
    expected = scaled_gradients.state()
    for name, tensor in scaled_update.state().items():
        assert are_close(tensor, expected[name]), name


def clone_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_training_does_not_modify_arguments_and_results() -> None:
    # Devices of one process share tensors.
    layer, reference = make_dense(MOMENTUM)
    initial = reference.state()
    initial_copies = clone_tensors(initial)
    shard = LayerShard(layer, layer.whole_slice, initial, MOMENTUM)
    outputs = shard.forward(0, torch.randn(SAMPLES, INPUTS))
    outputs_copy = outputs.clone()
    state = shard.state()
    state_copies = clone_tensors(state)
    shard.backward(0, torch.randn(SAMPLES, NEURONS))
    shard.update()
    assert torch.equal(outputs, outputs_copy)
    for name, tensor in initial.items():
        assert torch.equal(tensor, initial_copies[name]), name
    for name, tensor in state.items():
        assert torch.equal(tensor, state_copies[name]), name


def test_forgotten_forward_has_no_backward() -> None:
    layer, reference = make_dense()
    shard = LayerShard(layer, layer.whole_slice, reference.state(), PLAIN)
    shard.forward(1, torch.randn(SAMPLES, INPUTS))
    shard.forget(1)
    with pytest.raises(KeyError):
        shard.backward(1, torch.randn(SAMPLES, NEURONS))


# -------------------------------------------------------------------------------------------------------- moved neurons


@settings(max_examples=40, deadline=None)
@given(cases(), optimizers, st.data())
def test_moved_neurons_train_like_whole_layer(
    case: Case, optimizer: OptimizerPart, data: st.DataObject
) -> None:
    layer = case.layer
    reference = WholeLayer(case.model, layer, optimizer)
    all_inputs = range(layer.input_channels)
    state = {}
    for name, tensor in reference.state().items():
        # Shards have no counters of batches, which have no channels.
        if not name.endswith("tracked"):
            state[name] = tensor
    shards = []
    # The first shard has all neurons at first, the second none.
    for neurons in (range(layer.output_channels), NO_CHANNELS):
        part = Slice(neurons, all_inputs, neurons)
        tensors = {}
        for name, tensor in state.items():
            tensors[name] = pick(tensor, 0, part.rows)
        shards.append(LayerShard(layer, part, tensors, optimizer))
    for step in range(3):
        inputs, gradient = draw_inputs_and_gradient(layer)
        for shard in shards:
            neurons = shard.part.rows
            if len(neurons):
                shard.forward(step, inputs)
                own_gradient = pick(gradient, 1, elements_of(neurons, layer.pixels))
                shard.backward(step, own_gradient)
                shard.update()
        reference.train(inputs, gradient)
        assert_states_match(shards, reference)
        # Weights, statistics and momentum move with a neuron.
        giver = data.draw(st.integers(0, 1))
        neurons = shards[giver].part.rows
        if len(neurons):
            moved = as_channels(data.draw(st.sets(st.sampled_from(list(neurons)))))
            shards[1 - giver].take(moved, shards[giver].give(moved))
        owned = sorted([*shards[0].part.rows, *shards[1].part.rows])
        assert owned == list(range(layer.output_channels))


def test_neurons_cannot_be_taken_or_given_twice() -> None:
    layer, reference = make_dense()
    shard = LayerShard(layer, layer.whole_slice, reference.state(), PLAIN)
    with pytest.raises(ValueError, match="belong to this shard already"):
        shard.take(range(2), shard.state())
    shard.give(range(2))
    with pytest.raises(ValueError, match="not all among"):
        shard.give(range(2))


def test_slice_with_incomplete_neurons_is_rejected() -> None:
    layer, reference = make_dense()
    by_inputs = Slice(range(NEURONS), range(3), NO_CHANNELS)
    with pytest.raises(ValueError, match="divided by inputs"):
        LayerShard(layer, by_inputs, reference.cut_state(by_inputs), PLAIN)


def test_pooling_and_dropout_are_rejected() -> None:
    units = [
        ("a", [Conv2d(2, 1), MaxPool2d(), Flatten()]),
        ("b", [Linear(2), Dropout()]),
    ]
    pooling, dropout = graph_of(chain("m", (1, 2, 2), 2, units)).layers[1:]
    for layer in (pooling, dropout):
        with pytest.raises(ValueError, match=layer.name):
            LayerShard(layer, layer.whole_slice, {}, PLAIN)


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_drawn_slice_equals_slice_of_whole_model(
    case: Case, data: st.DataObject
) -> None:
    layer = case.layer
    seed = 9
    state = case.model.build(0, len(case.model.units), seed).state_dict()
    rows = data.draw(divisions(layer.output_channels))[0]
    columns = data.draw(divisions(layer.input_channels))[0]
    part = Slice(rows, columns, rows)
    drawn = draw_tensors(case.model, [(layer, part)], seed)
    expected = cut_tensors(layer, part, state)
    assert drawn.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(drawn[name], tensor), name
