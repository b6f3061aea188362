"""Some neurons of one layer under training, for methods dividing a layer over devices (EdgePipe's super neurons).

A `Shard` holds whole units, this class all weights entering some neurons. A neuron is an output channel.

The arithmetic is in `testbed.ml.models.sliced`; this module adds gradients, updates and moving neurons.
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
class _Recorded:
    """A forward of any layer, with gradients computed by autograd."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    parameters: dict[str, torch.Tensor]
    """The parameters used in the forward: an update makes new ones."""

    def back(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        """Return the gradients of the inputs, (samples, elements), and of the parameters used in the forward."""
        wanted = [self.inputs, *self.parameters.values()]
        of_inputs, *others = self._gradients_of(gradient, wanted)
        assert of_inputs is not None
        return of_inputs, self._named(others)

    def learn(self, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of the parameters alone."""
        wanted = list(self.parameters.values())
        return self._named(self._gradients_of(gradient, wanted))

    def _gradients_of(
        self, gradient: torch.Tensor, wanted: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        # As in `Shard.backward`: the gradient of this sum is the one given, to the bit, and imports less.
        total = (self.outputs * gradient).sum()
        # A bias may be unused, before a normalisation for example.
        return torch.autograd.grad(total, wanted, allow_unused=True)

    def _named(self, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        named = {}
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                named[name] = gradient
        return named


@dataclass(frozen=True)
class _Dense:
    """A forward of a fully connected layer, with gradients in closed form."""

    step: DenseStep
    weight: str
    bias: str

    def back(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
        sums = self.step.of_sums(gradient)
        return self.step.of_inputs(sums), self._parameter_gradients(sums)

    def learn(self, gradient: torch.Tensor) -> Gradients:
        return self._parameter_gradients(self.step.of_sums(gradient))

    def _parameter_gradients(self, sums: torch.Tensor) -> Gradients:
        of_weight, of_bias = self.step.of_parameters(sums)
        return {self.weight: of_weight, self.bias: of_bias}


class LayerShard:
    """A slice of a layer with its gradients and optimizer state.

    Values are (samples, elements), channel after channel. Several computations may be under way, each with its own key.
    Each backward uses the weights of its forward, whatever updates happened in between, and gradients accumulate until
    `update`. Arguments and results are never modified later.
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
        self._steps: dict[Hashable, _Recorded | _Dense] = {}
        """Forwards that wait for their gradient."""
        self._dense = is_dense(layer) and layer.sequence[0].channel_values > 0
        """Whether the gradients have a closed form, which is faster than autograd for a few neurons."""
        self._rectified = len(layer.sequence) > 1
        first = layer.names[0]
        self._names = (f"{first}.weight", f"{first}.bias")
        self._take_over(part, state)

    def _take_over(self, part: Slice, state: State) -> None:
        """Hold a slice with its tensors and momentum; computations under way are dropped."""
        self.part = part
        self._tensors = {}
        for name, tensor in weights_of(state).items():
            self._tensors[name] = tensor.detach().clone()
        momentum = {}
        for name, tensor in state.items():
            if name.startswith(MOMENTUM):
                momentum[name.removeprefix(MOMENTUM)] = tensor.clone()
        self._sgd.momentum = momentum
        self._sliced: SlicedLayer | None = None
        self._gradients.clear()
        self._steps.clear()

    @property
    def _current_layer(self) -> SlicedLayer:
        """The slice with the current weights, tracked by autograd."""
        if self._sliced is None:
            # Made anew after each update, so that backwards under way keep the weights of their forward.
            self._noted: dict[str, torch.Tensor] = {}
            for name, tensor in self._tensors.items():
                if not name.endswith(_STATISTICS):
                    self._noted[name] = torch.nn.Parameter(tensor)
            self._sliced = SlicedLayer(
                self.layer, self.part, self._tensors | self._noted, training=True
            )
        return self._sliced

    def forward(
        self, key: Hashable, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs of all neurons held, (samples, elements of the neurons).

        ``inputs`` is (samples, elements of the input channels ``columns``); missing channels count as zero. None means
        all channels the shard has weights for.
        """
        if not self._dense or columns is not None:
            inputs = inputs.detach().requires_grad_()
            layer = self._current_layer
            outputs = layer.finish(layer.sums(inputs, columns))
            self._steps[key] = _Recorded(inputs, outputs, self._noted)
            return outputs.detach()
        weight, bias = self._weight_tensors()
        outputs = dense_forward(inputs, weight, bias, rectified=self._rectified)
        step = DenseStep(inputs, weight, outputs, self._rectified)
        self._steps[key] = _Dense(step, *self._names)
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
        before, gradients = self._steps.pop(key).back(gradient)
        self.add_gradients(gradients)
        return before

    def learn(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Accumulate gradients as `backward` does for (samples, elements), without computing the gradient of the
        inputs.
        """
        self.add_gradients(self._steps.pop(key).learn(gradient))

    def infer(
        self, inputs: torch.Tensor, columns: Channels | None = None
    ) -> torch.Tensor:
        """Return the outputs, (samples, elements), like `forward`, in evaluation mode and without keeping state."""
        if self._dense and columns is None:
            return dense_forward(
                inputs, *self._weight_tensors(), rectified=self._rectified
            )
        layer = SlicedLayer(self.layer, self.part, self._tensors)
        with torch.no_grad():
            return layer.finish(layer.sums(inputs, columns))

    def forget(self, key: Hashable) -> None:
        """Drop the forward of a key that will not receive gradients."""
        self._steps.pop(key, None)

    def update(self, scale: float = 1.0) -> None:
        """Take one optimizer step with ``scale`` times the accumulated gradients, and reset them."""
        gradients = self._gradients
        if scale != 1:
            gradients = {name: each * scale for name, each in gradients.items()}
        # Copies, since backwards under way need the weights of their forward.
        changed = {name: self._tensors[name].clone() for name in gradients}
        self._sgd.step(changed, gradients)
        self._gradients.clear()
        self._tensors.update(changed)
        self._sliced = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return a copy of the gradients accumulated since the last update."""
        return {name: gradient.clone() for name, gradient in self._gradients.items()}

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
        for name, tensor in self.state().items():
            # Cloned, so that the state of all neurons can be freed.
            given[name] = pick(tensor, 0, neurons, held).clone()
            kept[name] = pick(tensor, 0, remaining, held)
        self._take_over(Slice(remaining, self.part.columns, remaining), kept)
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
        order = (*held, *neurons)
        together = as_channels(order)
        places = torch.tensor(
            [order.index(neuron) for neuron in together], dtype=torch.long
        )
        joined: dict[str, torch.Tensor] = {}
        for name in own | dict(state):
            # Momentum begins with the first update, which one of the two may not have had.
            weight = name.removeprefix(MOMENTUM)
            first = own[name] if name in own else torch.zeros_like(own[weight])
            second = state[name] if name in state else torch.zeros_like(state[weight])
            joined[name] = torch.cat([first, second]).index_select(0, places)
        self._take_over(Slice(together, self.part.columns, together), joined)
