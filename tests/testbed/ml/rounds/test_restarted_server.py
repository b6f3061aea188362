"""A server that dies at any moment of a round records every step all the same, and records none as done that is not."""

from __future__ import annotations

import pytest

from tests.helpers.collaborating import run_simulated, scenario
from tests.helpers.runs import fields_of

METHODS = ("federated", "split-learning", "split-federated", "pipelearn")


@pytest.mark.parametrize(
    "event", ["round", "step", "evaluate", "send", "receive", "compute"]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_recorded_though_the_server_is_killed_as_it_records(
    method: str, event: str
) -> None:
    faults = [
        {"kill": "server", "when": {"device": "server", "event": event}, "for": "1s"}
    ]
    outcome = run_simulated(scenario(method, 2, workload={"steps": 4}, faults=faults))
    assert {each["step"] for each in fields_of(outcome, "step")} == {0, 1, 2, 3}
    assert {each["step"] for each in fields_of(outcome, "evaluate")} == {1, 2, 3, 4}
    assert {each["round"] for each in fields_of(outcome, "round")} == {0, 1, 2, 3}


def test_what_was_saved_is_not_trained_again() -> None:
    faults = [
        {
            "kill": "server",
            "when": {"device": "server", "event": "step", "batch": 1},
            "for": "1s",
        }
    ]
    spec = scenario("federated", 2, workload={"steps": 4}, faults=faults)
    disturbed, undisturbed = (
        run_simulated(spec),
        run_simulated(scenario("federated", 2, workload={"steps": 4})),
    )
    assert disturbed.weights is not None
    assert undisturbed.weights is not None
    losses = {each["step"]: each["loss"] for each in fields_of(disturbed, "step")}
    assert losses == {
        each["step"]: each["loss"] for each in fields_of(undisturbed, "step")
    }
    trained = sum(
        event.fields.get("span") == "update"
        for event in disturbed.events
        if event.event == "compute"
    )
    assert trained == 8  # four rounds of two devices
