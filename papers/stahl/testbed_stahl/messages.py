"""Messages between the members of a distributed inference; values are (samples, elements)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.messaging.typed_messages import ConfigurationMessage, TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.lazy import torch
from testbed.ml.pipeline.messages import Activation, Output


@dataclass(frozen=True)
class ConfigureMember(ConfigurationMessage, kind="configure", opens=True):
    """From the coordinator on the source: join this plan as a member."""

    plan: Mapping[str, Any]
    """A `DistributedPlan` as JSON."""
    given: bool
    """Whether the message has the member's slices of the weights; otherwise the seed gives them."""
    state: State


@dataclass(frozen=True)
class OutputPiece(ConfigurationMessage, kind="piece"):
    """To a member: elements of a layer's output, starting at ``first``."""

    request: int
    value: int
    """The layer that made the elements, or `INPUT`."""
    first: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class PartialSums(ConfigurationMessage, kind="sums"):
    """To the merging member: partial sums for output channels ``first`` to ``last`` (exclusive)."""

    request: int
    layer: int
    first: int
    last: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TileInput(ConfigurationMessage, kind="tile"):
    """From the source: input region of a tile, (samples, channels, height, width)."""

    request: int
    tile: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TileOutput(ConfigurationMessage, kind="tiled"):
    """To the source: output of a tile, (samples, channels, height, width)."""

    request: int
    tile: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TileOverlap(ConfigurationMessage, kind="overlap"):
    """To the member computing tile ``borrower``, or to the source for forwarding: region reused from another tile.

    (samples, elements), map after map in the order of `tiles.overlaps`.
    """

    request: int
    lender: int
    borrower: int
    tensor: torch.Tensor


MEMBER_KINDS: tuple[type[TypedMessage], ...] = (
    ConfigureMember, Activation, OutputPiece, PartialSums, TileInput, TileOverlap, TileOutput, Output,
)  # fmt: skip
"""`Activation` brings a request's images to the source, `Output` its result to the coordinator on the source."""
