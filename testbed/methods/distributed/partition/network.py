"""What fully distributed planning looks at: a network as a list of layers, each with its sizes and no weights.

The symbols are those of Stahl et al., "Fully Distributed Deep Learning Inference on Resource-Constrained Edge
Devices": layer l has M input and K output elements, Q weights and R multiplications. All figures are of one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from testbed.models.shapes import Shape

Kind = Literal["fc", "conv", "pool", "route", "reorg", "other"]
"""``route`` concatenates the channels of its sources, ``reorg`` moves pixels into channels. ``other`` is whatever a
source computes by itself: it is never split."""

IMAGE = -1
"""As the source of a layer: what enters the network."""


@dataclass(frozen=True)
class Place:
    """Where a layer is in the model: ``model.units[unit].layers[first:last]``, its activation among them."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True)
class Layer:
    """One layer with what follows it element by element: normalisation, activation, flattening."""

    name: str
    kind: Kind
    input: Shape
    """(channels, height, width) or (features,); of a route, the concatenation of all that enters. Flattening does not
    show: a fully connected layer after a feature map takes the map."""
    output: Shape
    sources: tuple[int, ...]
    """Indices of the layers whose outputs enter; `IMAGE` is the network's input."""
    weights: int = 0
    """Q: without biases."""
    multiplications: int = 0
    """R: with the weights."""
    channelwise: int = 0
    """Values kept for each output channel beside the weights: a bias, a normalisation."""
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1
    place: Place | None = None
    """None for a description that no model is behind."""

    @property
    def inputs(self) -> int:
        """M: elements that enter."""
        return math.prod(self.input)

    @property
    def outputs(self) -> int:
        """K: elements that leave."""
        return math.prod(self.output)

    @property
    def splits(self) -> bool:
        """Whether its weights can be divided over devices."""
        return self.kind == "fc" or (self.kind == "conv" and self.groups == 1)

    @property
    def output_channels(self) -> int:
        """What LOP divides: output channels of a convolution, output features of a fully connected layer."""
        return self.output[0]

    @property
    def input_channels(self) -> int:
        """What LIP divides: input channels of a convolution, input features of a fully connected layer."""
        return self.inputs if self.kind == "fc" else self.input[0]

    @property
    def parameters(self) -> int:
        """Everything that is stored: weights and channel-wise values."""
        return self.weights + self.channelwise * self.output[0]


@dataclass(frozen=True)
class Network:
    """Layers in an order in which they can be computed; the last one's output is the result."""

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if not layer.sources or not all(IMAGE <= source < index for source in layer.sources):
                raise ValueError(
                    f"layer {index} ({layer.name}) takes the outputs of {layer.sources}, not of earlier ones"
                )
            arriving = sum(self.outputs_of(source) for source in layer.sources)
            if layer.sources != (IMAGE,) and arriving != layer.inputs:
                raise ValueError(f"layer {index} ({layer.name}) takes {layer.inputs} elements, but {arriving} arrive")

    def outputs_of(self, index: int) -> int:
        """Return the elements that leave a layer, or that enter the network for `IMAGE`."""
        return self.layers[0].inputs if index == IMAGE else self.layers[index].outputs

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the layers that take its output."""
        return tuple(
            tuple(reader for reader, layer in enumerate(self.layers) if index in layer.sources)
            for index in range(len(self.layers))
        )

    def follows(self, index: int) -> bool:
        """Whether a layer takes the output of the one before it in the list and nothing else.

        Only then may what a device holds of that output be used again: pooling and routing in between happen at the
        source (Stahl et al., Section 5: such layers are counted but not partitioned).
        """
        return index > 0 and self.layers[index].sources == (index - 1,)

    def fuses(self, index: int) -> bool:
        """Whether a layer can be the first of a fused pair: both split, and nobody else needs what is between them."""
        return (
            index + 1 < len(self.layers)
            and self.layers[index].splits
            and self.layers[index + 1].splits
            and self.follows(index + 1)
            and self.readers[index] == (index + 1,)
        )

    @property
    def weights(self) -> int:
        """Q of all layers together."""
        return sum(layer.weights for layer in self.layers)

    @property
    def multiplications(self) -> int:
        """R of all layers together."""
        return sum(layer.multiplications for layer in self.layers)
