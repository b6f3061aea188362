"""What the coordinator concludes from the answers to its question, once no gradients came in time: three cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Case = Literal["restart", "refill", "redistribute"]


@dataclass(frozen=True)
class FailureCase:
    """Which of FTPipeHD's three cases this is, and whom it concerns."""

    case: Case
    """``restart``: all are there as they were. ``refill``: one came back empty, its partition stays. ``redistribute``:
    some are gone, or more than one is empty; the model is cut again, over those that are there."""
    gone: tuple[str, ...]
    """Stages that did not answer, in the order of the stages."""
    empty: tuple[str, ...]
    """Stages that answered, but have started again and hold nothing."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Stages that have nothing any more to fetch from."""
        return (*self.gone, *self.empty)


def classify_failure(stages: Mapping[str, float], answers: Mapping[str, float]) -> FailureCase:
    """Compare incarnations: what each stage's device had when it was configured, and what it answered with.

    A device that has another incarnation than it was configured with has lost its memory, whatever it says. Who answers
    without being a stage does not matter here.
    """
    gone = tuple(device for device in stages if device not in answers)
    empty = tuple(device for device, before in stages.items() if device in answers and answers[device] != before)
    if gone or len(empty) > 1:
        return FailureCase("redistribute", gone, empty)
    return FailureCase("refill" if empty else "restart", gone, empty)
