"""What all methods in timeslots have in common, whatever their hooks do."""

from __future__ import annotations

from typing import TypeVar

from testbed.kits.slots.planner import SlotDetails, SlotOptions, timetable_of
from testbed.kits.slots.timeslots import draw
from testbed.method import Method
from testbed.plan import Plan

Given = TypeVar("Given", bound=SlotOptions)
Planned = TypeVar("Planned", bound=SlotDetails)


class SlotMethod(Method[Given, Planned]):
    """A method whose devices are super neurons that go by the clock of timeslots.

    Every device has all samples, of which those of the input layer read their own values, and the output layer the
    labels.
    """

    samples_everywhere = True

    def draw(self, plan: Plan[Planned]) -> str | None:
        """Draw the first timeslots, a line a group of layers."""
        return draw(timetable_of(plan.details))

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a super neuron; other devices begin none."""
        return frozenset({"forward", "backward", "evaluate"} if device in plan.devices else ())
