"""What a fully distributed inference is: for each layer who computes which channels, and who owns which tile.

A device is an index into ``devices``; ranges are half-open. Pydantic models, because a plan travels as JSON to every
device (`testbed.methods.distributed.planner.DistributedDetails`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from testbed.methods.distributed.parts import Range

OverlapMode = Literal["compute", "reuse"]
"""What neighbouring tiles both need of the maps between the early layers: ``compute``, each of them for itself, as in
the paper; ``reuse``, one of them, and the other takes it (`overlap`)."""
ExchangeMode = Literal["direct", "source"]
"""``source``: as in the paper, everything passes the source. It collects and merges, pools and routes, and spreads.
``direct``: each device sends its parts to those that need them. The sums of LIP and of a fused pair's second layer are
merged in ranges, one on each device, so that no device's link carries more than its share; pooling is done where the
channels are, and routing is nothing but knowing what to ask for.

Both move the same elements for LOP and for fused pairs, M (N - 1) for each output M that everybody needs (equations (7)
and (9) with the reuse of the own part), but over other links."""


@dataclass(frozen=True)
class Execution:
    """What a plan leaves open."""

    exchange: ExchangeMode = "source"
    samples: int = 1
    """In a request, at most."""
    in_flight: int = 1
    """Requests at once."""
    chunks: int = 16
    """Messages in which a device sends what it makes of a layer, at most."""
    least_chunk: int = 65_536
    """Bytes that each has at least, unless there is only one: smaller ones would hardly overlap more, and each message
    keeps an emulating host busy for about a millisecond."""
    overlap: OverlapMode = "compute"
    stealing: bool = False
    """Whether idle devices take tiles that wait for others: the source keeps each until somebody is to compute it."""


Scheme = Literal["lop", "lip", "fuse1", "fuse2", "whole", "tiled"]
"""``lop``: each device has all of the input and computes some output channels. ``lip``: each has some input channels
and computes partial sums of all outputs, which the source adds up before bias and activation. ``fuse1`` and
``fuse2``: as LOP and LIP, but what is between them stays where it is. ``whole``: one device alone. ``tiled``: each
device computes its tiles of the feature map."""


class Region(NamedTuple):
    """A rectangle of a feature map, in its pixels; all channels."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """How many."""
        return (self.bottom - self.top) * (self.right - self.left)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerPlan(_Frozen):
    """Who does what of one layer."""

    scheme: Scheme
    owner: int | None = None
    """Of a ``whole`` layer: who computes it."""
    outputs: tuple[Range, ...] = ()
    """Of ``lop`` and ``fuse1``: each device's output channels; empty ranges for devices that take no part."""
    inputs: tuple[Range, ...] = ()
    """Of ``lip`` and ``fuse2``: each device's input channels. Those of a ``fuse2`` are the outputs of its ``fuse1``."""


class Tile(_Frozen):
    """One part of the fused early layers."""

    row: int
    column: int
    device: int
    regions: tuple[Region, ...]
    """What the tile needs of the input of each early layer, and at the end what it computes of the last one's output.
    Within the map: what lies outside is padding."""


class Tiling(_Frozen):
    """Fused tile partitioning of the first layers: as many as there are regions in a tile, less one."""

    rows: int
    columns: int
    tiles: tuple[Tile, ...]


class DistributedPlan(_Frozen):
    """A whole inference; `testbed.methods.distributed.dataflow` says what that is for each device."""

    scheme: str
    """As the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """Holds the image, collects and merges what the others compute, and computes its own share."""
    layers: tuple[LayerPlan, ...]
    """One for each layer of the network."""
    tiling: Tiling | None = None
    shares: tuple[float, ...] = ()
    """Of each layer that is split, by device, before they are rounded to whole channels; none where nothing is."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles; none where nothing is tiled."""
        return self.tiling.tiles if self.tiling else ()

    @property
    def tiled(self) -> int:
        """How many of the first layers are done by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
