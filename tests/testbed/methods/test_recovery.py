"""Recovery of the pipeline: a run with any kind of fault ends with the weights of a run without, or a clear error."""

import pytest

from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.testbed.methods.outcomes import (
    assert_equal_weights,
    assert_finished,
    final_evaluation,
    times_of,
    values_of,
)

METHOD = {"checkpoint_every": 4, "stall_timeout": "1s", "rejoin_timeout": "6s"}
WORKERS = ("worker1", "worker2", "worker3")
IN_BACKWARD_PASS = {"device": "worker2", "begins": "backward", "batch": 6}
"""A moment in the middle of training: two steps after a checkpoint."""


def run_with_faults(*faults, method=METHOD, **keys):
    return run_simulated(make_scenario(method=method, faults=faults, **keys))


@pytest.fixture(scope="module")
def undisturbed():
    return run_with_faults()


def losses_by_step(outcome):
    """Return the last loss of each step, since steps after a checkpoint are repeated."""
    return {step["step"]: step["loss"] for step in fields_of(outcome, "step")}


def assert_recovered(outcome, undisturbed, recoveries=1):
    """Check for weights, losses, steps and accuracy of the undisturbed run, and count the recoveries."""
    assert_finished(outcome)
    assert_equal_weights(outcome, undisturbed.weights)
    assert losses_by_step(outcome) == losses_by_step(undisturbed)
    assert final_evaluation(outcome) == final_evaluation(undisturbed)
    phases = values_of(outcome, "recovery", "phase")
    assert phases == ["detected", "resumed"] * recoveries


def final_devices(outcome):
    """Return the devices of the model partition after the last recovery."""
    partition = fields_of(outcome, "recovery")[-1]["partition"]
    return [device for device, _, _ in partition]


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("span", ["forward", "backward", "update"])
def test_restarted_stage_rejoins_at_last_checkpoint(undisturbed, victim, span):
    when = {"device": victim, "begins": span, "batch": 6}
    outcome = run_with_faults({"kill": victim, "when": when, "for": "2s"})
    assert_recovered(outcome, undisturbed)
    detected, resumed = fields_of(outcome, "recovery")
    assert detected["missing"] == [victim]
    # Checkpoints are stored every four steps: step 4 is repeated.
    assert detected["step"] == resumed["step"] == 4
    assert values_of(outcome, "step", "step") == [*range(6), *range(4, 12)]


def test_restarted_device_reports_before_stall_timeout(undisturbed):
    fault = {"kill": "worker2", "when": IN_BACKWARD_PASS, "for": "1s"}
    # Without the report, the others would wait for a minute.
    outcome = run_with_faults(fault, method={**METHOD, "stall_timeout": "60s"})
    assert_recovered(outcome, undisturbed)
    assert outcome.events[-1].time < 10


@pytest.mark.parametrize("victim", WORKERS)
def test_remaining_devices_replace_stage_killed_for_good(undisturbed, victim):
    when = {"device": victim, "begins": "forward", "batch": 6}
    outcome = run_with_faults({"kill": victim, "when": when})
    assert_recovered(outcome, undisturbed)
    survivors = [name for name in WORKERS if name != victim]
    assert final_devices(outcome) == ["source", *survivors]


AT_STEP_5 = {"device": "worker1", "begins": "backward", "batch": 5}


def test_two_devices_killed_at_once_rejoin_in_one_recovery(undisturbed):
    outcome = run_with_faults(
        {"kill": "worker1", "when": AT_STEP_5, "for": "2s"},
        {"kill": "worker3", "when": AT_STEP_5, "for": "3s"},
    )
    assert_recovered(outcome, undisturbed)
    assert fields_of(outcome, "recovery")[0]["missing"] == ["worker1", "worker3"]


def test_run_continues_if_only_one_of_two_killed_devices_restarts(undisturbed):
    outcome = run_with_faults(
        {"kill": "worker1", "when": AT_STEP_5},
        {"kill": "worker3", "when": AT_STEP_5, "for": "3s"},
    )
    assert_recovered(outcome, undisturbed)
    assert final_devices(outcome) == ["source", "worker2", "worker3"]


def test_coordinator_continues_alone_after_losing_all_devices(undisturbed):
    faults = [{"kill": victim, "when": AT_STEP_5} for victim in WORKERS]
    outcome = run_with_faults(*faults)
    assert_recovered(outcome, undisturbed)
    assert final_devices(outcome) == ["source"]


@pytest.mark.parametrize(
    "when",
    [
        pytest.param({"device": "source", "event": "recovery"}, id="recovery"),
        pytest.param({"device": "worker3", "begins": "load"}, id="configured"),
    ],
)
@pytest.mark.parametrize(
    "duration", [{"for": "2s"}, {}], ids=["restarted", "permanent"]
)
def test_kill_during_recovery_is_recovered(undisturbed, when, duration):
    outcome = run_with_faults(
        {"kill": "worker2", "when": IN_BACKWARD_PASS, "for": "2s"},
        {"kill": "worker3", "when": when, **duration},
    )
    assert_finished(outcome)
    assert_equal_weights(outcome, undisturbed.weights)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(
            {"device": "worker2", "begins": "checkpoint", "batch": 11},
            id="collecting-final-weights",
        ),
        pytest.param({"device": "worker2", "begins": "evaluate"}, id="evaluating"),
    ],
)
def test_kill_at_end_of_training_is_recovered(undisturbed, when):
    outcome = run_with_faults({"kill": "worker2", "when": when, "for": "2s"})
    assert_recovered(outcome, undisturbed)


def test_devices_rejoin_after_network_partition_within_timeout(undisturbed):
    fault = {"partition": [["worker2"]], "when": IN_BACKWARD_PASS, "for": "4s"}
    assert_recovered(run_with_faults(fault), undisturbed)


def test_short_network_partition_needs_no_recovery(undisturbed):
    fault = {"partition": [["worker2"]], "when": IN_BACKWARD_PASS, "for": "500ms"}
    assert_recovered(run_with_faults(fault), undisturbed, recoveries=0)


def test_run_continues_without_devices_partitioned_for_good(undisturbed):
    fault = {
        "partition": [["worker2", "worker3"]],
        "when": {"device": "worker2", "begins": "update", "batch": 6},
    }
    outcome = run_with_faults(fault)
    assert_recovered(outcome, undisturbed)
    assert final_devices(outcome) == ["source", "worker1"]


def test_paused_device_rejoins_after_resuming(undisturbed):
    fault = {"pause": "worker2", "when": IN_BACKWARD_PASS, "for": "4s"}
    assert_recovered(run_with_faults(fault), undisturbed)


def test_device_paused_beyond_rejoin_timeout_is_replaced_and_joins_later(undisturbed):
    fault = {"pause": "worker2", "when": IN_BACKWARD_PASS, "for": "10s"}
    # Without numerics, as only many steps last until the device resumes.
    outcome = run_with_faults(fault, workload={"steps": 600, "numerics": "none"})
    assert_finished(outcome)
    assert final_devices(outcome) == ["source", "worker1", "worker3"]
    assert any("worker2 join" in text for text in values_of(outcome, "log", "text"))
    devices_of_last_update = set()
    for event in outcome.events.of("compute"):
        if event.fields["span"] == "update" and event.fields["batch"] == 599:
            devices_of_last_update.add(event.device)
    assert devices_of_last_update == {"source", *WORKERS}


def test_device_unreachable_for_neighbour_is_identified_and_replaced(undisturbed):
    # Both devices answer the coordinator, but no tensor gets through between them.
    link = {"between": ["worker1", "worker2"], "rate": "1bit"}
    outcome = run_with_faults({"degrade": link, "when": IN_BACKWARD_PASS})
    assert_recovered(outcome, undisturbed)
    assert fields_of(outcome, "recovery")[0]["missing"] == ["worker2"]
    assert final_devices(outcome) == ["source", "worker1", "worker3"]


def test_slow_devices_do_not_cause_recovery():
    # A pass takes many times the stall timeout, and the polled devices answer.
    outcome = run_with_faults(
        workload={"steps": 2},
        speed="5kflops",
        method={**METHOD, "stall_timeout": "200ms"},
    )
    assert_finished(outcome)
    assert not fields_of(outcome, "recovery")
    assert outcome.events[-1].time > 20


def test_restarted_coordinator_starts_training_over(undisturbed):
    fault = {
        "kill": "source",
        "when": {"device": "source", "begins": "backward", "batch": 6},
        "for": "1s",
    }
    outcome = run_with_faults(fault)
    assert_finished(outcome)
    assert_equal_weights(outcome, undisturbed.weights)
    # Checkpoints are in the memory of the killed coordinator.
    assert values_of(outcome, "step", "step") == [*range(6), *range(12)]


def test_device_down_at_start_delays_run():
    outcome = run_with_faults({"kill": "worker2", "at": "0s"})
    assert_finished(outcome)
    detected, _resumed = fields_of(outcome, "recovery")
    assert detected["missing"] == ["worker2"]
    # The device is missing for good, so that the rejoin timeout of 6 s passes.
    assert times_of(outcome, "step")[0] < 30
