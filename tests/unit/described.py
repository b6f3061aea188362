"""Networks as the distributed planners see them, written down by hand from the papers that define them."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from hypothesis import strategies as st

from testbed.methods.distributed.partition.network import Layer, Network


def fully_connected(name: str, sizes: Sequence[int], channelwise: int = 1) -> Network:
    """Describe fully connected layers in a row: ``sizes`` are those of the input and of every layer's output."""
    layers = tuple(
        Layer(
            name=f"fc{index + 1}",
            kind="fc",
            input=(entering,),
            output=(leaving,),
            sources=(index - 1,),
            weights=entering * leaving,
            multiplications=entering * leaving,
            channelwise=channelwise,
        )
        for index, (entering, leaving) in enumerate(pairwise(sizes))
    )
    return Network(name, layers)


FOUR_LAYERS = fully_connected("four layers", (4, 8, 16, 4, 4), channelwise=0)
"""The worked example of Stahl et al., Fig. 1."""

Step = tuple[str, int, int] | tuple[str, int, int, int]


def convolution(name: str, shape: tuple[int, ...], channels: int, kernel: int, source: int, stride: int = 1) -> Layer:
    output = (channels, (shape[1] - 1) // stride + 1, (shape[2] - 1) // stride + 1)
    weights = kernel**2 * shape[0] * channels
    return Layer(
        name, "conv", shape, output, (source,), weights, weights * prod(output[1:]), 1, kernel, stride, kernel // 2
    )


def pooling(name: str, shape: tuple[int, ...], source: int) -> Layer:
    return Layer(name, "pool", shape, (shape[0], shape[1] // 2, shape[2] // 2), (source,), kernel=2, stride=2)


def yolov2(size: int = 608, first: int = 0) -> Network:
    """YOLOv2 on COCO, 0-based as Darknet counts it, without the last layer, which only reads the result."""
    steps = [
        *((32, 3), "pool", (64, 3), "pool", (128, 3), (64, 1), (128, 3), "pool", (256, 3), (128, 1), (256, 3), "pool"),
        *((512, 3), (256, 1), (512, 3), (256, 1), (512, 3), "pool"),
        *((1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3), (1024, 3), (1024, 3)),
        *("route", (64, 1), "reorg", "join", (1024, 3), (425, 1)),
    ]
    layers: list[Layer] = []
    shape: tuple[int, ...] = (3, size, size)
    for index, step in enumerate(steps):
        if step == "pool":
            layers.append(pooling(f"max{index}", shape, index - 1))
        elif step == "route":
            shape = layers[16].output
            layers.append(Layer(f"route{index}", "route", shape, shape, (16,)))
        elif step == "reorg":
            layers.append(
                Layer(f"reorg{index}", "reorg", shape, (4 * shape[0], shape[1] // 2, shape[2] // 2), (index - 1,))
            )
        elif step == "join":
            shape = (layers[27].output[0] + layers[24].output[0], *shape[1:])
            layers.append(Layer(f"route{index}", "route", shape, shape, (27, 24)))
        else:
            assert isinstance(step, tuple)
            layers.append(convolution(f"conv{index}", shape, *step, index - 1))
        shape = layers[-1].output
    return Network("yolov2", tuple(layers))


@st.composite
def chains(draw: st.DrawFn, most: int = 8) -> Network:
    """Layers in a row, fully connected in their sizes, with pooling here and there that halves what passes."""
    sizes = [draw(st.integers(1, 40))]
    layers: list[Layer] = []
    for index in range(draw(st.integers(1, most))):
        entering = sizes[-1]
        if layers and entering % 2 == 0 and draw(st.integers(0, 4)) == 0:
            layers.append(Layer(f"p{index}", "pool", (entering,), (entering // 2,), (index - 1,)))
        else:
            leaving = draw(st.integers(1, 40))
            work = entering * leaving
            layers.append(Layer(f"fc{index}", "fc", (entering,), (leaving,), (index - 1,), work, work, 1))
        sizes.append(layers[-1].output[0])
    return Network("chain", tuple(layers))
