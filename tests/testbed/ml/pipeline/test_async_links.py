"""Tests of measured links in asynchronous pipelines, and of the partitions that follow from them."""

import pytest

from tests.helpers.delayed_gradients import final_stretches
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import at_span_start
from tests.testbed.ml.outcomes import field_values, times_of
from tests.testbed.ml.pipeline.fault_runs import (
    assert_weights_match_reference,
    devices_by_stretch,
    recovery_events,
    run_with_faults,
)

METHOD = {
    "name": "ftpipehd",
    "profile_runs": 1,
    "repartition_first": 10,
    "repartition_every": 20,
    "chain_replication_interval": 0,
    "global_replication_interval": 50,
    "stall_timeout": "10s",
}
LINK_TRAFFIC = {"partition_objective": "link-traffic"}
WORKLOAD = {
    "model": {"name": "mlp", "hidden": [24, 20, 20, 16, 16, 12, 12, 12]},
    "batch_size": 13,
}
SLOW = "60kbit"
DEGRADE = {"degrade": {"between": ["source", "worker1"], "rate": SLOW}}


def link_scenario(steps, *faults, method=(), workers=2, **keys):
    """Return a scenario of equal devices; ``method`` changes some of `METHOD`'s options."""
    return make_scenario(
        workers,
        "20mflops",
        WORKLOAD | {"steps": steps},
        METHOD | dict(method),
        faults=faults,
        **keys,
    )


def run_finished(*arguments, **keys):
    outcome = run_simulated(link_scenario(*arguments, **keys))
    assert outcome.status == "finished", outcome.error
    return outcome


def last_partition(outcome):
    _, _, partition = final_stretches(outcome)[-1]
    return partition


def measured_rates(outcome):
    """Return the last measured rate of each link in bit/s."""
    rates = {}
    for event in fields_of(outcome, "bandwidth"):
        rates[event["source"], event["destination"]] = event["rate"]
    return rates


def network_with_slow_link(device, rate):
    """Return links of 20 Mbit/s, but one slower one from the coordinator to a device."""
    slow = {"between": ["source", device], "rate": rate}
    return {"link": {"rate": "20mbit"}, "links": [slow]}


def test_degraded_link_is_measured_again_and_partition_adapts():
    slow = {**DEGRADE, "when": at_span_start("source", "backward", 8)}
    outcome = run_finished(70, slow, method=LINK_TRAFFIC)
    # The partition becomes that of a link that has been slow from the start.
    network = network_with_slow_link("worker1", SLOW)
    always_slow = run_finished(70, network=network, method=LINK_TRAFFIC)
    assert last_partition(outcome) == last_partition(always_slow)
    starts = [first for first, _, _ in final_stretches(outcome) if first > 8]
    # Within two intervals of `repartition_every`.
    assert starts[0] <= 8 + 2 * 20
    rate = measured_rates(outcome)["source", "worker1"]
    assert rate == pytest.approx(60e3, rel=0.03)


def test_device_lost_over_slow_link_is_not_admitted_repeatedly():
    slow = {**DEGRADE, "when": at_span_start("source", "backward", 8)}
    method = {
        "chain_replication_interval": 50,
        "global_replication_interval": 100,
        "stall_timeout": "500ms",
    }
    outcome = run_finished(245, slow, method=method)
    assert len(recovery_events(outcome, "repartitioned")) <= 2
    assert devices_by_stretch(outcome)[-1] == ["source", "worker2"]


def test_link_between_new_neighbours_is_measured_after_loss():
    network = network_with_slow_link("worker2", "100kbit")
    kill = {"kill": "worker1", "when": at_span_start("worker1", "backward", 55)}
    method = {"stall_timeout": "500ms", **LINK_TRAFFIC}
    outcome = run_finished(100, kill, network=network, method=method)
    rate = measured_rates(outcome)["source", "worker2"]
    assert rate == pytest.approx(100e3, rel=0.03)
    # The partition is that of a pipeline that never had the lost device.
    remaining = {"source": {"speed": "20mflops"}, "worker2": {"speed": "20mflops"}}
    without_worker1 = run_finished(
        30, network=network, devices=remaining, method=LINK_TRAFFIC
    )
    assert last_partition(outcome) == last_partition(without_worker1)


def test_device_off_at_start_delays_training_by_seconds():
    kill = {"kill": "worker1", "at": "0s"}
    outcome = run_finished(30, kill, method={"stall_timeout": "2s"})
    assert devices_by_stretch(outcome)[0] == ["source", "worker2"]
    assert fields_of(outcome, "bandwidth")
    assert times_of(outcome, "step")[0] < 8
    logs = field_values(outcome, "log", "text")
    assert any("worker1 did not answer in 5 s" in text for text in logs)


def test_device_off_at_start_joins_when_it_returns():
    outcome = run_finished(400, {"kill": "worker1", "at": "0s", "for": "6s"})
    assert devices_by_stretch(outcome)[-1] == ["source", "worker1", "worker2"]


def test_device_without_link_to_neighbour_returns_when_link_is_repaired():
    cut = {
        "flap": {"between": ["worker1", "worker2"], "down": "10h", "up": "1s"},
        "for": "3s",
        "when": at_span_start("worker1", "backward", 13),
    }
    outcome = run_with_faults(cut, steps=120, speed="2mflops")
    assert_weights_match_reference(outcome, 120)
    stretches = devices_by_stretch(outcome)
    assert ["source", "worker1", "worker3"] in stretches
    assert "worker2" in stretches[-1]


def test_no_batch_is_repeated_if_all_devices_answer_with_their_memory():
    # The first case of FTPipeHD's fault handler: training continues with the batch whose gradients did not arrive.
    cut = {
        "partition": [["worker2"]],
        "when": at_span_start("worker2", "backward", 13),
        "for": "4s",
    }
    outcome = run_with_faults(cut, method={"rejoin_timeout": "10s"})
    assert_weights_match_reference(outcome)
    steps = field_values(outcome, "step", "step")
    assert steps == list(range(len(steps)))
    (decision,) = recovery_events(outcome, "repartitioned")
    assert decision["case"] == "restart"


SHARED_CHANNEL = {
    "link": {"delay": "1ms"},
    "cells": [{"devices": ["source", "worker1"], "rate": "10mbit"}],
}
TWO_WAY_LINK = {"link": {"rate": "10mbit", "delay": "1ms"}}


@pytest.mark.parametrize(
    ("network", "expected"),
    [(SHARED_CHANNEL, 5e6), (TWO_WAY_LINK, 10e6)],
    ids=["shared", "two-way"],
)
def test_rate_shared_by_both_directions_is_measured_as_half(network, expected):
    # Equation (5) counts activations twice; here the measurement finds whether directions share a rate.
    outcome = run_simulated(link_scenario(12, network=network, workers=1))
    for rate in measured_rates(outcome).values():
        assert rate == pytest.approx(expected, rel=0.1)


def test_initial_partition_follows_measured_links():
    # The link is slower than the scenario says, which the coordinator measures before the first batch.
    outcome = run_simulated(link_scenario(8, {**DEGRADE, "at": "0s"}, workers=1))
    network = {"link": {"rate": SLOW}}
    always_slow = run_simulated(link_scenario(8, workers=1, network=network))
    assert field_values(outcome, "repartition", "step")[0] == 0
    first_step, _, partition = final_stretches(outcome)[-1]
    expected_step, _, expected = final_stretches(always_slow)[-1]
    assert (first_step, partition) == (expected_step, expected)
