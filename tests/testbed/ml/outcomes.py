"""Values of the events of a simulated run, for tests of methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of

Weights = Mapping[str, torch.Tensor]


def field_values(outcome: Outcome, event: str, field: str) -> list[Any]:
    """Return the values of one field of all events of a name, in the order of the events."""
    return [fields[field] for fields in fields_of(outcome, event)]


def loss_by_step(outcome: Outcome) -> dict[int, float]:
    """Return the last recorded loss of each step: after a recovery a step may be recorded again."""
    return {step["step"]: step["loss"] for step in fields_of(outcome, "step")}


def assert_same_events(outcome: Outcome, other: Outcome) -> None:
    """Compare all events of two runs, to the last bit."""
    events = [event.to_json() for event in outcome.events]
    assert events == [event.to_json() for event in other.events]


def assert_equal_weights(weights: Weights | None, expected: Weights | None) -> None:
    """Compare the expected tensors with those of the same names, to the last bit."""
    assert weights is not None
    assert expected is not None
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def times_of(outcome: Outcome, name: str) -> list[float]:
    """Return the times of all events of a name, in seconds."""
    return [event.time for event in outcome.events.of(name)]


def count_events(outcome: Outcome, name: str, **fields: Any) -> int:
    """Return the number of events of a name with these values of fields."""
    count = 0
    for event_fields in fields_of(outcome, name):
        count += fields.items() <= event_fields.items()
    return count


def events_without_values(
    outcome: Outcome,
) -> list[tuple[float, str, str, dict[str, Any]]]:
    """Return time, device, name and fields of all events, without losses and accuracies."""
    events = []
    for event in outcome.events:
        fields = dict(event.fields)
        fields.pop("loss", None)
        fields.pop("accuracy", None)
        events.append((event.time, event.device, event.event, fields))
    return events
