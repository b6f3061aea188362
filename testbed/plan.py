"""A plan: the assignment of model parts to devices, as plain values serialisable to JSON."""

from __future__ import annotations

from functools import cached_property
from typing import Generic, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny
from typing_extensions import TypeVar


class Assignment(BaseModel):
    """A part of the model on one device: units ``start`` to ``stop - 1`` as in `range`, whole or a share of each.

    A device may hold several assignments, and the same units may be on several devices, or several times on one.

    >>> Assignment(device="worker1", start=3, stop=6, memory=4e6).device
    'worker1'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    device: str
    start: int
    stop: int
    memory: float
    """Predicted peak bytes of weights, gradients, optimizer state and activations."""
    part: str | None = None
    """Description of the part of each unit (``outputs 0 to 63``) if units are divided; None for whole units."""
    copy_for: str | None = None
    """The device served by this copy of the units if several devices have one each; None for a single or shared copy.
    """
    parameters: int | None = None
    """Number of parameters on the device; None for all parameters of its units."""
    flops: float | None = None
    """FLOPs of a forward pass of one sample; None for all FLOPs of its units."""
    seconds: float | None = None
    """Seconds of a forward pass of a batch; None to derive the time from the cost of the units."""
    pass_seconds: dict[str, float] | None = None
    """Seconds by kind of pass, such as ``{"prefill of 12": 1.5, "token": 0.2}``, of a workload with several kinds; the
    FLOPs are those of the last one. None for a single kind.
    """


class PlanDetails(BaseModel):
    """Method-specific additions to a plan; a method derives a class with fields.

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

    >>> head = Assignment(device="a", start=0, stop=2, memory=1.0)
    >>> tail = Assignment(device="b", start=2, stop=4, memory=1.0)
    >>> plan = Plan(method="pipeline", coordinator="a", assignments=(head, tail))
    >>> plan.devices, plan.assignments_of("b") == (tail,)
    (('a', 'b'), True)
    """

    # Built with the first use: commands that plan nothing start sooner.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    method: str
    coordinator: str
    """The device whose program ends the run on return."""
    assignments: tuple[Assignment, ...]
    step_time: float | None = None
    """Predicted seconds per training step or inference; None if unpredictable."""
    steps: int | None = None
    """Maximum number of training steps if limited by the planner; the workload may have fewer."""
    # Without details the type's own default holds, which mypy does not follow.
    details: SerializeAsAny[DetailsType] = Field(default_factory=PlanDetails)  # type: ignore[assignment]

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Return the devices with an assignment, in the order of the plan, without duplicates."""
        return tuple(
            dict.fromkeys(assignment.device for assignment in self.assignments)
        )

    def assignments_of(self, device: str) -> tuple[Assignment, ...]:
        """Return the assignments of a device."""
        return self._by_device.get(device, ())

    @cached_property
    def _by_device(self) -> dict[str, tuple[Assignment, ...]]:
        lists: dict[str, list[Assignment]] = {}
        for assignment in self.assignments:
            lists.setdefault(assignment.device, []).append(assignment)
        return {device: tuple(assignments) for device, assignments in lists.items()}

    def part_of(self, device: str) -> Self:
        """Return the plan for a device: the whole plan for the coordinator, else only the device's assignments."""
        if device == self.coordinator:
            return self
        return self.model_copy(
            update={
                "assignments": self.assignments_of(device),
                "details": self.details.part_of(device),
            }
        )

    def memory(self, device: str) -> float:
        """Return the predicted peak bytes of all assignments of a device."""
        return sum(assignment.memory for assignment in self.assignments_of(device))

    def with_details(self, kind: type[OtherDetails]) -> Plan[OtherDetails]:
        """Return the plan with the details validated as the given class. Raises pydantic's ValidationError."""
        return Plan(
            method=self.method,
            coordinator=self.coordinator,
            assignments=self.assignments,
            step_time=self.step_time,
            steps=self.steps,
            details=kind.model_validate(self.details.model_dump(mode="json")),
        )
