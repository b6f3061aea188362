"""Asynchronous 1F1B: versions of the weights, vertical sync, and what the training comes to."""

import pytest
import torch

from tests.helpers.delayed_gradients import DelayedReference, final_stretches
from tests.helpers.runs import fields_of, make_scenario, run_simulated, train_with_torch

METHOD = {"name": "pipedream", "partition": "even", "global_replication_interval": 0}


def trained(workers=3, method=METHOD, **keys):
    outcome = run_simulated(make_scenario(workers, method={**METHOD, **method}, **keys))
    assert outcome.status == "finished", outcome.error
    return outcome


def assert_equal(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


def order_of(outcome, device):
    """Return what a device computed, such as F0 F1 B0."""
    letters = {"forward": "F", "backward": "B"}
    return " ".join(
        f"{letters[event.fields['span']]}{event.fields['batch']}"
        for event in outcome.events
        if event.event == "compute"
        and event.device == device
        and event.fields["span"] in letters
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_one_batch_in_flight_is_plain_sgd(workers):
    outcome = trained(workers, method={"in_flight": 1})
    model, losses = train_with_torch(make_scenario(workers))
    assert_equal(outcome.weights, dict(model.state_dict()), 1e-7)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-6
    )
    assert {report["kept"] for report in fields_of(outcome, "versions")} == {1}


@pytest.mark.parametrize("vertical_sync", [True, False])
@pytest.mark.parametrize("in_flight", [None, 2])
def test_equals_sgd_with_delayed_gradients(vertical_sync, in_flight):
    outcome = trained(method={"vertical_sync": vertical_sync, "in_flight": in_flight})
    reference = DelayedReference(make_scenario()).replay(outcome, 12, vertical_sync)
    assert_equal(outcome.weights, reference.newest)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        reference.losses, abs=1e-6
    )


@pytest.mark.parametrize("vertical_sync", [True, False])
@pytest.mark.parametrize("aggregate", [1, 2])
def test_versions_are_averaged_at_their_interval(aggregate, vertical_sync):
    outcome = trained(
        method={"aggregation_interval": aggregate, "vertical_sync": vertical_sync},
        workload={"steps": 30},
    )
    reference = DelayedReference(make_scenario(workload={"steps": 30})).replay(
        outcome, 30, vertical_sync, aggregate
    )
    assert_equal(outcome.weights, reference.newest)
    alone = trained(
        method={"vertical_sync": vertical_sync}, workload={"steps": 30}
    ).weights
    assert any(
        not torch.equal(outcome.weights[name], tensor) for name, tensor in alone.items()
    )


NORMALISED = {
    "model": {"name": "mobilenetv2", "width": 0.1},
    "batch_size": 8,
    "steps": 5,
}
"""A network with dropout and batch normalisation."""


def test_running_statistics_and_dropout_depend_on_the_batches_alone():
    one, other = (
        trained(
            3,
            workload=NORMALISED,
            devices={
                "source": {"speed": first},
                "worker": {"speed": "1gflops", "count": 3},
            },
        )
        for first in ("1gflops", "10mflops")
    )
    assert all(
        torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )
    counts = {
        int(tensor)
        for name, tensor in one.weights.items()
        if name.endswith("num_batches_tracked")
    }
    assert counts == {5}


def test_undone_forwards_leave_no_trace_in_running_statistics():
    method = {
        "in_flight": 1,
        "chain_replication_interval": 2,
        "stall_timeout": "500ms",
        "rejoin_timeout": "5s",
    }
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "1s",
    }
    disturbed, calm = (
        trained(2, workload=NORMALISED, method=method, faults=list(f))
        for f in ([fault], [])
    )
    assert [event["step"] for event in fields_of(disturbed, "recovery")][-1] == 2
    assert all(
        torch.equal(tensor, disturbed.weights[name])
        for name, tensor in calm.weights.items()
    )


def test_forwards_and_backwards_alternate():
    outcome = trained(2, workload={"steps": 6})
    assert order_of(outcome, "source") == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert order_of(outcome, "worker1") == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"
    assert order_of(outcome, "worker2") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_batches_under_way_use_no_more_versions_than_stages_are_left():
    reports = fields_of(trained(), "versions")
    assert [
        report["allowed"]
        for report in sorted(reports, key=lambda report: report["stage"])
    ] == [4, 3, 2, 1]
    assert all(report["in_use"] == report["allowed"] for report in reports)
    assert {report["kept"] for report in reports} == {
        4
    }  # later batches use what the first stage has by then
    for report in fields_of(trained(method={"vertical_sync": False}), "versions"):
        assert report["in_use"] == report["kept"] == report["allowed"]


def test_few_batches_and_a_single_stage():
    assert len(fields_of(trained(workload={"steps": 2}), "step")) == 2
    assert order_of(trained(0, workload={"steps": 2}), "source") == "F0 B0 F1 B1"


def test_evaluations_drain_the_pipeline():
    outcome = trained(method={"evaluate_every": 5})
    assert [report["step"] for report in fields_of(outcome, "evaluate")] == [5, 10, 12]
    assert [first for first, _, _ in final_stretches(outcome)] == [0, 5, 10]
    assert_equal(
        outcome.weights, DelayedReference(make_scenario()).replay(outcome, 12).newest
    )


def test_two_runs_are_identical():
    one, other = (trained(method={"chain_replication_interval": 4}) for _ in range(2))
    assert [event.to_json() for event in one.events] == [
        event.to_json() for event in other.events
    ]
    assert all(
        torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )


def test_speeds_change_times_and_nothing_else():
    devices = {
        "source": {"speed": "20mflops"},
        "worker": {"speed": "1mflops", "count": 3},
    }
    one, other = trained(), trained(devices=devices)
    assert all(
        torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )
