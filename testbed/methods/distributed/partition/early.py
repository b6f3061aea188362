"""Which of the first layers are done by tiles instead of by channels."""

from __future__ import annotations

from testbed.errors import InputError
from testbed.methods.distributed.partition.network import IMAGE, Network


def early_layers(network: Network) -> int:
    """Return how many of the first layers are better tiled than divided by channels.

    Feature-dominated layers have more elements entering and leaving than weights. The cut is where the sum of
    (features - weights) over the layers with weights before it is largest; pooling right after it is tiled too.
    Layer 16 of YOLOv2 at 608x608, as in Stahl et al., Section 5.
    """
    best, total, cut = 0, 0, 0
    for index in range(len(network.layers)):
        if not _tiles(network, index):
            break
        layer = network.layers[index]
        if layer.weights == 0:
            if cut == index and _closes(network, index + 1):
                cut = index + 1
            continue
        total += layer.inputs + layer.outputs - layer.weights
        if total > best and _closes(network, index + 1):
            best, cut = total, index + 1
    return cut


def check_early(network: Network, count: int) -> None:
    """Raise `InputError` where so many first layers cannot be tiled, naming the nearest smaller number that can."""
    if count <= len(network.layers) and _can_be(network, count):
        return
    nearest = max(fewer for fewer in range(min(count, len(network.layers)) + 1) if _can_be(network, fewer))
    raise InputError(
        f"the first {count} layers of {network.name} cannot be tiled together, which takes convolutions "
        f"and pooling in a row, of which only the last one's output is used further on: use {nearest}",
        ("method", "early"),
    )


def _can_be(network: Network, count: int) -> bool:
    """Whether so many first layers can be tiled."""
    return count == 0 or (all(_tiles(network, index) for index in range(count)) and _closes(network, count))


def _tiles(network: Network, index: int) -> bool:
    """Whether a layer works on pixels near each other, and only on what the layer before it made."""
    layer = network.layers[index]
    return layer.kind in ("conv", "pool") and layer.sources == (index - 1,)


def _closes(network: Network, count: int) -> bool:
    """Whether nothing after the first ``count`` layers needs what is inside them, or the image."""
    inside = range(IMAGE, count - 1)
    return all(source not in inside for layer in network.layers[count:] for source in layer.sources)
