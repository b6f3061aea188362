"""The state of the whole model at one step, put together from what the stages send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.methods.parts.shard import State

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Checkpoint:
    """Where training can go on from."""

    step: int
    """The next step to be done."""
    state: State | None
    """None is the state that the seed gives."""


class Collector:
    """Gathers a state unit by unit; several steps' may be on their way at once."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._pieces: dict[int, dict[int, Mapping[str, torch.Tensor]]] = {}

    def add(self, step: int, unit: int, state: State) -> Checkpoint | None:
        """Take in one unit; return the checkpoint that this completes, if it does."""
        pieces = self._pieces.setdefault(step, {})
        pieces[unit] = state
        if len(pieces) < self._units:
            return None
        self._pieces = {later: kept for later, kept in self._pieces.items() if later > step}
        return Checkpoint(step, {name: tensor for index in sorted(pieces) for name, tensor in pieces[index].items()})

    def clear(self) -> None:
        """Forget what is not complete: the rest of it will never come."""
        self._pieces.clear()
