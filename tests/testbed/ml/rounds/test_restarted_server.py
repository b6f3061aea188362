"""Tests of a server that is killed at any moment of a round and restarts."""

from __future__ import annotations

import pytest

from tests.helpers.server_scenarios import make_scenario, run_simulated
from tests.testbed.ml.outcomes import count_events, field_values, loss_by_step

METHODS = ("federated", "split-learning", "split-federated", "pipelearn")


def kill_server(**moment) -> dict:
    """Return a fault: the server stops for a second at the first event of a kind."""
    return {"kill": "server", "when": {"device": "server", **moment}, "for": "1s"}


@pytest.mark.parametrize(
    "event", ["round", "step", "evaluate", "send", "receive", "compute"]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_recorded_if_server_is_killed_while_recording(
    method: str, event: str
) -> None:
    faults = [kill_server(event=event)]
    outcome = run_simulated(
        make_scenario(method, 2, workload={"steps": 4}, faults=faults)
    )
    # An event may be recorded twice: before the crash, and again after it.
    assert set(field_values(outcome, "step", "step")) == {0, 1, 2, 3}
    assert set(field_values(outcome, "evaluate", "step")) == {1, 2, 3, 4}
    assert set(field_values(outcome, "round", "round")) == {0, 1, 2, 3}


def test_saved_round_is_not_trained_again() -> None:
    workload = {"steps": 4}
    faults = [kill_server(event="step", batch=1)]
    disturbed = run_simulated(
        make_scenario("federated", 2, workload=workload, faults=faults)
    )
    undisturbed = run_simulated(make_scenario("federated", 2, workload=workload))
    assert disturbed.weights is not None
    assert undisturbed.weights is not None
    assert loss_by_step(disturbed) == loss_by_step(undisturbed)
    # Four rounds of two devices.
    assert count_events(disturbed, "compute", span="update") == 8
