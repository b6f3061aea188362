"""Inference with `sequential`, and the method `single`, in simulation."""

from types import MappingProxyType

import pytest
import torch

from testbed.common.errors import InputError
from testbed.methods import METHODS
from tests.helpers.runs import (
    events_of,
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    train_with_torch,
)
from tests.testbed.methods.outcomes import (
    assert_equal_weights,
    assert_finished,
    final_accuracy,
    losses_of,
    plan_of,
    times_of,
    values_of,
)

REQUESTS = 7
INFER = {"task": "infer", "requests": REQUESTS}


def sequential_scenario(workload=INFER, method=MappingProxyType({}), **keys):
    return make_scenario(
        workload=workload, method={"name": "sequential", **method}, **keys
    )


def accuracy_of_undivided_model(spec, weights=None, requests=REQUESTS):
    """Classify the samples of all requests with torch alone; return the share of correct answers."""
    problem, data = problem_of(spec)
    model = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    if weights is not None:
        model.load_state_dict(weights)
    batch_size, sample_count = spec.workload.batch_size, len(data.test_labels)
    # Requests take the test samples in order and start over at the end.
    samples = [index % sample_count for index in range(requests * batch_size)]
    with torch.no_grad():
        outputs = model(torch.from_numpy(data.test_images[samples]))
    classes = outputs.argmax(dim=1).numpy()
    return (classes == data.test_labels[samples]).sum() / len(samples)


@pytest.mark.parametrize("partition", ["even", "latency", "bottleneck"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_accuracy_equals_undivided_model(partition, in_flight):
    weights = run_simulated(make_scenario()).weights
    spec = sequential_scenario(method={"partition": partition, "in_flight": in_flight})
    outcome = run_simulated(spec, weights=weights)
    assert_finished(outcome)
    # Requests in flight overtake none of the others.
    assert values_of(outcome, "request", "request") == list(range(REQUESTS))
    assert final_accuracy(outcome) == accuracy_of_undivided_model(spec, weights)


def test_weights_are_drawn_from_seed_by_default():
    spec = sequential_scenario()
    outcome = run_simulated(spec)
    assert final_accuracy(outcome) == accuracy_of_undivided_model(spec)


def test_default_number_of_requests_covers_test_samples_once():
    spec = sequential_scenario(workload={"task": "infer"})
    # 40 samples in requests of 16.
    assert len(fields_of(run_simulated(spec), "request")) == 3


LARGE_INFERENCE = {
    "task": "infer",
    "requests": 40,
    "batch_size": 20,
    "model": {"name": "mlp", "hidden": [128, 128, 128, 128]},
}


def test_latency_of_single_request_matches_prediction():
    spec = sequential_scenario(workload=LARGE_INFERENCE)
    latencies = values_of(run_simulated(spec), "request", "latency")
    predicted = plan_of(spec).details.latency
    assert latencies[-1] == pytest.approx(predicted, rel=0.01)


def test_throughput_of_concurrent_requests_matches_predicted_bottleneck():
    method = {"in_flight": 8, "partition": "bottleneck"}
    spec = sequential_scenario(workload=LARGE_INFERENCE, method=method)
    times = times_of(run_simulated(spec), "request")
    # Between requests 10 and 30 the pipeline is full.
    seconds_per_request = (times[30] - times[10]) / 20
    predicted = plan_of(spec).details.bottleneck
    assert seconds_per_request == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize(
    "duration", [{"for": "2s"}, {}], ids=["restarted", "permanent"]
)
def test_requests_lost_with_killed_device_are_sent_again(duration):
    fault = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "forward", "batch": 3},
        **duration,
    }
    spec = sequential_scenario(
        method={"in_flight": 2, "stall_timeout": "500ms", "rejoin_timeout": "6s"},
        faults=[fault],
    )
    outcome = run_simulated(spec)
    assert_finished(outcome)
    assert sorted(values_of(outcome, "request", "request")) == list(range(REQUESTS))
    assert final_accuracy(outcome) == accuracy_of_undivided_model(spec)
    # The latency of a request includes the time of the recovery.
    assert max(values_of(outcome, "request", "latency")) > 1
    assert values_of(outcome, "recovery", "phase") == ["detected", "resumed"]


@pytest.mark.parametrize("device", ["source", "worker2"])
def test_single_device_trains_undivided_model(device):
    spec = make_scenario(method={"name": "single", "device": device})
    outcome = run_simulated(spec)
    model, losses = train_with_torch(spec)
    assert_equal_weights(outcome, model.state_dict())
    assert losses_of(outcome) == pytest.approx(losses, abs=1e-6)
    computing = {name for name, _ in events_of(outcome, "compute")}
    assert computing == {device}
    assert not fields_of(outcome, "send")


@pytest.mark.parametrize("device", ["source", "worker2"])
def test_plan_of_single_device_predicts_step_time_and_spans(device):
    spec = make_scenario(method={"name": "single", "device": device})
    outcome = run_simulated(spec)
    plan = plan_of(spec)
    times = times_of(outcome, "step")
    assert times[-1] - times[-2] == pytest.approx(plan.step_time)
    method = METHODS["single"]
    assert set(values_of(outcome, "begin", "span")) == method.spans(plan, device)
    assert method.spans(plan, "worker1") == frozenset()


def test_single_device_answers_requests():
    spec = make_scenario(workload=INFER, method={"name": "single"})
    outcome = run_simulated(spec)
    assert final_accuracy(outcome) == accuracy_of_undivided_model(spec)
    assert len(fields_of(outcome, "request")) == REQUESTS


def test_unknown_single_device_is_rejected():
    spec = make_scenario(method={"name": "single", "device": "elsewhere"})
    with pytest.raises(InputError, match=r"method\.device: unknown device 'elsewhere'"):
        plan_of(spec)


def test_single_device_with_too_little_memory_is_rejected():
    devices = {"source": {"speed": "20mflops", "memory": "10kB"}}
    spec = make_scenario(method={"name": "single"}, devices=devices)
    with pytest.raises(InputError, match=r"source has 10 kB of memory"):
        plan_of(spec)
