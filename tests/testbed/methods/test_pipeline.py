"""Synchronous pipeline training on the virtual clock, without faults: it computes what the undivided model does."""

import itertools

import pytest
import torch

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.plan import Assignment, Plan
from tests.helpers.runs import (
    events_of,
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    train_with_torch,
)

UNITS = 5


def cut_at(*cuts):
    """Return the plan whose stages begin at these units."""
    names = ["source", "worker1", "worker2", "worker3"]
    parts = tuple(
        Assignment(device=name, start=first, stop=last, memory=0)
        for name, (first, last) in zip(
            names, itertools.pairwise((0, *cuts, UNITS)), strict=False
        )
    )
    return Plan(method="pipeline", coordinator="source", assignments=parts)


def assert_same(weights, model, tolerance=2e-6):
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=tolerance)


SPLITS = [
    cuts
    for count in range(4)
    for cuts in itertools.combinations(range(1, UNITS), count)
]


@pytest.mark.parametrize(
    "cuts", SPLITS, ids=lambda cuts: "-".join(map(str, cuts)) or "whole"
)
@pytest.mark.parametrize("schedule", ["model-parallelism", "gpipe", "1f1b"])
def test_every_split_trains_the_undivided_model(schedule, cuts):
    micro_batches = (
        4 if len(cuts) % 2 else 3
    )  # 16 samples: 4 even micro-batches, or 6, 5 and 5
    spec = make_scenario(
        workload={"steps": 4},
        method={"schedule": schedule, "micro_batches": micro_batches},
    )
    outcome = run_simulated(spec, cut_at(*cuts))
    assert outcome.status == "finished", outcome.error
    model, losses = train_with_torch(spec)
    assert_same(outcome.weights, model)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-6
    )


@pytest.mark.parametrize("schedule", ["model-parallelism", "gpipe", "1f1b"])
def test_convolutions_train_the_undivided_model(schedule):
    work = {
        "steps": 3,
        "model": {"name": "cnn", "channels": [4, 4, 8], "hidden": [16, 12]},
        "batch_size": 10,
    }
    spec = make_scenario(
        workload=work, method={"schedule": schedule, "micro_batches": 4}
    )
    outcome = run_simulated(spec)
    model, losses = train_with_torch(spec)
    assert_same(outcome.weights, model)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-6
    )


def test_given_weights_are_trained_on():
    work = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 6}
    weights = run_simulated(make_scenario(workload=work)).weights
    again = run_simulated(make_scenario(workload=work), weights=weights)
    spec = make_scenario(workload=work)
    model, losses = train_with_torch(spec, weights)
    assert_same(again.weights, model)
    assert [step["loss"] for step in fields_of(again, "step")] == pytest.approx(
        losses, abs=1e-6
    )


def test_batch_normalisation_statistics_reach_the_lead():
    work = {
        "steps": 2,
        "model": {"name": "vgg5"},
        "data": {"name": "digits", "train": 64, "test": 16},
    }
    outcome = run_simulated(make_scenario(workload=work, speed="10gflops"))
    assert outcome.status == "finished", outcome.error
    counts = [
        tensor
        for name, tensor in outcome.weights.items()
        if name.endswith("num_batches_tracked")
    ]
    assert counts
    assert all(int(count) == 2 * 4 for count in counts)  # each micro-batch is one


def test_two_runs_are_the_same():
    fault = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "2s",
    }
    one, other = (run_simulated(make_scenario(faults=[fault])) for _ in range(2))
    assert [event.to_json() for event in one.events] == [
        event.to_json() for event in other.events
    ]


def test_sending_does_not_keep_a_stage_from_computing():
    """With transfers as long as the work, a pipeline that waited for each would take half as long again."""
    work = {
        "model": {"name": "mlp", "hidden": [64, 64, 64, 64]},
        "steps": 3,
        "batch_size": 64,
    }
    network = {"link": {"rate": "100mbit", "delay": "0ms"}}
    spec = make_scenario(
        workload=work, speed="5mflops", method={"micro_batches": 16}, network=network
    )
    outcome = run_simulated(spec)
    problem, _ = problem_of(spec)
    predicted = METHODS["pipeline"].plan(problem).step_time
    ends = [event.time for event in outcome.events if event.event == "step"]
    assert ends[-1] - ends[-2] == pytest.approx(predicted, rel=0.05)


def test_one_stage_never_keeps_more_than_its_schedule_allows():
    outcome = run_simulated(make_scenario(method={"micro_batches": 8}))
    kept = dict.fromkeys(("source", "worker1", "worker2", "worker3"), 0)
    most = dict(kept)
    for device, fields in events_of(outcome, "compute"):
        kept[device] += {"forward": 1, "backward": -1}.get(fields["span"], 0)
        most[device] = max(most[device], kept[device])
    assert most == {"source": 4, "worker1": 3, "worker2": 2, "worker3": 1}


def test_labels_cost_bytes_on_their_way_to_the_last_stage():
    outcome = run_simulated(make_scenario())
    sent = [
        fields
        for device, fields in events_of(outcome, "send")
        if fields["message"] == "labels"
    ]
    assert {fields["peer"] for fields in sent} == {"worker3"}
    assert all(fields["bytes"] >= 16 * 8 for fields in sent)


def test_evaluations_on_the_way():
    outcome = run_simulated(make_scenario(method={"evaluate_every": 5}))
    assert [event["step"] for event in fields_of(outcome, "evaluate")] == [5, 10, 12]


def test_spans_are_all_that_devices_begin():
    outcome = run_simulated(make_scenario())
    spec = make_scenario()
    problem, _ = problem_of(spec)
    method = METHODS["pipeline"]
    plan = method.plan(problem)
    for device in ("source", "worker1", "worker2", "worker3"):
        begun = {
            fields["span"]
            for name, fields in events_of(outcome, "begin")
            if name == device
        }
        assert begun == method.spans(plan, device)


def test_spare_devices_replace_lost_stages():
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 6},
    }
    outcome = run_simulated(
        make_scenario(method={"stages": 2, "rejoin_timeout": "2s"}, faults=[fault])
    )
    assert outcome.status == "finished", outcome.error
    assert [
        device for device, _, _ in fields_of(outcome, "recovery")[-1]["partition"]
    ] == [
        "source",
        "worker2",
    ]


def test_not_enough_devices():
    # The lead's memory holds its part of the model and the checkpoints, but not the whole model.
    devices = {
        "source": {"speed": "20mflops", "memory": "120kB"},
        "worker": {"speed": "20mflops", "count": 2},
    }
    work = {"model": {"name": "mlp", "hidden": [8, 16, 64, 64]}, "batch_size": 8}
    fault = {"partition": [["source"]], "at": "50ms"}
    outcome = run_simulated(
        make_scenario(
            workload=work,
            devices=devices,
            faults=[fault],
            method={"rejoin_timeout": "2s"},
        )
    )
    assert outcome.status == "failed"
    assert "not enough devices: source has 120 kB of memory, but" in outcome.error
    assert "\n" not in outcome.error


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"workers": 5}, "6 stages, but the model has 5 units"),
        (
            {"method": {"stages": 5}},
            "method.stages: 5 stages need 5 devices, there are 4",
        ),
        ({"method": {"micro_batches": 17}}, "a batch of 16 cannot be cut into 17"),
        ({"network": {"topology": "line"}}, "none is between source and worker2"),
    ],
)
def test_plans_that_cannot_be_are_refused(keys, complaint):
    problem, _ = problem_of(make_scenario(**keys))
    with pytest.raises(InputError, match=complaint):
        METHODS["pipeline"].plan(problem)


NORMALISED = {"name": "mobilenetv2", "width": 0.1}


@pytest.mark.parametrize(
    "model",
    [{"name": "mlp", "hidden": [12, 10, 8, 8]}, NORMALISED],
    ids=["mlp", "normalised"],
)
def test_recomputing_changes_time_and_memory_but_no_bit(model):
    work = {"steps": 2, "model": model, "batch_size": 8}
    kept, again = (
        run_simulated(
            make_scenario(
                2,
                workload=work,
                method={
                    "name": "gpipe",
                    "partition": "even",
                    "micro_batches": 2,
                    "recompute": recompute,
                },
            )
        )
        for recompute in (False, True)
    )
    assert again.status == "finished", again.error
    for name, tensor in kept.weights.items():
        assert torch.equal(again.weights[name], tensor), name
    assert again.events[-1].time > kept.events[-1].time


def test_recomputing_is_planned_for():
    work = {
        "model": {"name": "mlp", "hidden": [64, 64, 64, 64]},
        "steps": 3,
        "batch_size": 64,
    }
    plans = []
    for recompute in (False, True):
        method = {
            "name": "gpipe",
            "recompute": recompute,
            "partition": "even",
            "micro_batches": 8,
        }
        spec = make_scenario(3, workload=work, speed="5mflops", method=method)
        plans.append(METHODS["gpipe"].plan(problem_of(spec)[0]))
        ends = [
            event.time for event in run_simulated(spec).events if event.event == "step"
        ]
        assert ends[1] - ends[0] == pytest.approx(plans[-1].step_time, rel=0.05)
    kept, again = plans
    assert again.step_time > 1.1 * kept.step_time
    less = [
        one.memory < other.memory
        for one, other in zip(again.assignments, kept.assignments, strict=True)
    ]
    assert less == [True, True, True, False]


@pytest.mark.parametrize("batch_size", [20, 19])
@pytest.mark.parametrize("method", ["pipeline", "gpipe", "pipedream"])
def test_without_drop_last_the_rest_of_an_epoch_is_a_smaller_batch(method, batch_size):
    """96 samples: a last batch of 16, or one of a single sample, fewer than micro-batches."""
    workload = {
        "batch_size": batch_size,
        "epochs": 2,
        "steps": None,
        "drop_last": False,
    }
    options = {} if method == "pipedream" else {"micro_batches": 3}
    found = [
        fields_of(
            run_simulated(
                make_scenario(workload=workload, method={"name": name, **own})
            ),
            "step",
        )
        for name, own in ((method, options), ("single", {}))
    ]
    rest = 96 % batch_size
    for steps in found:
        assert [step["samples"] for step in steps] == [
            *[batch_size] * (96 // batch_size),
            rest,
        ] * 2
    if method != "pipedream":
        assert [step["loss"] for step in found[0]] == pytest.approx(
            [step["loss"] for step in found[1]], rel=1e-4
        )


def test_samples_that_an_epoch_leaves_out_are_recorded():
    outcome = run_simulated(make_scenario(workload={"batch_size": 20, "steps": 2}))
    assert fields_of(outcome, "left_out") == [{"samples": 16, "of": 96}]
    assert (
        fields_of(run_simulated(make_scenario(workload={"steps": 2})), "left_out") == []
    )
