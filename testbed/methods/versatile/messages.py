"""What devices tell each other, reliably, when neurons change hands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.kits.messaging.typed import Typed
from testbed.kits.slots.messages import KINDS as CASTS

if TYPE_CHECKING:
    from testbed.kits.layers.shard import State


@dataclass(frozen=True)
class Complete(Typed, kind="complete", key=("batch", "layer", "sender")):
    """Cast to the others of a layer: everything of a batch has arrived here. Only for the granularity ``layer``."""

    batch: int
    layer: int


@dataclass(frozen=True)
class Arrange(Typed, kind="arrange"):
    """From the coordinator: who holds what from now on."""

    version: int
    layers: list[dict[str, list[int]]]
    """By layer, the neurons of each device."""


@dataclass(frozen=True)
class Moved(Typed, kind="moved"):
    """Neurons with their weights, for whoever holds them by that arrangement or a newer one."""

    version: int
    layer: int
    neurons: list[int]
    state: State


@dataclass(frozen=True)
class Join(Typed, kind="join"):
    """From a device that holds nothing: told by one that has booted, cast by one that was no longer heard."""

    boot: bool = True


@dataclass(frozen=True)
class Leave(Typed, kind="leave"):
    """From a device that is about to leave, and hands over what it holds."""

    announced: bool = True


KINDS: tuple[type[Any], ...] = (*CASTS, Complete, Arrange, Moved, Join, Leave)
