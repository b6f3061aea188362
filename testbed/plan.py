"""A plan: the assignment of model parts to devices, as plain values serialisable to JSON."""

from __future__ import annotations

from functools import cached_property
from typing import Generic, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny
from typing_extensions import TypeVar


class Piece(BaseModel):
    """A part of the model on one device: units ``first`` up to but without ``last``, whole or a share of each.

    A device may hold several pieces, and the same units may be on several devices, or several times on one.

    >>> Piece(device="worker1", first=3, last=6, memory=4e6).device
    'worker1'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    device: str
    first: int
    last: int
    memory: float
    """Predicted peak bytes of weights, gradients, optimizer state and activations."""
    part: str | None = None
    """Description of the part of each unit (``outputs 0 to 63``) if units are divided; None for whole units."""
    copy_for: str | None = None
    """The device served by this copy of the units if several devices have one each; None for a single or shared copy.
    """
    parameters: int | None = None
    """Number of parameters of the piece; None for all parameters of its units."""
    flops: float | None = None
    """FLOPs of a forward pass of one sample; None for all FLOPs of its units."""
    seconds: float | None = None
    """Seconds of a forward pass of a batch; None to derive the time from the cost of the units."""


class PlanDetails(BaseModel):
    """Method-specific additions to a plan; a method derives its own class.

    The base class accepts any keys, so that a reader of results without the method keeps the details as plain values.
    """

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    def part_of(self, device: str) -> Self:
        """Return the details relevant to a device other than the coordinator; by default all."""
        return self


DetailsType = TypeVar(
    "DetailsType", bound=PlanDetails, default=PlanDetails, covariant=True
)
"""The type of a plan's details."""
OtherDetails = TypeVar("OtherDetails", bound=PlanDetails)


class Plan(BaseModel, Generic[DetailsType]):
    """The result of a planner, sent to every device and stored with the results.

    >>> stages = (Piece(device="a", first=0, last=2, memory=1.0), Piece(device="b", first=2, last=4, memory=1.0))
    >>> plan = Plan(method="pipeline", coordinator="a", pieces=stages)
    >>> plan.devices, [piece.first for piece in plan.of("b")]
    (('a', 'b'), [2])
    """

    # Built with the first use: commands that plan nothing start sooner.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    method: str
    coordinator: str
    """The device whose program ends the run on return."""
    pieces: tuple[Piece, ...]
    step_time: float | None = None
    """Predicted seconds per training step or inference; None if unpredictable."""
    steps: int | None = None
    """Maximum number of training steps if limited by the planner; the workload may have fewer."""
    # Without details the type's own default holds, which mypy does not follow.
    details: SerializeAsAny[DetailsType] = Field(default_factory=PlanDetails)  # type: ignore[assignment]

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Return the devices with a piece, without duplicates, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.device for piece in self.pieces))

    def of(self, device: str) -> tuple[Piece, ...]:
        """Return the pieces of a device."""
        return self._by_device.get(device, ())

    @cached_property
    def _by_device(self) -> dict[str, tuple[Piece, ...]]:
        lists: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            lists.setdefault(piece.device, []).append(piece)
        return {device: tuple(pieces) for device, pieces in lists.items()}

    def part_of(self, device: str) -> Self:
        """Return the part of the plan for a device: the whole plan for the coordinator, else its own pieces."""
        if device == self.coordinator:
            return self
        return self.model_copy(
            update={"pieces": self.of(device), "details": self.details.part_of(device)}
        )

    def memory(self, device: str) -> float:
        """Return the predicted peak bytes of all pieces of a device."""
        return sum(piece.memory for piece in self.of(device))

    def with_details(self, kind: type[OtherDetails]) -> Plan[OtherDetails]:
        """Return the plan with its details validated as the given class. Raises pydantic's ValidationError."""
        return Plan(
            method=self.method,
            coordinator=self.coordinator,
            pieces=self.pieces,
            step_time=self.step_time,
            steps=self.steps,
            details=kind.model_validate(self.details.model_dump(mode="json")),
        )
