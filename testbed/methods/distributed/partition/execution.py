"""How a plan is carried out: over which links, in what pieces, how much of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
