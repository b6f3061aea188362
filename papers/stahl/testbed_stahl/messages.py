"""Messages between the members (devices) of a distributed inference; values are (samples, elements)."""

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
    """Whether ``state`` has the weights; otherwise the receiver draws them from the seed."""
    state: State
    """The receiver's slices of the weights."""


@dataclass(frozen=True)
class OutputPiece(ConfigurationMessage, kind="piece"):
    """To a member: elements of a value, from ``first`` on."""

    request: int
    value: int
    """The layer whose output contains the elements, or `INPUT`."""
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
    """From the source: a tile's region of the image, (samples, channels, height, width)."""

    request: int
    tile: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TileOutput(ConfigurationMessage, kind="tiled"):
    """To the source: a tile's region of the last tiled layer's output, (samples, channels, height, width)."""

    request: int
    tile: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class TileOverlap(ConfigurationMessage, kind="overlap"):
    """Regions reused by the tile ``borrower`` from the tile ``lender``, map after map, (samples, elements).

    To the member that computes the borrower, or to the source, which forwards the message.
    """

    request: int
    lender: int
    borrower: int
    tensor: torch.Tensor


MEMBER_KINDS: tuple[type[TypedMessage], ...] = (
    ConfigureMember,
    # The images of a request, to the source.
    Activation,
    OutputPiece,
    PartialSums,
    TileInput,
    TileOverlap,
    TileOutput,
    # The result of a request, to the coordinator on the source's device.
    Output,
)
