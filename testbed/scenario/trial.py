"""One run of a scenario: one point of its sweep, one repetition of that."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.experiment import Experiment
from testbed.scenario.schema import Scenario


@dataclass(frozen=True)
class Trial:
    """One point of a scenario's sweep in one repetition."""

    scenario: Scenario
    """Its ``sweep`` is empty and its ``repetitions`` 1; its ``seed`` is the repetition's."""
    experiment: Experiment
    """The same as a runtime needs it."""
    point: dict[str, object]
    """The sweep's values here, by dotted key; empty without a sweep."""
    repetition: int = 0
