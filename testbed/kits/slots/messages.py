"""What super neurons cast to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.kits.messaging.typed import Typed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outputs(Typed, kind="outputs", key=("batch", "layer", "sender")):
    """The outputs of a device's neurons of a layer, (samples, values); of the output layer, the results it shares.

    Batches are numbered in the order in which they are fed, those of tests too.
    """

    batch: int
    layer: int
    tensor: torch.Tensor | None = None
    """None: there is nothing of this batch."""
    note: dict[str, Any] | None = None
    """What a method tells along."""


@dataclass(frozen=True)
class Losses(Typed, kind="losses", key=("batch", "layer", "sender")):
    """What a device's neurons of a layer add to the gradient of all outputs of the layer before, (samples, values)."""

    batch: int
    layer: int
    tensor: torch.Tensor | None = None
    """None: there is nothing of this batch."""
    note: dict[str, Any] | None = None
    """What a method tells along."""


@dataclass(frozen=True)
class Heard(Typed, kind="heard"):
    """Acknowledgement of a cast: the kind of message, its batch and layer."""

    what: str
    batch: int
    layer: int


KINDS = (Outputs, Losses, Heard)
