"""What a planner decided: which device holds which part of the model. Plain facts, which travel as JSON."""

from __future__ import annotations

from functools import cached_property
from typing import Generic, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny
from typing_extensions import TypeVar


class Piece(BaseModel):
    """A part of the model on one device: units ``first`` up to but without ``last``, whole or a share of each.

    A device may hold several pieces, and the same units may lie on several devices, or several times on one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    device: str
    first: int
    last: int
    memory: float
    """Predicted peak bytes of weights, gradients, optimizer state and activations."""
    part: str | None = None
    """Which part of the units, in words (``outputs 0 to 63``), where they are divided; None: they are held whole."""
    copy_for: str | None = None
    """The device that this copy of the units works for, where each of several devices has one; None: it is the only
    copy, or one for all."""
    parameters: int | None = None
    """Values it holds of the model; None: all of its units'. Of units that are divided, its part of each."""
    flops: float | None = None
    """FLOPs that it computes of one sample in a forward; None: all of its units'."""
    seconds: float | None = None
    """Seconds of its device for the forward of a batch; None: what its units are charged."""


class Details(BaseModel):
    """What else a method's planner says; a method with something to say declares its own.

    As such, it takes whatever there is: a reader who does not know the method keeps its details as plain values.
    """

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    def part_of(self, device: str) -> Self:
        """Return what the program of a device that does not lead needs of them: all, unless a method says otherwise."""
        return self


PlanDetails = TypeVar("PlanDetails", bound=Details, default=Details, covariant=True)
"""The type of a plan's details."""
OtherDetails = TypeVar("OtherDetails", bound=Details)


class Plan(BaseModel, Generic[PlanDetails]):
    """What a planner decided; travels as JSON to every device and into the results."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    method: str
    lead: str
    """The device whose program ends the run when it returns."""
    pieces: tuple[Piece, ...]
    step_time: float | None = None
    """Predicted seconds per training step or inference, where the planner can predict them."""
    steps: int | None = None
    """Training steps at most, where the planner bounds them; the workload may have fewer."""
    # Without details the type's own default holds, which mypy does not follow.
    details: SerializeAsAny[PlanDetails] = Field(default_factory=Details)  # type: ignore[assignment]

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that hold a piece, each once, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.device for piece in self.pieces))

    def of(self, device: str) -> tuple[Piece, ...]:
        """Return the pieces of a device."""
        return self._by_device.get(device, ())

    @cached_property
    def _by_device(self) -> dict[str, tuple[Piece, ...]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.device, []).append(piece)
        return {device: tuple(pieces) for device, pieces in found.items()}

    def part_of(self, device: str) -> Self:
        """Return what the program of a device needs: all on the lead, its own pieces elsewhere."""
        if device == self.lead:
            return self
        return self.model_copy(update={"pieces": self.of(device), "details": self.details.part_of(device)})

    def memory(self, device: str) -> float:
        """Return the predicted peak bytes of all pieces of a device."""
        return sum(piece.memory for piece in self.of(device))

    def with_details(self, kind: type[OtherDetails]) -> Plan[OtherDetails]:
        """Return the plan with its details as a method declares them; raises pydantic's ValidationError."""
        return Plan(
            method=self.method,
            lead=self.lead,
            pieces=self.pieces,
            step_time=self.step_time,
            steps=self.steps,
            details=kind.model_validate(self.details.model_dump(mode="json")),
        )
