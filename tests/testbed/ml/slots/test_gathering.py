"""Tests of `test_results: gathered`: results of tests gathered without loss, beside results that were cast."""

from __future__ import annotations

import pytest

from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.testbed.ml.outcomes import field_values, times_of

MODEL = {"name": "mlp", "hidden": [16, 16]}


def lossy_scenario(name, loss, **options):
    """Return a scenario of three devices with evaluations after steps 20 and 40."""
    method = {
        "name": name,
        "allocation": "horizontal",
        "test_runs": 3,
        "evaluate_every": 20,
        **options,
    }
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": loss}}
    workload = {"model": MODEL, "steps": 40}
    return make_scenario(2, workload=workload, method=method, network=network)


def evaluations_of(outcome):
    return fields_of(outcome, "evaluate")


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_gathered_and_cast_accuracies_are_equal_without_losses(name):
    cast_scenario = lossy_scenario(name, "0%", test_results="cast")
    gathered_scenario = lossy_scenario(name, "0%", test_results="gathered")
    cast = evaluations_of(run_simulated(cast_scenario))[-1]
    gathered = evaluations_of(run_simulated(gathered_scenario))[-1]
    for key in ("coordinator_accuracy", "any_device_accuracy", "accuracy"):
        assert gathered[key] == cast["accuracy"]
    assert gathered["run_accuracies"] == cast["run_accuracies"]
    assert gathered["loss"] == pytest.approx(cast["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_gathering_changes_no_cast(name):
    cast = run_simulated(lossy_scenario(name, "20%", test_results="cast"))
    gathered = run_simulated(lossy_scenario(name, "20%", test_results="gathered"))
    cast_losses = field_values(cast, "step", "loss")
    assert field_values(gathered, "step", "loss") == cast_losses
    # The coordinator has received the same results as without gathering.
    coordinator = field_values(gathered, "evaluate", "coordinator_accuracy")
    assert coordinator == field_values(cast, "evaluate", "accuracy")
    for evaluation in evaluations_of(gathered):
        # Means of runs, which are rounded in another order.
        any_device = evaluation["any_device_accuracy"]
        assert any_device >= evaluation["coordinator_accuracy"] - 1e-9
    assert field_values(gathered, "evaluate", "accuracy") != coordinator


def test_coordinator_receives_all_results_with_ideal_result_sharing():
    ideal = lossy_scenario(
        "versatile",
        "20%",
        test_results="gathered",
        result_sharing="ideal",
        evaluate_every=None,
    )
    (evaluation,) = evaluations_of(run_simulated(ideal))
    assert evaluation["coordinator_accuracy"] == evaluation["accuracy"]
    # Above chance of ten classes: the devices have learned.
    assert evaluation["accuracy"] > 0.1


def test_results_of_device_that_is_off_count_as_zeros():
    undisturbed_scenario = lossy_scenario("edgepipe", "0%", test_results="gathered")
    undisturbed = run_simulated(undisturbed_scenario)
    # Shortly after the last evaluation has begun.
    last_start = times_of(undisturbed, "test_start")[-1]
    kill = {"kill": "worker1", "at": f"{last_start + 0.05}s"}
    keys = undisturbed_scenario.model_dump(by_alias=True) | {"faults": [kill]}
    faulty_scenario = type(undisturbed_scenario).model_validate(keys)
    faulty = run_simulated(faulty_scenario)
    assert faulty.status == "finished"
    accuracy = evaluations_of(faulty)[-1]["accuracy"]
    assert accuracy < evaluations_of(undisturbed)[-1]["accuracy"]
