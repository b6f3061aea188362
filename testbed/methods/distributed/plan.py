"""What a fully distributed inference is: for each layer who computes which channels, and who owns which tile.

A device is an index into ``devices``; ranges are half-open. Pydantic models, because a plan travels as JSON to every
device (`testbed.methods.distributed.planner.DistributedDetails`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from testbed.methods.distributed.parts import Range

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
    """The device that computes a ``whole`` layer."""
    outputs: tuple[Range, ...] = ()
    """Each device's output channels, for ``lop`` and ``fuse1``; empty ranges for devices that take no part."""
    inputs: tuple[Range, ...] = ()
    """Each device's input channels, for ``lip`` and ``fuse2``, where they are the outputs of its ``fuse1``."""


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
    """The scheme as the scenario names it."""
    devices: tuple[str, ...]
    source: int
    """Holds the image, collects and merges what the others compute, and computes its own share."""
    layers: tuple[LayerPlan, ...]
    """One for each layer of the network."""
    tiling: Tiling | None = None
    shares: tuple[float, ...] = ()
    """Each device's share of every layer that is split, before rounding to whole channels; none where nothing is."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles; none where nothing is tiled."""
        return self.tiling.tiles if self.tiling else ()

    @property
    def tiled(self) -> int:
        """How many of the first layers are done by tiles."""
        return len(self.tiles[0].regions) - 1 if self.tiles else 0
