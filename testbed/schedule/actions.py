"""What a stage of a pipeline does, as data that prints: ``F0`` is the forward of micro-batch 0, ``B0`` its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Action:
    """One piece of a stage's work."""

    kind: ActionKind
    micro: int
    """Micro-batch, counted from 0 within its step; for an update the step."""

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro}"


Schedule = Callable[[int, int, int], Iterator[Action]]
"""(stages, stage, micro-batches) -> what that stage does in one step, in order; the update that ends it left out."""


def written(actions: Iterable[Action]) -> str:
    """Return actions as text, such as ``F0 F1 B0 B1``."""
    return " ".join(map(str, actions))


def in_flight(actions: Iterable[Action]) -> int:
    """Return the largest number of micro-batches forwarded and not yet done backward: whose activations are kept."""
    kept = most = 0
    for action in actions:
        kept += {"forward": 1, "backward": -1, "update": 0}[action.kind]
        most = max(most, kept)
    return most


def orders(schedule: Schedule, stages: int, micro_batches: int) -> list[Sequence[Action]]:
    """Return what every stage does in one step."""
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"no schedule for {stages} stages and {micro_batches} micro-batches")
    return [tuple(schedule(stages, stage, micro_batches)) for stage in range(stages)]
