"""What each device does of each layer; pure, and the same on every device.

What a layer takes and makes is counted in elements of one sample, flattened channel after channel: a range of
channels is then a range of elements, and a fully connected layer reads a convolution's output as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from testbed.methods.distributed.partition.distributed_plan import DistributedPlan
from testbed.methods.distributed.partition.ranges import NOTHING, Range, scaled
from testbed.methods.distributed.partition.shares import divide, proportional
from testbed.models.graph import Graph, GraphLayer

Way = Literal["direct", "source", "row"]
"""An exchange, or ``row``: every layer is whole and goes from its owner to the next one's; nothing passes the source
for that."""
TaskKind = Literal["none", "outputs", "sums", "whole", "channels"]
"""``outputs``: some output channels from all of the input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the layer as it is. ``channels``: a layer that treats each channel by itself, on some of them."""


@dataclass(frozen=True)
class LayerTask:
    """What one device does of one layer."""

    work: TaskKind = "none"
    takes: Range = NOTHING
    """Elements of the layer's input that it computes from."""
    makes: Range = NOTHING
    """Output channels that it ends up with; for ``sums`` those that it merges, of everybody's sums."""


IDLE = LayerTask()


def is_alias(layer: GraphLayer, way: Way) -> bool:
    """Say whether a layer only names what others have made."""
    return way == "direct" and layer.joins


def by_chunks(layer: GraphLayer, task: LayerTask) -> bool:
    """Whether a device computes its part chunk by chunk, and sends each as soon as it is there."""
    return task.work in ("outputs", "sums") or (task.work == "whole" and layer.splits)


def tasks_of(
    graph: Graph, plan: DistributedPlan, way: Way, index: int, homes: Mapping[int, tuple[Range, ...]]
) -> tuple[LayerTask, ...]:
    """Return what each device does of a layer that is not tiled.

    ``homes``: by earlier value and device, the elements that the device has made.
    """
    layer, decided, everyone = graph.layers[index], plan.layers[index], range(len(plan.devices))
    everything = Range(0, layer.inputs)
    if decided.scheme in ("lop", "fuse1"):
        return tuple(LayerTask("outputs", everything, made) if made.size else IDLE for made in decided.outputs)
    if decided.scheme in ("lip", "fuse2"):
        merging = _merging(graph, plan, way, index)
        each = layer.inputs // layer.input_channels
        return tuple(
            LayerTask("sums", scaled(taken, each), made) for taken, made in zip(decided.inputs, merging, strict=True)
        )
    whole = LayerTask("whole", everything, Range(0, layer.output[0]))
    if is_alias(layer, way):
        return (IDLE,) * len(everyone)
    if way == "direct" and layer.division == "moves":
        # Each device moves the pixels that it has.
        return (whole,) * len(everyone)
    (first, *more) = layer.sources
    if way == "direct" and layer.by_channel and not more and any(home.size for home in homes.get(first, ())):
        channel = layer.inputs // layer.output[0]
        return tuple(
            LayerTask("channels", home, Range(home.first // channel, home.last // channel)) if home.size else IDLE
            for home in homes[first]
        )
    owner = plan.source if decided.owner is None else decided.owner
    return tuple(whole if device == owner else IDLE for device in everyone)


def _merging(graph: Graph, plan: DistributedPlan, way: Way, index: int) -> tuple[Range, ...]:
    """Return which output channels of a layer's sums each device merges."""
    channels, decided = graph.layers[index].output[0], plan.layers[index]
    if way == "direct" and graph.readers[index]:
        return divide(channels, proportional([taken.size for taken in decided.inputs]))
    return tuple(Range(0, channels if device == plan.source else 0) for device in range(len(plan.devices)))
