"""Networks as the distributed planners see them, written down by hand from the papers that define them."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Describe fully connected layers in a row: ``sizes`` are those of the input and of every layer's output."""
    return Graph(
        name,
        tuple(
            dense_layer(index, *sizes[index : index + 2], bias)
            for index in range(len(sizes) - 1)
        ),
    )


def dense_layer(
    index: int, entering: int, leaving: int, bias: bool = True
) -> GraphLayer:
    return GraphLayer(
        f"fc{index + 1}", (Linear(leaving, bias),), (entering,), (index - 1,)
    )


FOUR_LAYERS = fully_connected("four layers", (4, 8, 16, 4, 4), bias=False)
"""The worked example of Stahl et al., Fig. 1."""


def convolution_layer(
    name: str, shape: Shape, channels: int, kernel: int, source: int, stride: int = 1
) -> GraphLayer:
    return GraphLayer(
        name,
        (Conv2d(channels, kernel, stride, kernel // 2), LeakyReLU()),
        shape,
        (source,),
    )


def pooling_layer(name: str, shape: Shape, source: int) -> GraphLayer:
    return GraphLayer(name, (MaxPool2d(),), shape, (source,))


def yolov2(size: int = 608) -> Graph:
    """YOLOv2 on COCO, 0-based as Darknet counts it, without the last layer, which only reads the result."""
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
    found: list[GraphLayer] = []
    shape: Shape = (3, size, size)
    for index, step in enumerate(steps):
        if step == "pool":
            found.append(pooling_layer(f"max{index}", shape, index - 1))
        elif step == "route":
            found.append(GraphLayer(f"route{index}", (), found[16].output, (16,)))
        elif step == "reorg":
            found.append(
                GraphLayer(f"reorg{index}", (Reorganise(),), shape, (index - 1,))
            )
        elif step == "join":
            joined = (found[27].output[0] + found[24].output[0], *shape[1:])
            found.append(GraphLayer(f"route{index}", (), joined, (27, 24)))
        else:
            assert isinstance(step, tuple)
            found.append(convolution_layer(f"conv{index}", shape, *step, index - 1))
        shape = found[-1].output
    return Graph("yolov2", tuple(found))


@dataclass(frozen=True)
class HalvingLayer(Layer):
    """As many values as are left when each ``by`` of them become one: something that cannot be divided."""

    by: int = 2

    @property
    def division(self) -> Division:
        return "channels"

    def output(self, shape: Shape) -> Shape:
        return (shape[0] // self.by,)


@st.composite
def random_chains(draw: st.DrawFn, most: int = 8) -> Graph:
    """Layers in a row, fully connected in their sizes, with pooling here and there that halves what passes."""
    found: list[GraphLayer] = []
    entering = draw(st.integers(1, 40))
    for index in range(draw(st.integers(1, most))):
        if found and entering % 2 == 0 and draw(st.integers(0, 4)) == 0:
            found.append(
                GraphLayer(f"p{index}", (HalvingLayer(),), (entering,), (index - 1,))
            )
        else:
            found.append(dense_layer(index, entering, draw(st.integers(1, 40))))
        entering = found[-1].outputs
    return Graph("chain", tuple(found))


def plan_settings(
    scheme: str = "optimal", source: int = 0, samples: int = 1, **options: object
) -> PlanSettings:
    """Return what a plan of a distributed inference is asked for."""
    return PlanSettings(
        DistributedOptions.model_validate({"scheme": scheme, **options}),
        source,
        samples,
    )
