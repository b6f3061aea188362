"""Sequential layer mapping and the single device on the virtual clock."""

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

INFER = {"task": "infer", "requests": 7}


def sequential(workload=INFER, method=MappingProxyType({}), **keys):
    return make_scenario(
        workload=workload, method={"name": "sequential", **method}, **keys
    )


def accuracy_of_plain_model(spec, weights=None, requests=7):
    problem, data = problem_of(spec)
    model = problem.model.build(0, len(problem.model.units), problem.seed).eval()
    if weights is not None:
        model.load_state_dict(weights)
    size, there = spec.workload.batch_size, len(data.test_labels)
    right = total = 0
    for request in range(requests):
        part = [
            sample % there for sample in range(request * size, (request + 1) * size)
        ]
        with torch.no_grad():
            found = (
                model(torch.from_numpy(data.test_images[part])).argmax(dim=1).numpy()
            )
        right += int((found == data.test_labels[part]).sum())
        total += len(found)
    return right / total


@pytest.mark.parametrize("partition", ["even", "latency", "bottleneck"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_answers_equal_the_undivided_model(partition, in_flight):
    weights = run_simulated(make_scenario()).weights
    spec = sequential(method={"partition": partition, "in_flight": in_flight})
    outcome = run_simulated(spec, weights=weights)
    assert outcome.status == "finished", outcome.error
    assert [event["request"] for event in fields_of(outcome, "request")] == list(
        range(7)
    )
    assert fields_of(outcome, "evaluate")[-1]["accuracy"] == accuracy_of_plain_model(
        spec, weights
    )


def test_seeded_weights_where_none_are_given():
    spec = sequential()
    assert fields_of(run_simulated(spec), "evaluate")[-1][
        "accuracy"
    ] == accuracy_of_plain_model(spec)


def test_default_is_one_pass_over_the_test_samples():
    assert (
        len(fields_of(run_simulated(sequential(workload={"task": "infer"})), "request"))
        == 3
    )  # 40 samples, 16 a request


def test_latency_alone_and_throughput_together_are_as_predicted():
    work = {
        **INFER,
        "requests": 40,
        "batch_size": 20,
        "model": {"name": "mlp", "hidden": [128, 128, 128, 128]},
    }
    alone = sequential(workload=work)
    plan = METHODS["sequential"].plan(problem_of(alone)[0])
    latencies = [
        event["latency"] for event in fields_of(run_simulated(alone), "request")
    ]
    assert latencies[-1] == pytest.approx(plan.details.latency, rel=0.01)

    together = sequential(
        workload=work, method={"in_flight": 8, "partition": "bottleneck"}
    )
    plan = METHODS["sequential"].plan(problem_of(together)[0])
    times = [
        event.time
        for event in run_simulated(together).events
        if event.event == "request"
    ]
    assert (times[30] - times[10]) / 20 == pytest.approx(
        plan.details.bottleneck, rel=0.02
    )


@pytest.mark.parametrize("end", [{"for": "2s"}, {}])
def test_requests_lost_with_a_device_are_sent_again(end):
    fault = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "forward", "batch": 3},
        **end,
    }
    spec = sequential(
        method={"in_flight": 2, "stall_timeout": "500ms", "rejoin_timeout": "6s"},
        faults=[fault],
    )
    outcome = run_simulated(spec)
    assert outcome.status == "finished", outcome.error
    assert sorted(event["request"] for event in fields_of(outcome, "request")) == list(
        range(7)
    )
    assert fields_of(outcome, "evaluate")[-1]["accuracy"] == accuracy_of_plain_model(
        spec
    )
    assert max(event["latency"] for event in fields_of(outcome, "request")) > 1
    assert [event["phase"] for event in fields_of(outcome, "recovery")] == [
        "detected",
        "resumed",
    ]


@pytest.mark.parametrize("device", ["source", "worker2"])
def test_single_device_trains_the_undivided_model(device):
    spec = make_scenario(method={"name": "single", "device": device})
    outcome = run_simulated(spec)
    model, losses = train_with_torch(spec)
    assert all(
        torch.equal(outcome.weights[name], tensor)
        for name, tensor in model.state_dict().items()
    )
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-6
    )
    assert {name for name, _ in events_of(outcome, "compute")} == {device}
    assert not fields_of(outcome, "send")
    plan = METHODS["single"].plan(problem_of(spec)[0])
    times = [event.time for event in outcome.events if event.event == "step"]
    assert times[-1] - times[-2] == pytest.approx(plan.step_time)
    assert {fields["span"] for _, fields in events_of(outcome, "begin")} == METHODS[
        "single"
    ].spans(plan, device)
    assert METHODS["single"].spans(plan, "worker1") == frozenset()


def test_single_device_answers_requests():
    spec = make_scenario(workload=INFER, method={"name": "single"})
    outcome = run_simulated(spec)
    assert fields_of(outcome, "evaluate")[-1]["accuracy"] == accuracy_of_plain_model(
        spec
    )
    assert len(fields_of(outcome, "request")) == 7


def test_missing_or_small_single_device_is_refused():
    with pytest.raises(InputError, match=r"method\.device: unknown device 'elsewhere'"):
        METHODS["single"].plan(
            problem_of(make_scenario(method={"name": "single", "device": "elsewhere"}))[
                0
            ]
        )
    devices = {"source": {"speed": "20mflops", "memory": "10kB"}}
    with pytest.raises(InputError, match=r"source has 10 kB of memory"):
        METHODS["single"].plan(
            problem_of(make_scenario(method={"name": "single"}, devices=devices))[0]
        )
