"""Fully distributed inference (Stahl et al.): which device computes which part of which layer; all of it pure."""

from testbed.partition.distributed.network import IMAGE, Layer, Network, Place, fully_connected
from testbed.partition.distributed.plan import (
    DistributedPlan,
    LayerPlan,
    Range,
    Region,
    Scheme,
    Tile,
    Tiling,
)

__all__ = [
    "IMAGE",
    "DistributedPlan",
    "Layer",
    "LayerPlan",
    "Network",
    "Place",
    "Range",
    "Region",
    "Scheme",
    "Tile",
    "Tiling",
    "fully_connected",
]
