"""Some neurons of one layer under training, for methods that divide a layer over devices (EdgePipe's super neurons).

A neuron is an output channel: an output feature of a fully connected layer, or a filter of a convolution. A
`LayerShard` holds its neurons with all of their input weights, whereas a `testbed.ml.layers.shard.Shard` holds whole
units.

`testbed.ml.models.sliced` computes the outputs; this module adds gradients, updates, and the move of neurons from one
device to another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from testbed.ml.layers.shard import State, weights_of
from testbed.ml.lazy import torch
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.layers import Dropout
from testbed.ml.models.sliced import (
    DenseGradients,
    SlicedLayer,
    dense_forward,
    is_dense,
)
from testbed.ml.models.slices import Channels, Slice, as_channels, pick
from testbed.ml.training.optimizers import MOMENTUM, Sgd
from testbed.ml.training.schema import OptimizerPart

_STATISTICS = ("running_mean", "running_var")
"""Running statistics of a normalisation: not trained, but moved with the channel."""

Gradients = dict[str, "torch.Tensor"]
"""Gradients by the name of a parameter, each with the shape of the parameter."""


@dataclass(frozen=True)
class _AutogradForward:
    """A finished forward of any layer, whose gradients autograd computes."""

    inputs: torch.Tensor
    """(samples, elements)."""
    outputs: torch.Tensor
    """(samples, elements of the neurons)."""
    parameters: dict[str, torch.Tensor]
    """The parameters used in the forward; a later update replaces the parameters of the shard, not these."""

    def all_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        """Return the gradients of the inputs, (samples, elements), and of the parameters.

        ``gradient`` is the gradient of the outputs, with their shape.
        """
        tensors = [self.inputs, *self.parameters.values()]
        input_gradient, *parameter_gradients = self._gradients_of(tensors, gradient)
        assert input_gradient is not None
        return input_gradient, self._by_name(parameter_gradients)

    def parameter_gradients(self, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of the parameters alone."""
        tensors = list(self.parameters.values())
        parameter_gradients = self._gradients_of(tensors, gradient)
        return self._by_name(parameter_gradients)

    def _gradients_of(
        self, tensors: list[torch.Tensor], gradient: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        # As in `Shard.backward`: the derivative of this sum by the outputs is ``gradient``, to the bit, and torch
        # imports less than with ``gradient`` as an argument of `grad`.
        total = (self.outputs * gradient).sum()
        # A bias may be unused, before a normalisation for example.
        return torch.autograd.grad(total, tensors, allow_unused=True)

    def _by_name(self, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        named = {}
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                named[name] = gradient
        return named


@dataclass(frozen=True)
class _DenseForward:
    """A finished forward of a fully connected layer, whose gradients have a closed form."""

    gradients: DenseGradients
    weight: str
    """Name of the weight matrix."""
    bias: str
    """Name of the bias."""

    def all_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        sums_gradient = self.gradients.sum_gradient(gradient)
        input_gradient = self.gradients.input_gradient(sums_gradient)
        return input_gradient, self._by_name(sums_gradient)

    def parameter_gradients(self, gradient: torch.Tensor) -> Gradients:
        sums_gradient = self.gradients.sum_gradient(gradient)
        return self._by_name(sums_gradient)

    def _by_name(self, sums_gradient: torch.Tensor) -> Gradients:
        weight_gradient, bias_gradient = self.gradients.parameter_gradients(
            sums_gradient
        )
        return {self.weight: weight_gradient, self.bias: bias_gradient}


class LayerShard:
    """A slice of a layer with gradients and optimizer state.

    Inputs and outputs are (samples, elements), with the elements of one channel after those of another. Forwards of
    several batches may wait for their gradients, each with its own key: in a pipeline a device forwards later batches
    before the losses of an earlier batch arrive. Each backward uses the weights of its forward, whatever updates
    happened in between, and gradients accumulate until `update`. Tensors passed to or returned by a shard are never
    modified later.
    """

    def __init__(
        self, layer: GraphLayer, part: Slice, state: State, optimizer: OptimizerPart
    ) -> None:
        """Hold the slice ``part`` of a layer with tensors and momentum.

        ``state`` has the tensors of the slice, from `cut_tensors` or `draw_tensors`, and may have momentum. Raises
        ValueError for layers that cannot be divided by neurons, slices with incomplete neurons, and dropout, whose
        masks would depend on the division.
        """
        if not layer.splits:
            raise ValueError(
                f"{layer.name} cannot be divided by neurons: use a Shard of its unit"
            )
        if part.rows != part.channels:
            raise ValueError(
                f"{layer.name} is divided by inputs here, so every neuron is incomplete"
            )
        if any(isinstance(each, Dropout) for each in layer.sequence):
            raise ValueError(
                f"{layer.name} draws random numbers, which would depend on how it is divided"
            )
        self.layer = layer
        self.part = part
        self._sgd = Sgd(optimizer)
        self._gradients: dict[str, torch.Tensor] = {}
        self._forwards: dict[Hashable, _AutogradForward | _DenseForward] = {}
        """Forwards that wait for their gradient, by key."""
        # The closed form requires a bias: the only values for each channel that a fully connected layer may have.
        has_bias = layer.sequence[0].channel_values > 0
        self._has_closed_form = is_dense(layer) and has_bias
        """Whether the gradients have a closed form, which is faster than autograd for a few neurons."""
        # `is_dense` allows nothing but a ReLU after the fully connected layer.
        self._has_relu = len(layer.sequence) > 1
        prefix = layer.names[0]
        self._dense_names = (f"{prefix}.weight", f"{prefix}.bias")
        """Names of the weight matrix and the bias, if the layer is fully connected."""
        self._replace_slice(part, state)

    def _replace_slice(self, part: Slice, state: State) -> None:
        """Hold another slice with tensors and momentum; drop gradients and forwards of the previous slice."""
        self.part = part
        self._tensors = {}
        for name, tensor in weights_of(state).items():
            self._tensors[name] = tensor.detach().clone()
        momentum = {}
        for name, tensor in state.items():
            if name.startswith(MOMENTUM):
                momentum[name.removeprefix(MOMENTUM)] = tensor.clone()
        self._sgd.momentum = momentum
        self._tracked_layer: SlicedLayer | None = None
        self._gradients.clear()
        self._forwards.clear()

    @property
    def _current_layer(self) -> SlicedLayer:
        """The slice with the current weights, tracked by autograd."""
        if self._tracked_layer is None:
            # Created again after each update, since forwards that wait for their gradient need the former parameters.
            self._parameters: dict[str, torch.Tensor] = {}
            for name, tensor in self._tensors.items():
                if not name.endswith(_STATISTICS):
                    self._parameters[name] = torch.nn.Parameter(tensor)
            # Running statistics are not copied, so that the forwards of training update them in place.
            tensors = self._tensors | self._parameters
            self._tracked_layer = SlicedLayer(
                self.layer, self.part, tensors, training=True
            )
        return self._tracked_layer

    def forward(
        self, key: Hashable, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs of all neurons of the slice, (samples, elements of the neurons).

        ``inputs`` is (samples, elements of the input channels ``columns``); other channels count as zero. None means
        all input channels of the slice.
        """
        if self._has_closed_form and columns is None:
            return self._forward_dense(key, inputs)
        inputs = inputs.detach().requires_grad_()
        layer = self._current_layer
        sums = layer.sums(inputs, columns)
        outputs = layer.finish(sums)
        self._forwards[key] = _AutogradForward(inputs, outputs, self._parameters)
        return outputs.detach()

    def _forward_dense(self, key: Hashable, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weight_tensors()
        outputs = dense_forward(inputs, weight, bias, has_relu=self._has_relu)
        gradients = DenseGradients(inputs, weight, outputs, self._has_relu)
        weight_name, bias_name = self._dense_names
        self._forwards[key] = _DenseForward(gradients, weight_name, bias_name)
        return outputs

    def _weight_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight matrix and the bias of a fully connected layer."""
        weight_name, bias_name = self._dense_names
        return self._tensors[weight_name], self._tensors[bias_name]

    def backward(self, key: Hashable, gradient: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of the parameters; return the gradient of the inputs, (samples, elements).

        ``gradient`` is the gradient of the outputs, with their shape. If several shards use an input, the sum of their
        results is the gradient of this input.
        """
        forward = self._forwards.pop(key)
        input_gradient, parameter_gradients = forward.all_gradients(gradient)
        self.add_gradients(parameter_gradients)
        return input_gradient

    def learn(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Accumulate the gradients of the parameters as `backward` does, and compute no gradient of the inputs.

        The first layer with weights uses this method, because nobody needs the gradient of the samples.
        """
        forward = self._forwards.pop(key)
        parameter_gradients = forward.parameter_gradients(gradient)
        self.add_gradients(parameter_gradients)

    def infer(
        self, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs like `forward`, but in evaluation mode, and store nothing for a backward."""
        if self._has_closed_form and columns is None:
            weight, bias = self._weight_tensors()
            return dense_forward(inputs, weight, bias, has_relu=self._has_relu)
        layer = SlicedLayer(self.layer, self.part, self._tensors)
        with torch.no_grad():
            sums = layer.sums(inputs, columns)
            return layer.finish(sums)

    def forget(self, key: Hashable) -> None:
        """Drop the forward of a key that will not receive gradients."""
        self._forwards.pop(key, None)

    def update(self, scale: float = 1.0) -> None:
        """Take one optimizer step with ``scale`` times the accumulated gradients, and reset the gradients."""
        gradients = {}
        updated_tensors = {}
        for name, gradient in self._gradients.items():
            # Multiplying by 1 would copy each gradient for nothing.
            gradients[name] = gradient if scale == 1 else gradient * scale
            # A copy, since forwards that wait for their gradient need the former weights.
            updated_tensors[name] = self._tensors[name].clone()
        self._sgd.step(updated_tensors, gradients)
        self._gradients.clear()
        self._tensors.update(updated_tensors)
        self._tracked_layer = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return a copy of the gradients accumulated since the last update."""
        gradients = {}
        for name, gradient in self._gradients.items():
            gradients[name] = gradient.clone()
        return gradients

    def add_gradients(self, gradients: State) -> None:
        """Add gradients of the shard's parameters, which `backward` or an earlier `gradients` returned."""
        for name, gradient in gradients.items():
            if name in self._gradients:
                # A sum in place would change the caller's tensor.
                self._gradients[name] = self._gradients[name] + gradient
            else:
                self._gradients[name] = gradient

    def drop_gradients(self) -> None:
        """Reset the gradients accumulated since the last update."""
        self._gradients.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the slice's tensors, and of the momentum prefixed by ``MOMENTUM``."""
        state = {}
        for name, tensor in self._tensors.items():
            state[name] = tensor.detach().clone()
        for name, momentum in self._sgd.momentum.items():
            state[MOMENTUM + name] = momentum.clone()
        return state

    def give(self, neurons: Channels) -> dict[str, torch.Tensor]:
        """Remove neurons and return their state for another shard's `take`.

        Forwards that wait for their gradient and unused gradients are dropped. Raises ValueError for neurons that the
        slice lacks.
        """
        own_neurons = self.part.rows
        remaining = as_channels(set(own_neurons) - set(neurons))
        removed_state = {}
        remaining_state = {}
        # Axis 0 of every tensor is the neurons: rows of weights, entries of per-channel values.
        for name, tensor in self.state().items():
            # Cloned, so that the state of all neurons can be freed.
            removed_state[name] = pick(tensor, 0, neurons, own_neurons).clone()
            remaining_state[name] = pick(tensor, 0, remaining, own_neurons)
        part = Slice(rows=remaining, columns=self.part.columns, channels=remaining)
        self._replace_slice(part, remaining_state)
        return removed_state

    def take(self, neurons: Channels, state: State) -> None:
        """Add neurons with their state from `give`; drop forwards and gradients as `give` does.

        Missing momentum starts from zero. Raises ValueError for neurons that the slice has already.
        """
        own_neurons = self.part.rows
        if set(own_neurons) & set(neurons):
            raise ValueError(
                f"{self.layer.name}: some of the neurons {neurons} belong to this shard already"
            )
        own_state = self.state()
        # A slice numbers its channels in ascending order, so the joined tensors are sorted by neuron.
        joined_neurons = (*own_neurons, *neurons)
        sorted_neurons = as_channels(joined_neurons)
        places = [joined_neurons.index(neuron) for neuron in sorted_neurons]
        order = torch.tensor(places, dtype=torch.long)
        joined_state: dict[str, torch.Tensor] = {}
        for name in own_state | dict(state):
            own_tensor = _tensor_or_zeros(own_state, name)
            added_tensor = _tensor_or_zeros(state, name)
            joined = torch.cat([own_tensor, added_tensor])
            joined_state[name] = joined.index_select(0, order)
        part = Slice(
            rows=sorted_neurons, columns=self.part.columns, channels=sorted_neurons
        )
        self._replace_slice(part, joined_state)


def _tensor_or_zeros(state: State, name: str) -> torch.Tensor:
    """Return a tensor of a state, or zeros in place of a missing momentum."""
    if name in state:
        return state[name]
    # Momentum exists from the first update on, which the shard that held the neurons may not have had.
    weight = state[name.removeprefix(MOMENTUM)]
    return torch.zeros_like(weight)
