"""Computing one tile of the early layers. Imports torch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from testbed.methods.distributed.ledger import Ledger
from testbed.methods.distributed.partition.distributed_plan import Tile
from testbed.methods.distributed.partition.tiles import padding
from testbed.models.sliced import SlicedLayer, SlicedShape


def compute_tile(
    layers: Sequence[SlicedLayer | SlicedShape], tile: Tile, inputs: torch.Tensor, ledger: Ledger
) -> torch.Tensor:
    """Compute the fused early layers of one tile, from (samples, channels, height, width) of its first region.

    The halo is within the regions; only at the border of a layer's map is there padding. Returns the same axes of the
    last region. What is held meanwhile is counted in the ledger, beside ``inputs``.
    """
    values = inputs
    for layer, region in zip(layers, tile.regions[1:], strict=True):
        after = ledger.hold(layer.tile(values, padding(layer.layer, region)))
        if values is not inputs:
            ledger.drop(values)
        values = after
    ledger.drop(values)
    return values
