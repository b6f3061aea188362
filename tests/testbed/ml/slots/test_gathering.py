"""Results of tests that are gathered without loss, beside those that were cast."""

from __future__ import annotations

import pytest

from tests.helpers.runs import fields_of, run_simulated, scenario

MODEL = {"name": "mlp", "hidden": [16, 16]}


def lossy(name, loss, **method):
    keys = {
        "name": name,
        "allocation": "horizontal",
        "test_runs": 3,
        "evaluate_every": 20,
        **method,
    }
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": loss}}
    return scenario(
        2, workload={"model": MODEL, "steps": 40}, method=keys, network=network
    )


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_without_losses_all_three_accuracies_are_equal(name):
    (cast,), (gathered,) = [
        fields_of(run_simulated(lossy(name, "0%", test_results=how)), "evaluate")[-1:]
        for how in ("cast", "gathered")
    ]
    assert (
        gathered["coordinator_accuracy"]
        == gathered["any_device_accuracy"]
        == gathered["accuracy"]
        == cast["accuracy"]
    )
    assert gathered["run_accuracies"] == cast["run_accuracies"]
    assert gathered["loss"] == pytest.approx(cast["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_gathering_changes_no_cast(name):
    cast, gathered = (
        run_simulated(lossy(name, "20%", test_results=how))
        for how in ("cast", "gathered")
    )
    assert [step["loss"] for step in fields_of(cast, "step")] == [
        step["loss"] for step in fields_of(gathered, "step")
    ]
    evaluations = fields_of(gathered, "evaluate")
    assert [each["coordinator_accuracy"] for each in evaluations] == [
        each["accuracy"] for each in fields_of(cast, "evaluate")
    ]
    assert all(
        each["any_device_accuracy"] >= each["coordinator_accuracy"] - 1e-9
        for each in evaluations
    )
    assert [each["accuracy"] for each in evaluations] != [
        each["coordinator_accuracy"] for each in evaluations
    ]


def test_results_cast_without_loss_equal_gathered_ones():
    (found,) = fields_of(
        run_simulated(
            lossy(
                "versatile",
                "20%",
                test_results="gathered",
                result_sharing="ideal",
                evaluate_every=None,
            )
        ),
        "evaluate",
    )
    assert found["coordinator_accuracy"] == found["accuracy"]
    assert found["accuracy"] > 0.1


def test_results_of_a_device_that_is_off_count_as_zeros():
    written = lossy("edgepipe", "0%", test_results="gathered")
    whole = run_simulated(written)
    tests = [event.time for event in whole.events if event.event == "test_start"]
    faults = [{"kill": "worker1", "at": f"{tests[-1] + 0.05}s"}]
    outcome = run_simulated(
        type(written).model_validate(
            written.model_dump(by_alias=True) | {"faults": faults}
        )
    )
    assert outcome.status == "finished"
    assert (
        fields_of(outcome, "evaluate")[-1]["accuracy"]
        < fields_of(whole, "evaluate")[-1]["accuracy"]
    )
