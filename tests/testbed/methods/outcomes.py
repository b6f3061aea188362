"""Values of simulated runs that tests of methods compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from testbed.methods import METHODS
from testbed.plan import Plan
from testbed.scenario.schema import Scenario
from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of, problem_of


def values_of(outcome: Outcome, event_name: str, key: str) -> list[Any]:
    """Return one field of all events of a name."""
    return [fields[key] for fields in fields_of(outcome, event_name)]


def losses_of(outcome: Outcome) -> list[float]:
    """Return the losses of all steps in the order of their events."""
    return values_of(outcome, "step", "loss")


def times_of(outcome: Outcome, event_name: str) -> list[float]:
    """Return the times of all events of a name."""
    return [event.time for event in outcome.events.of(event_name)]


def final_evaluation(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of the last evaluation."""
    return fields_of(outcome, "evaluate")[-1]


def final_accuracy(outcome: Outcome) -> float:
    """Return the accuracy of the last evaluation."""
    return final_evaluation(outcome)["accuracy"]


def assert_finished(outcome: Outcome) -> None:
    """Check for a finished run, and show the error otherwise."""
    assert outcome.status == "finished", outcome.error


def assert_equal_weights(
    outcome: Outcome, expected: Mapping[str, torch.Tensor]
) -> None:
    """Check for bit-identical final weights."""
    assert outcome.weights is not None
    for name, tensor in expected.items():
        assert torch.equal(outcome.weights[name], tensor), name


def plan_of(spec: Scenario) -> Plan:
    """Return the plan of the scenario's method."""
    problem, _ = problem_of(spec)
    return METHODS[spec.workload.method.name].plan(problem)
