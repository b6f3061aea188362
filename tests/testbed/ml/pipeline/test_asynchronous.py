"""Tests of asynchronous 1F1B training: weight versions, vertical sync, and the trained weights."""

import pytest
import torch

from tests.helpers.delayed_gradients import DelayedReference, final_stretches
from tests.helpers.runs import (
    fields_of,
    make_scenario,
    run_simulated,
    train_with_torch,
)
from tests.testbed.ml.outcomes import (
    assert_equal_weights,
    assert_same_events,
    field_values,
)

METHOD = {"name": "pipedream", "partition": "even", "global_replication_interval": 0}


def train(workers=3, method=METHOD, **keys):
    """Train on a coordinator and workers; ``method`` changes some of `METHOD`'s options."""
    scenario = make_scenario(workers, method={**METHOD, **method}, **keys)
    outcome = run_simulated(scenario)
    assert outcome.status == "finished", outcome.error
    return outcome


def assert_close_weights(weights, expected, tolerance=0.0):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=tolerance)


def order_of(outcome, device):
    """Return the forwards and backwards of a device, such as "F0 F1 B0"."""
    letters = {"forward": "F", "backward": "B"}
    order = []
    for event in outcome.events.of("compute"):
        span = event.fields["span"]
        if event.device == device and span in letters:
            order.append(f"{letters[span]}{event.fields['batch']}")
    return " ".join(order)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_training_with_one_batch_in_flight_equals_sgd(workers):
    # With one batch at a time no gradient is delayed, so a single version of the weights is kept.
    outcome = train(workers, method={"in_flight": 1})
    model, losses = train_with_torch(make_scenario(workers))
    assert_close_weights(outcome.weights, dict(model.state_dict()), 1e-7)
    assert field_values(outcome, "step", "loss") == pytest.approx(losses, abs=1e-6)
    assert set(field_values(outcome, "versions", "kept")) == {1}


@pytest.mark.parametrize("vertical_sync", [True, False])
@pytest.mark.parametrize("in_flight", [None, 2])
def test_training_equals_sgd_with_delayed_gradients(vertical_sync, in_flight):
    outcome = train(method={"vertical_sync": vertical_sync, "in_flight": in_flight})
    reference = DelayedReference(make_scenario()).replay(outcome, 12, vertical_sync)
    assert_close_weights(outcome.weights, reference.newest)
    losses = field_values(outcome, "step", "loss")
    assert losses == pytest.approx(reference.losses, abs=1e-6)


@pytest.mark.parametrize("vertical_sync", [True, False])
@pytest.mark.parametrize("aggregation_interval", [1, 2])
def test_versions_are_averaged_at_aggregation_interval(
    aggregation_interval, vertical_sync
):
    workload = {"steps": 30}
    method = {"vertical_sync": vertical_sync}
    aggregation = {"aggregation_interval": aggregation_interval}
    outcome = train(method=method | aggregation, workload=workload)
    reference = DelayedReference(make_scenario(workload=workload)).replay(
        outcome, 30, vertical_sync, aggregation_interval
    )
    assert_close_weights(outcome.weights, reference.newest)
    without_aggregation = train(method=method, workload=workload).weights
    differs = False
    for name, tensor in without_aggregation.items():
        differs |= not torch.equal(outcome.weights[name], tensor)
    assert differs


WITH_DROPOUT_AND_NORMALISATION = {
    "model": {"name": "mobilenetv2", "width": 0.1},
    "batch_size": 8,
    "steps": 5,
}


def test_running_statistics_and_dropout_are_independent_of_speeds():
    outcomes = []
    for speed in ("1gflops", "10mflops"):
        devices = {
            "source": {"speed": speed},
            "worker": {"speed": "1gflops", "count": 3},
        }
        outcomes.append(
            train(3, workload=WITH_DROPOUT_AND_NORMALISATION, devices=devices)
        )
    fast, slow = outcomes
    assert_close_weights(slow.weights, fast.weights)
    for name, tensor in fast.weights.items():
        if name.endswith("num_batches_tracked"):
            assert int(tensor) == 5


def test_undone_forwards_do_not_change_running_statistics():
    method = {
        "in_flight": 1,
        "chain_replication_interval": 2,
        "stall_timeout": "500ms",
        "rejoin_timeout": "5s",
    }
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "1s",
    }
    keys = {"workload": WITH_DROPOUT_AND_NORMALISATION, "method": method}
    disturbed = train(2, faults=[kill], **keys)
    undisturbed = train(2, faults=[], **keys)
    # Batches from the replica on are trained again.
    assert field_values(disturbed, "recovery", "step")[-1] == 2
    assert_equal_weights(disturbed.weights, undisturbed.weights)


def test_forwards_and_backwards_alternate():
    outcome = train(2, workload={"steps": 6})
    # A stage forwards as many batches ahead as stages remain: three, two and one.
    assert order_of(outcome, "source") == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert order_of(outcome, "worker1") == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"
    assert order_of(outcome, "worker2") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_stage_uses_as_many_versions_as_stages_remain():
    reports = fields_of(train(), "versions")
    reports.sort(key=lambda report: report["stage"])
    assert [report["allowed"] for report in reports] == [4, 3, 2, 1]
    for report in reports:
        assert report["in_use"] == report["allowed"]
        # With vertical sync, later stages keep versions for batches that are still at the first stage.
        assert report["kept"] == 4
    for report in fields_of(train(method={"vertical_sync": False}), "versions"):
        assert report["in_use"] == report["allowed"]
        assert report["kept"] == report["allowed"]


def test_pipeline_trains_fewer_batches_than_stages():
    assert len(fields_of(train(workload={"steps": 2}), "step")) == 2


def test_single_stage_alternates_forward_and_backward():
    assert order_of(train(0, workload={"steps": 2}), "source") == "F0 B0 F1 B1"


def test_pipeline_drains_before_each_evaluation():
    outcome = train(method={"evaluate_every": 5})
    assert field_values(outcome, "evaluate", "step") == [5, 10, 12]
    # Each evaluation ends a stretch, after which the pipeline fills again.
    assert [first for first, _, _ in final_stretches(outcome)] == [0, 5, 10]
    reference = DelayedReference(make_scenario()).replay(outcome, 12)
    assert_close_weights(outcome.weights, reference.newest)


def test_run_is_reproducible():
    first = train(method={"chain_replication_interval": 4})
    second = train(method={"chain_replication_interval": 4})
    assert_same_events(first, second)
    assert_close_weights(second.weights, first.weights)


def test_speeds_of_devices_do_not_change_weights():
    # The order of actions decides the version of the weights for a batch, whatever the times are.
    devices = {
        "source": {"speed": "20mflops"},
        "worker": {"speed": "1mflops", "count": 3},
    }
    assert_close_weights(train(devices=devices).weights, train().weights)
