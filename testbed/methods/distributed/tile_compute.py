"""Computing one tile of the early layers. Imports torch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from testbed.methods.distributed.ledger import Ledger
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.distributed_plan import Region
from testbed.methods.distributed.partition.tiles import padding
from testbed.models.sliced import SlicedLayer, SlicedShape

Part = tuple[Region, torch.Tensor]
"""Of a map, (samples, channels, height, width)."""


def compute_tile(
    flow: Dataflow,
    number: int,
    layers: Sequence[SlicedLayer | SlicedShape],
    inputs: torch.Tensor,
    taken: Mapping[int, torch.Tensor],
    ledger: Ledger,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Compute the fused early layers of one tile, from (samples, channels, height, width) of its first region.

    ``taken`` is what other tiles have of its maps, by lender, as these return it. Only at the border of a layer's map
    is there padding. Returns the same axes of the last region, and what others take of this tile, by borrower, as
    (samples, elements). The ledger counts that, and all that is held meanwhile beside ``inputs`` and ``taken``.
    """
    borrowed = _unpacked(flow, number, inputs, taken)
    lent: dict[int, list[torch.Tensor]] = {borrower: [] for lender, borrower in flow.overlaps if lender == number}
    values = inputs
    for index, (layer, made) in enumerate(zip(layers, flow.computed[number], strict=True)):
        parts = borrowed.get(index, [])
        if made.pixels:
            parts = [(made, ledger.hold(layer.tile(values, padding(layer.layer, made)))), *parts]
        if values is not inputs:
            ledger.drop(values)
        for borrower, pieces in lent.items():
            for each in flow.overlaps[number, borrower]:
                if each.layer == index:
                    pieces.append(ledger.hold(_cut(parts[0], each.region).flatten(1)))
        values = parts[0][1] if len(parts) == 1 and made.pixels else _joined(flow, number, index, inputs, parts, ledger)
        if made.pixels and values is not parts[0][1]:
            ledger.drop(parts[0][1])
    ledger.drop(values)
    found = {}
    for borrower, pieces in lent.items():
        found[borrower] = ledger.hold(torch.cat(pieces, dim=1))
        for piece in pieces:
            ledger.drop(piece)
    return values, found


def _unpacked(
    flow: Dataflow, number: int, inputs: torch.Tensor, taken: Mapping[int, torch.Tensor]
) -> dict[int, list[Part]]:
    """Return what a tile takes of others, by the layer that made it."""
    found: dict[int, list[Part]] = {}
    for lender, tensor in taken.items():
        overlaps = flow.overlaps[lender, number]
        for each, part in zip(overlaps, torch.split(tensor, [*map(flow.values, overlaps)], dim=1), strict=True):
            height, width = each.region.bottom - each.region.top, each.region.right - each.region.left
            found.setdefault(each.layer, []).append((each.region, part.reshape(len(inputs), -1, height, width)))
    return found


def _cut(part: Part, region: Region) -> torch.Tensor:
    around, values = part
    rows = slice(region.top - around.top, region.bottom - around.top)
    return values[:, :, rows, region.left - around.left : region.right - around.left]


def _joined(
    flow: Dataflow, number: int, index: int, like: torch.Tensor, parts: Sequence[Part], ledger: Ledger
) -> torch.Tensor:
    """Return what a tile needs of a layer's output, put together; empty where it needs nothing."""
    whole = flow.plan.tiles[number].regions[index + 1]
    size = (whole.bottom - whole.top, whole.right - whole.left)
    found = ledger.hold(like.new_empty(len(like), flow.graph.layers[index].output[0], *size))
    for region, values in parts:
        _cut((whole, found), region).copy_(values)
    return found
