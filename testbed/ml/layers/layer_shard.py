"""Some neurons of one layer under training, for methods that divide a layer over devices (EdgePipe's super neurons).

A neuron is an output channel: an output feature of a fully connected layer, or a filter of a convolution. A
`LayerShard` holds all weights that enter its neurons, whereas a `testbed.ml.layers.shard.Shard` holds whole units.

The arithmetic of the outputs is in `testbed.ml.models.sliced`; this module adds gradients, updates, and the move of
neurons from one device to another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from testbed.ml.layers.shard import State, weights_of
from testbed.ml.lazy import torch
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.layers import Dropout
from testbed.ml.models.sliced import DenseStep, SlicedLayer, dense_forward, is_dense
from testbed.ml.models.slices import Channels, Slice, as_channels, pick
from testbed.ml.training.optimizers import MOMENTUM, Sgd
from testbed.ml.training.schema import OptimizerPart

_STATISTICS = ("running_mean", "running_var")
"""Running statistics of a normalisation: not trained, but moved with the channel."""


Gradients = dict[str, "torch.Tensor"]
"""Gradients by the name of their parameter, each of its shape."""


@dataclass(frozen=True)
class _AutogradForward:
    """A finished forward of any layer, whose gradients autograd computes."""

    inputs: torch.Tensor
    """(samples, elements)."""
    outputs: torch.Tensor
    """(samples, elements of the neurons)."""
    parameters: dict[str, torch.Tensor]
    """The parameters used in the forward: an update makes new ones."""

    def all_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        """Return the gradients of the inputs, (samples, elements), and of the parameters.

        ``gradient`` is the gradient of the outputs, with their shape.
        """
        wanted = [self.inputs, *self.parameters.values()]
        of_inputs, *of_parameters = self._gradients_of(wanted, gradient)
        assert of_inputs is not None
        return of_inputs, self._by_name(of_parameters)

    def parameter_gradients(self, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of the parameters alone."""
        wanted = list(self.parameters.values())
        of_parameters = self._gradients_of(wanted, gradient)
        return self._by_name(of_parameters)

    def _gradients_of(
        self, wanted: list[torch.Tensor], gradient: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        # As in `Shard.backward`: the outputs' gradient by this sum is ``gradient``, to the bit, and torch imports less
        # than if it were passed to `grad`.
        total = (self.outputs * gradient).sum()
        # A bias may be unused, before a normalisation for example.
        return torch.autograd.grad(total, wanted, allow_unused=True)

    def _by_name(self, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        named = {}
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                named[name] = gradient
        return named


@dataclass(frozen=True)
class _DenseForward:
    """A finished forward of a fully connected layer, whose gradients have a closed form."""

    step: DenseStep
    weight: str
    """Name of the weight matrix."""
    bias: str
    """Name of the bias."""

    def all_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        of_sums = self.step.of_sums(gradient)
        of_inputs = self.step.of_inputs(of_sums)
        return of_inputs, self._by_name(of_sums)

    def parameter_gradients(self, gradient: torch.Tensor) -> Gradients:
        of_sums = self.step.of_sums(gradient)
        return self._by_name(of_sums)

    def _by_name(self, of_sums: torch.Tensor) -> Gradients:
        of_weight, of_bias = self.step.of_parameters(of_sums)
        return {self.weight: of_weight, self.bias: of_bias}


class LayerShard:
    """A slice of a layer with its gradients and optimizer state.

    Values are (samples, elements), channel after channel. Several batches may be under way, each with its own key: in a
    pipeline a device forwards later batches before the losses of an earlier one arrive. Each backward uses the weights
    of its forward, whatever updates happened in between, and gradients accumulate until `update`. Arguments and results
    are never modified later.
    """

    def __init__(
        self, layer: GraphLayer, part: Slice, state: State, optimizer: OptimizerPart
    ) -> None:
        """Take a slice's tensors from `cut_tensors` or `draw_tensors`, and momentum if any.

        Raises ValueError for layers that cannot be divided by neurons, slices with incomplete neurons, and dropout,
        whose masks would depend on the division.
        """
        if not layer.splits:
            raise ValueError(
                f"{layer.name} is not divided by neurons: use a Shard of its unit"
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
        # The closed form takes the bias for granted; a layer with values for each channel has one.
        has_bias = layer.sequence[0].channel_values > 0
        self._has_closed_form = is_dense(layer) and has_bias
        """Whether the gradients have a closed form, which is faster than autograd for a few neurons."""
        # `is_dense` allows nothing but a ReLU after the fully connected layer.
        self._rectified = len(layer.sequence) > 1
        first = layer.names[0]
        self._names = (f"{first}.weight", f"{first}.bias")
        self._replace_slice(part, state)

    def _replace_slice(self, part: Slice, state: State) -> None:
        """Hold a slice with its tensors and momentum; drop the computations with the previous slice."""
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
            # Made anew after each update, so that backwards under way keep the weights of their forward.
            self._parameters: dict[str, torch.Tensor] = {}
            for name, tensor in self._tensors.items():
                if not name.endswith(_STATISTICS):
                    self._parameters[name] = torch.nn.Parameter(tensor)
            # The statistics are those of this object, so that training updates them in place.
            tensors = self._tensors | self._parameters
            self._tracked_layer = SlicedLayer(
                self.layer, self.part, tensors, training=True
            )
        return self._tracked_layer

    def forward(
        self, key: Hashable, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs of all neurons held, (samples, elements of the neurons).

        ``inputs`` is (samples, elements of the input channels ``columns``); missing channels count as zero. None means
        all channels the shard has weights for.
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
        outputs = dense_forward(inputs, weight, bias, rectified=self._rectified)
        step = DenseStep(inputs, weight, outputs, self._rectified)
        self._forwards[key] = _DenseForward(step, *self._names)
        return outputs

    def _weight_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = self._names
        return self._tensors[weight], self._tensors[bias]

    def backward(self, key: Hashable, gradient: torch.Tensor) -> torch.Tensor:
        """Accumulate gradients; return the gradient of the inputs, (samples, elements), with the shape given to
        `forward`.

        ``gradient`` is the gradient of the outputs. If several shards use an input, its gradient is the sum over all
        shards.
        """
        forward = self._forwards.pop(key)
        of_inputs, of_parameters = forward.all_gradients(gradient)
        self.add_gradients(of_parameters)
        return of_inputs

    def learn(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Accumulate gradients as `backward` does for (samples, elements), without the gradient of the inputs.

        The first layer with weights uses this method, because nobody needs the gradient of the samples.
        """
        forward = self._forwards.pop(key)
        of_parameters = forward.parameter_gradients(gradient)
        self.add_gradients(of_parameters)

    def infer(
        self, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs, (samples, elements), like `forward`, in evaluation mode and without keeping state."""
        if self._has_closed_form and columns is None:
            weight, bias = self._weight_tensors()
            return dense_forward(inputs, weight, bias, rectified=self._rectified)
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
        changed = {}
        for name, gradient in self._gradients.items():
            # Not multiplied by 1, which would copy each gradient for nothing.
            gradients[name] = gradient if scale == 1 else gradient * scale
            # A copy, since backwards under way need the weights of their forward.
            changed[name] = self._tensors[name].clone()
        self._sgd.step(changed, gradients)
        self._gradients.clear()
        self._tensors.update(changed)
        self._tracked_layer = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return a copy of the gradients accumulated since the last update."""
        gradients = {}
        for name, gradient in self._gradients.items():
            gradients[name] = gradient.clone()
        return gradients

    def add_gradients(self, gradients: State) -> None:
        """Add gradients of the same neurons computed earlier."""
        for name, added in gradients.items():
            if name in self._gradients:
                # Not in place: a gradient may be shared with its sender.
                self._gradients[name] = self._gradients[name] + added
            else:
                self._gradients[name] = added

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

        Computations under way and unused gradients are dropped. Raises ValueError for neurons not held.
        """
        held = self.part.rows
        remaining = as_channels(set(held) - set(neurons))
        given = {}
        kept = {}
        # Axis 0 of every tensor is the neurons: rows of weights, entries of per-channel values.
        for name, tensor in self.state().items():
            # Cloned, so that the state of all neurons can be freed.
            given[name] = pick(tensor, 0, neurons, held).clone()
            kept[name] = pick(tensor, 0, remaining, held)
        self._replace_slice(Slice(remaining, self.part.columns, remaining), kept)
        return given

    def take(self, neurons: Channels, state: State) -> None:
        """Add neurons with their state, momentum defaulting to zero; drop computations as `give` does.

        Raises ValueError for neurons already held.
        """
        held = self.part.rows
        if set(held) & set(neurons):
            raise ValueError(
                f"{self.layer.name}: some of the neurons {neurons} are held already"
            )
        own = self.state()
        # Tensors are joined in this order and then sorted, because a slice numbers its channels in ascending order.
        joined_order = (*held, *neurons)
        together = as_channels(joined_order)
        places = [joined_order.index(neuron) for neuron in together]
        ascending = torch.tensor(places, dtype=torch.long)
        joined: dict[str, torch.Tensor] = {}
        for name in own | dict(state):
            first = _tensor_or_zeros(own, name)
            second = _tensor_or_zeros(state, name)
            joined[name] = torch.cat([first, second]).index_select(0, ascending)
        self._replace_slice(Slice(together, self.part.columns, together), joined)


def _tensor_or_zeros(state: State, name: str) -> torch.Tensor:
    """Return a tensor of a state, or zeros in place of a missing momentum."""
    if name in state:
        return state[name]
    # Momentum begins with the first update, which one of two joined shards may not have had.
    weight = state[name.removeprefix(MOMENTUM)]
    return torch.zeros_like(weight)
