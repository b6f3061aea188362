"""Which of the first layers are done by tiles instead of by channels."""

from __future__ import annotations

from testbed.common.errors import InputError
from testbed.models.graph import Graph
from testbed.models.shapes import INPUT


def early_layers(graph: Graph) -> int:
    """Return how many of the first layers are better tiled than divided by channels.

    Feature-dominated layers have more elements entering and leaving than weights. The cut is where the sum of
    (features - weights) over the layers with weights before it is largest; pooling right after it is tiled too.
    Layer 16 of YOLOv2 at 608x608, as in Stahl et al., Section 5.
    """
    best, total, cut = 0, 0, 0
    for index in range(len(graph.layers)):
        if not _tiles(graph, index):
            break
        layer = graph.layers[index]
        if layer.weights == 0:
            if cut == index and _closes(graph, index + 1):
                cut = index + 1
            continue
        total += layer.inputs + layer.outputs - layer.weights
        if total > best and _closes(graph, index + 1):
            best, cut = total, index + 1
    return cut


def check_early(graph: Graph, count: int) -> None:
    """Raise `InputError` where the first ``count`` layers cannot be tiled; it names the nearest number that can."""
    if count <= len(graph.layers) and _can_be(graph, count):
        return
    nearest = max(fewer for fewer in range(min(count, len(graph.layers)) + 1) if _can_be(graph, fewer))
    raise InputError(
        f"the first {count} layers of {graph.name} cannot be tiled together, which takes convolutions and pooling in a "
        "row, with less padding than their kernels, of which only the last one's output is used further on: "
        f"use {nearest}",
        ("method", "early"),
    )


def _can_be(graph: Graph, count: int) -> bool:
    """Whether the first ``count`` layers can be tiled."""
    return count == 0 or (all(_tiles(graph, index) for index in range(count)) and _closes(graph, count))


def _tiles(graph: Graph, index: int) -> bool:
    """Whether a layer works on pixels near each other, and only on what the layer before it made.

    With as much padding as its kernel, a tile at the border might see nothing of the map.
    """
    layer = graph.layers[index]
    near = layer.window is not None and layer.window.padding < layer.window.kernel
    return near and layer.sources == (index - 1,)


def _closes(graph: Graph, count: int) -> bool:
    """Whether nothing after the first ``count`` layers needs what is inside them, or the image."""
    inside = range(INPUT, count - 1)
    return all(source not in inside for layer in graph.layers[count:] for source in layer.sources)
