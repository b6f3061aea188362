"""Synchronous pipeline training without faults, compared with training the undivided model."""

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
    run_simulated,
    train_with_torch,
)
from tests.testbed.methods.outcomes import (
    assert_equal_weights,
    assert_finished,
    losses_of,
    plan_of,
    times_of,
    values_of,
)

UNITS = 5
DEVICES = ("source", "worker1", "worker2", "worker3")
SCHEDULES = ("model-parallelism", "gpipe", "1f1b")


def plan_with_cuts(*cuts):
    """Return a plan with a stage from each cut, in units, to the next one."""
    stages = itertools.pairwise((0, *cuts, UNITS))
    assignments = []
    for name, (start, stop) in zip(DEVICES, stages, strict=False):
        assignments.append(Assignment(device=name, start=start, stop=stop, memory=0))
    return Plan(method="pipeline", coordinator="source", assignments=tuple(assignments))


def assert_trains_as_torch(outcome, spec, weights=None):
    """Check for the weights and losses of training the undivided model with torch alone."""
    assert_finished(outcome)
    model, losses = train_with_torch(spec, weights)
    expected = model.state_dict()
    assert outcome.weights.keys() == expected.keys()
    # Micro-batches add up gradients in another order than the whole batch.
    for name, tensor in expected.items():
        torch.testing.assert_close(outcome.weights[name], tensor, rtol=0, atol=2e-6)
    assert losses_of(outcome) == pytest.approx(losses, abs=1e-6)


ALL_CUTS = []
"""The cuts of all possible pipelines of one to four stages."""
for cut_count in range(len(DEVICES)):
    ALL_CUTS += itertools.combinations(range(1, UNITS), cut_count)


def cuts_name(cuts):
    return "-".join(map(str, cuts)) or "whole"


@pytest.mark.parametrize("cuts", ALL_CUTS, ids=cuts_name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_partition_trains_undivided_model(schedule, cuts):
    # 16 samples: four equal micro-batches, or three of 6, 5 and 5.
    micro_batches = 4 if len(cuts) % 2 else 3
    method = {"schedule": schedule, "micro_batches": micro_batches}
    spec = make_scenario(workload={"steps": 4}, method=method)
    assert_trains_as_torch(run_simulated(spec, plan_with_cuts(*cuts)), spec)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partitioned_convolutional_network_trains_undivided_model(schedule):
    work = {
        "steps": 3,
        "model": {"name": "cnn", "channels": [4, 4, 8], "hidden": [16, 12]},
        "batch_size": 10,
    }
    spec = make_scenario(
        workload=work, method={"schedule": schedule, "micro_batches": 4}
    )
    assert_trains_as_torch(run_simulated(spec), spec)


def test_training_continues_from_initial_weights():
    work = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 6}
    spec = make_scenario(workload=work)
    weights = run_simulated(spec).weights
    outcome = run_simulated(spec, weights=weights)
    assert_trains_as_torch(outcome, spec, weights)


def test_batch_normalisation_statistics_reach_coordinator():
    work = {
        "steps": 2,
        "model": {"name": "vgg5"},
        "data": {"name": "digits", "train": 64, "test": 16},
    }
    outcome = run_simulated(make_scenario(workload=work, speed="10gflops"))
    assert_finished(outcome)
    counts = [
        int(tensor)
        for name, tensor in outcome.weights.items()
        if name.endswith("num_batches_tracked")
    ]
    assert counts
    # Each of the four micro-batches of a step counts as a batch.
    assert set(counts) == {2 * 4}


def test_runs_with_fault_are_identical():
    fault = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "2s",
    }
    first = run_simulated(make_scenario(faults=[fault]))
    second = run_simulated(make_scenario(faults=[fault]))
    assert json_lines(first) == json_lines(second)


def json_lines(outcome):
    return [event.to_json() for event in outcome.events]


WIDE_MODEL = {"name": "mlp", "hidden": [64, 64, 64, 64]}
WIDE_WORKLOAD = {"model": WIDE_MODEL, "steps": 3, "batch_size": 64}


def test_stage_computes_while_sending():
    # With transfers as long as computations, a pipeline that waited for each transfer would take half as long again.
    network = {"link": {"rate": "100mbit", "delay": "0ms"}}
    spec = make_scenario(
        workload=WIDE_WORKLOAD,
        speed="5mflops",
        method={"micro_batches": 16},
        network=network,
    )
    times = times_of(run_simulated(spec), "step")
    predicted = plan_of(spec).step_time
    assert times[-1] - times[-2] == pytest.approx(predicted, rel=0.05)


def test_activations_held_by_stage_are_limited_by_schedule():
    outcome = run_simulated(make_scenario(method={"micro_batches": 8}))
    # In 1F1B, the first of four stages has four micro-batches in flight, the last one only one.
    held = dict.fromkeys(DEVICES, 0)
    maximum = dict.fromkeys(DEVICES, 0)
    for device, fields in events_of(outcome, "compute"):
        held[device] += {"forward": 1, "backward": -1}.get(fields["span"], 0)
        maximum[device] = max(maximum[device], held[device])
    assert maximum == {"source": 4, "worker1": 3, "worker2": 2, "worker3": 1}


def test_labels_are_sent_to_last_stage():
    outcome = run_simulated(make_scenario())
    label_sends = [
        fields for fields in fields_of(outcome, "send") if fields["message"] == "labels"
    ]
    assert {fields["peer"] for fields in label_sends} == {"worker3"}
    # 16 labels of 8 bytes.
    assert all(fields["bytes"] >= 16 * 8 for fields in label_sends)


def test_model_is_evaluated_at_interval_and_at_end():
    outcome = run_simulated(make_scenario(method={"evaluate_every": 5}))
    assert values_of(outcome, "evaluate", "step") == [5, 10, 12]


def test_method_declares_spans_that_devices_record():
    spec = make_scenario()
    outcome = run_simulated(spec)
    plan = plan_of(spec)
    recorded = {name: set() for name in DEVICES}
    for device, fields in events_of(outcome, "begin"):
        recorded[device].add(fields["span"])
    for device in DEVICES:
        assert recorded[device] == METHODS["pipeline"].spans(plan, device)


def test_spare_device_replaces_lost_stage():
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 6},
    }
    method = {"stages": 2, "rejoin_timeout": "2s"}
    outcome = run_simulated(make_scenario(method=method, faults=[fault]))
    assert_finished(outcome)
    partition = fields_of(outcome, "recovery")[-1]["partition"]
    assert [device for device, _, _ in partition] == ["source", "worker2"]


def test_run_fails_if_remaining_devices_cannot_hold_model():
    # The coordinator's memory holds its part of the model and the checkpoints, but not the whole model.
    devices = {
        "source": {"speed": "20mflops", "memory": "120kB"},
        "worker": {"speed": "20mflops", "count": 2},
    }
    work = {"model": {"name": "mlp", "hidden": [8, 16, 64, 64]}, "batch_size": 8}
    fault = {"partition": [["source"]], "at": "50ms"}
    spec = make_scenario(
        workload=work,
        devices=devices,
        faults=[fault],
        method={"rejoin_timeout": "2s"},
    )
    outcome = run_simulated(spec)
    assert outcome.status == "failed"
    assert "not enough devices: source has 120 kB of memory, but" in outcome.error
    assert "\n" not in outcome.error


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param(
            {"workers": 5}, "6 stages, but the model has 5 units", id="few-units"
        ),
        pytest.param(
            {"method": {"stages": 5}},
            "method.stages: 5 stages need 5 devices, but the scenario has 4",
            id="few-devices",
        ),
        pytest.param(
            {"method": {"micro_batches": 17}},
            "a batch of 16 cannot be cut into 17",
            id="small-batch",
        ),
        pytest.param(
            {"network": {"topology": "line"}},
            "a link between source and worker2 is missing",
            id="missing-link",
        ),
    ],
)
def test_impossible_plan_is_rejected(keys, message):
    with pytest.raises(InputError, match=message):
        plan_of(make_scenario(**keys))


NORMALISED_MODEL = {"name": "mobilenetv2", "width": 0.1}


@pytest.mark.parametrize(
    "model",
    [{"name": "mlp", "hidden": [12, 10, 8, 8]}, NORMALISED_MODEL],
    ids=["mlp", "normalised"],
)
def test_recomputation_takes_longer_and_gives_identical_weights(model):
    # Running statistics of batch normalisation must not be updated a second time.
    work = {"steps": 2, "model": model, "batch_size": 8}
    method = {"name": "gpipe", "partition": "even", "micro_batches": 2}

    def simulate_with(recompute):
        options = method | {"recompute": recompute}
        return run_simulated(make_scenario(2, workload=work, method=options))

    stored, recomputed = simulate_with(recompute=False), simulate_with(recompute=True)
    assert_finished(recomputed)
    assert_equal_weights(recomputed, stored.weights)
    assert recomputed.events[-1].time > stored.events[-1].time


def wide_gpipe(recompute):
    method = {
        "name": "gpipe",
        "recompute": recompute,
        "partition": "even",
        "micro_batches": 8,
    }
    return make_scenario(3, workload=WIDE_WORKLOAD, speed="5mflops", method=method)


@pytest.mark.parametrize("recompute", [False, True])
def test_plan_predicts_step_time_with_and_without_recomputation(recompute):
    spec = wide_gpipe(recompute)
    times = times_of(run_simulated(spec), "step")
    assert times[1] - times[0] == pytest.approx(plan_of(spec).step_time, rel=0.05)


def test_plan_with_recomputation_needs_more_time_and_less_memory():
    stored = plan_of(wide_gpipe(recompute=False))
    recomputed = plan_of(wide_gpipe(recompute=True))
    assert recomputed.step_time > 1.1 * stored.step_time
    saves_memory = []
    for with_recomputation, without in zip(
        recomputed.assignments, stored.assignments, strict=True
    ):
        saves_memory.append(with_recomputation.memory < without.memory)
    # The last stage has one micro-batch at a time, whose activations it needs in any case.
    assert saves_memory == [True, True, True, False]


# Of 96 samples, the last batch of an epoch has 16, or a single one, fewer than micro-batches.
@pytest.mark.parametrize("batch_size", [20, 19])
@pytest.mark.parametrize("method", ["pipeline", "gpipe", "pipedream"])
def test_last_batch_of_epoch_is_smaller_without_drop_last(method, batch_size):
    workload = {
        "batch_size": batch_size,
        "epochs": 2,
        "steps": None,
        "drop_last": False,
    }
    options = {} if method == "pipedream" else {"micro_batches": 3}
    distributed = run_simulated(
        make_scenario(workload=workload, method={"name": method, **options})
    )
    single = run_simulated(make_scenario(workload=workload, method={"name": "single"}))
    full_batches, remainder = divmod(96, batch_size)
    sizes = [*[batch_size] * full_batches, remainder] * 2
    assert values_of(distributed, "step", "samples") == sizes
    assert values_of(single, "step", "samples") == sizes
    # The asynchronous method trains with older weights.
    if method != "pipedream":
        assert losses_of(distributed) == pytest.approx(losses_of(single), rel=1e-4)


def test_samples_dropped_from_epochs_are_recorded():
    outcome = run_simulated(make_scenario(workload={"batch_size": 20, "steps": 2}))
    assert fields_of(outcome, "left_out") == [{"samples": 16, "of": 96}]
    without_remainder = run_simulated(make_scenario(workload={"steps": 2}))
    assert fields_of(without_remainder, "left_out") == []
