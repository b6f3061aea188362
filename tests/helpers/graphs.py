"""Graphs of networks for the distributed planners, written by hand from the defining papers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from testbed.ml.models.graph import Graph, GraphLayer
from testbed.ml.models.layers import (
    Conv2d,
    Division,
    Layer,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Reorganise,
)
from testbed.ml.models.shapes import Shape
from testbed_stahl.options import DistributedOptions, PlanSettings


def fully_connected(name: str, sizes: Sequence[int], bias: bool = True) -> Graph:
    """Return a chain of fully connected layers; ``sizes`` are those of the input and of each output."""
    layers = [
        dense_layer(index, inputs, outputs, bias)
        for index, (inputs, outputs) in enumerate(pairwise(sizes))
    ]
    return Graph(name, tuple(layers))


def dense_layer(index: int, inputs: int, outputs: int, bias: bool = True) -> GraphLayer:
    linear = Linear(outputs, bias)
    return GraphLayer(f"fc{index + 1}", (linear,), (inputs,), (index - 1,))


FOUR_LAYERS = fully_connected("four layers", (4, 8, 16, 4, 4), bias=False)
"""The worked example of Stahl et al., Fig. 1."""


def convolution_layer(
    name: str, shape: Shape, channels: int, kernel: int, source: int, stride: int = 1
) -> GraphLayer:
    conv = Conv2d(channels, kernel, stride, kernel // 2)
    return GraphLayer(name, (conv, LeakyReLU()), shape, (source,))


def pooling_layer(name: str, shape: Shape, source: int) -> GraphLayer:
    return GraphLayer(name, (MaxPool2d(),), shape, (source,))


def yolov2(size: int = 608) -> Graph:
    """Return YOLOv2 for COCO, with layers numbered from 0 as in Darknet, without the detection layer."""
    steps = [
        *(
            (32, 3),
            "pool",
            (64, 3),
            "pool",
            (128, 3),
            (64, 1),
            (128, 3),
            "pool",
            (256, 3),
            (128, 1),
            (256, 3),
            "pool",
        ),
        *((512, 3), (256, 1), (512, 3), (256, 1), (512, 3), "pool"),
        *((1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3), (1024, 3), (1024, 3)),
        *("route", (64, 1), "reorg", "join", (1024, 3), (425, 1)),
    ]
    layers: list[GraphLayer] = []
    shape: Shape = (3, size, size)
    for index, step in enumerate(steps):
        before = index - 1
        if step == "pool":
            layer = pooling_layer(f"max{index}", shape, before)
        elif step == "route":
            # Layer 16 is the last one before the final pooling: its finer output skips layers 17 to 24.
            layer = GraphLayer(f"route{index}", (), layers[16].output, (16,))
        elif step == "reorg":
            layer = GraphLayer(f"reorg{index}", (Reorganise(),), shape, (before,))
        elif step == "join":
            channels = layers[27].output[0] + layers[24].output[0]
            layer = GraphLayer(f"route{index}", (), (channels, *shape[1:]), (27, 24))
        else:
            assert isinstance(step, tuple)
            layer = convolution_layer(f"conv{index}", shape, *step, before)
        layers.append(layer)
        shape = layer.output
    return Graph("yolov2", tuple(layers))


@dataclass(frozen=True)
class HalvingLayer(Layer):
    """An indivisible layer, which combines each ``by`` values into one."""

    by: int = 2

    @property
    def division(self) -> Division:
        return "channels"

    def output(self, shape: Shape) -> Shape:
        return (shape[0] // self.by,)


@st.composite
def random_chains(draw: st.DrawFn, most: int = 8) -> Graph:
    """Return a chain of up to ``most`` fully connected layers, with some halving layers between them."""
    layers: list[GraphLayer] = []
    inputs = draw(st.integers(1, 40))
    for index in range(draw(st.integers(1, most))):
        can_halve = bool(layers) and inputs % 2 == 0
        # One layer in five halves, where that is possible.
        if can_halve and draw(st.integers(0, 4)) == 0:
            halving = HalvingLayer()
            layer = GraphLayer(f"p{index}", (halving,), (inputs,), (index - 1,))
        else:
            layer = dense_layer(index, inputs, draw(st.integers(1, 40)))
        layers.append(layer)
        inputs = layer.outputs
    return Graph("chain", tuple(layers))


def plan_settings(
    scheme: str = "optimal", source: int = 0, samples: int = 1, **options: object
) -> PlanSettings:
    """Return the settings for a plan of a distributed inference."""
    method_options = DistributedOptions.model_validate({"scheme": scheme, **options})
    return PlanSettings(method_options, source, samples)
