"""Tests of asynchronous pipelines with devices that cannot be reached for a while, or return to the pipeline."""

from itertools import pairwise

import pytest

from testbed.scenario.schema import Scenario
from tests.helpers.delayed_gradients import final_stretches
from tests.helpers.runs import make_scenario, run_simulated
from tests.helpers.schedules import METHOD, MODEL, at_span_start
from tests.testbed.ml.outcomes import field_values
from tests.testbed.ml.pipeline.fault_runs import (
    assert_all_steps,
    assert_weights_match_reference,
    devices_by_stretch,
    recovery_events,
    run_with_faults,
)

WITHOUT_WORKER2 = ["source", "worker1", "worker3"]


def cut_link(**ends) -> dict:
    """Return a fault by which a link is down for longer than any run."""
    return {"flap": {**ends, "down": "10h", "up": "1s"}}


@pytest.mark.parametrize("name", ["ftpipehd", "respipe"])
def test_replaced_worker_joins_again_if_method_admits_devices(name):
    fault = {
        "pause": "worker2",
        "when": at_span_start("worker2", "backward", 13),
        "for": "6s",
    }
    admits_devices = name == "ftpipehd"
    method = {
        "name": "respipe",
        "chain_replication_interval": 4,
        "global_replication_interval": 8,
        "stall_timeout": "500ms",
    }
    if admits_devices:
        method = {**METHOD, "rejoin_timeout": "0s"}
    steps = 150
    outcome = run_simulated(
        make_scenario(
            workload={"steps": steps, "model": MODEL},
            method=method,
            faults=[fault],
            speed="2mflops",
        )
    )
    assert_weights_match_reference(outcome, steps)
    stretches = devices_by_stretch(outcome)
    assert WITHOUT_WORKER2 in stretches
    assert ("worker2" in stretches[-1]) is admits_devices
    message = "joins" if admits_devices else "cannot join"
    logs = field_values(outcome, "log", "text")
    assert any("worker2" in text and message in text for text in logs)


def test_messages_of_replaced_worker_are_ignored_after_network_partition():
    # While it is cut off, worker2 continues to train as a stage that another device has taken over.
    fault = {
        "partition": [["worker2"]],
        "when": at_span_start("worker2", "forward", 13),
        "for": "4s",
    }
    outcome = run_with_faults(fault, steps=120, speed="2mflops")
    assert_weights_match_reference(outcome, 120)
    stretches = devices_by_stretch(outcome)
    assert set(WITHOUT_WORKER2) in [set(devices) for devices in stretches]
    assert "worker2" in stretches[-1]


@pytest.mark.parametrize(
    "ends",
    [{"between": ["worker1", "worker2"]}, {"from": "worker2", "to": "worker1"}],
    ids=["both-directions", "one-direction"],
)
def test_one_of_two_neighbours_without_link_is_excluded(ends):
    # The link is down already while it is measured: both devices answer, but no measurement arrives.
    outcome = run_with_faults({**cut_link(**ends), "at": "1ms"})
    assert_weights_match_reference(outcome)
    logs = field_values(outcome, "log", "text")
    assert any("worker2 is excluded" in text for text in logs)
    assert devices_by_stretch(outcome)[-1] == WITHOUT_WORKER2


def test_device_with_too_slow_link_is_excluded():
    # It answers whenever the others wait for it, and is late again as soon as it is a stage.
    slow = {
        "degrade": {"device": "worker2", "rate": "8kbit", "delay": "100ms"},
        "at": "1ms",
    }
    method = {"stall_timeout": "100ms", "rejoin_timeout": "5s"}
    outcome = run_with_faults(slow, method=method)
    assert_weights_match_reference(outcome)
    assert devices_by_stretch(outcome)[-1] == WITHOUT_WORKER2


def test_replicas_are_not_requested_over_broken_link():
    # worker1 returns without memory, and its replicas are at worker2, which it cannot reach any more.
    kill = {
        "kill": "worker1",
        "when": at_span_start("source", "forward", 22),
        "for": "100ms",
    }
    cut = {**cut_link(between=["worker1", "worker2"]), "after": "200ms"}
    method = {"global_replication_interval": 0, "rejoin_timeout": "5s"}
    outcome = run_with_faults(kill, cut, method=method)
    assert_weights_match_reference(outcome)
    assert len(recovery_events(outcome, "repartitioned")) == 2
    assert devices_by_stretch(outcome)[-1] == WITHOUT_WORKER2


def test_every_batch_before_resume_step_is_recorded():
    # The losses of the last stage do not reach the coordinator, which then dies: the replicas include the losses.
    cut = {
        **cut_link(**{"from": "worker3", "to": "source"}),
        "for": "3s",
        "when": at_span_start("worker3", "forward", 1),
    }
    kill = {"kill": "source", "after": "1s", "for": "4s"}
    outcome = run_with_faults(cut, kill, method={"stall_timeout": "5s"})
    assert_weights_match_reference(outcome)
    first, *_ = recovery_events(outcome, "repartitioned")
    assert first["step"] == 4


@pytest.mark.parametrize("delay", ["2ms", "80ms"])
@pytest.mark.parametrize("workers", [1, 2])
def test_returning_device_is_awaited_before_joining_pipeline(workers, delay):
    # The other stages answer earlier, and by more the longer the delay is.
    last = f"worker{workers}"
    fault = {"kill": last, "when": at_span_start(last, "backward", 6), "for": "3s"}
    distant = {"between": ["source", last], "rate": "20mbit", "delay": delay}
    network = {"link": {"rate": "20mbit", "delay": "2ms"}, "links": [distant]}
    outcome = run_simulated(
        make_scenario(
            workers,
            "2mflops",
            {"steps": 120, "model": MODEL},
            METHOD,
            faults=[fault],
            network=network,
        )
    )
    stretches = devices_by_stretch(outcome)
    assert any(last not in devices for devices in stretches)
    assert last in stretches[-1]
    # A stretch with the same partition would be a change in vain.
    partitions = [partition for _, _, partition in final_stretches(outcome)]
    for before, after in pairwise(partitions):
        assert before != after


def test_batch_completed_while_silent_devices_are_awaited_is_recorded():
    # The last gradient of a batch left just before devices were cut off; training resumes after this batch.
    names = ("source", "w0", "w1", "w2", "w3")
    devices = {name: {} for name in names}
    devices["w2"] = {"speed": "300mflops"}
    devices["w3"] = {"speed": "100mflops"}
    method = {
        "name": "ftpipehd",
        "stall_timeout": "200ms",
        "rejoin_timeout": "3s",
        "chain_replication_interval": 1,
        "in_flight": 3,
        "evaluate_every": 5,
        "profile_runs": 1,
        "repartition_first": 1,
    }
    fault = {
        "partition": [["w1", "w3"]],
        "when": at_span_start("w3", "backward", 2),
        "for": "2.5s",
    }
    scenario = Scenario.model_validate(
        {
            "name": "test",
            "devices": devices,
            "workload": {
                "model": {"name": "mlp", "hidden": [12, 10, 8, 8]},
                "method": method,
                "steps": 23,
            },
            "faults": [fault],
        }
    )
    outcome = run_simulated(scenario)
    assert recovery_events(outcome, "repartitioned")
    assert_all_steps(outcome, 23)
