"""What asynchronous pipelines find out about links and devices while they train, and what they make of it."""

import pytest

from tests.helpers.delayed_gradients import final_stretches
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import at_span_start
from tests.testbed.ml.pipeline.test_async_faults import (
    assert_right,
    disturbed,
    recovered,
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
WORK = {
    "model": {"name": "mlp", "hidden": [24, 20, 20, 16, 16, 12, 12, 12]},
    "batch_size": 13,
}
SLOW = "60kbit"


def two(steps, *faults, method=(), workers=2, **keys):
    """Two or three equal devices."""
    return make_scenario(
        workers,
        "20mflops",
        WORK | {"steps": steps},
        METHOD | dict(method),
        faults=faults,
        **keys,
    )


def partitions(outcome):
    return [
        (step, [tuple(stage) for stage in partition])
        for step, _, partition in final_stretches(outcome)
    ]


def rates(outcome):
    return {
        (each["source"], each["destination"]): each["rate"]
        for each in fields_of(outcome, "bandwidth")
    }


def test_a_link_that_is_degraded_in_mid_run_is_measured_again_and_the_partition_follows():
    slow = {
        "degrade": {"between": ["source", "worker1"], "rate": SLOW},
        "when": at_span_start("source", "backward", 8),
    }
    traffic = {"partition_objective": "link-traffic"}
    network = {
        "link": {"rate": "20mbit"},
        "links": [{"between": ["source", "worker1"], "rate": SLOW}],
    }
    outcome = run_simulated(two(70, slow, method=traffic))
    always = run_simulated(two(70, network=network, method=traffic))
    assert outcome.status == "finished", outcome.error
    changed = [step for step, _ in partitions(outcome) if step > 8]
    assert changed[0] <= 8 + 2 * 20
    assert partitions(outcome)[-1][1] == partitions(always)[-1][1]
    assert rates(outcome)["source", "worker1"] == pytest.approx(60e3, rel=0.03)


def test_who_is_lost_over_a_slow_link_is_not_taken_back_over_it_again_and_again():
    slow = {
        "degrade": {"between": ["source", "worker1"], "rate": SLOW},
        "when": at_span_start("source", "backward", 8),
    }
    outcome = run_simulated(
        two(
            245,
            slow,
            method={
                "chain_replication_interval": 50,
                "global_replication_interval": 100,
                "stall_timeout": "500ms",
            },
        )
    )
    assert outcome.status == "finished", outcome.error
    assert len(recovered(outcome)) <= 2
    assert [device for device, *_ in partitions(outcome)[-1][1]] == [
        "source",
        "worker2",
    ]


def test_the_link_between_new_neighbours_is_measured_after_a_loss():
    network = {
        "link": {"rate": "20mbit"},
        "links": [{"between": ["source", "worker2"], "rate": "100kbit"}],
    }
    killed = {"kill": "worker1", "when": at_span_start("worker1", "backward", 55)}
    outcome = run_simulated(
        two(
            100,
            killed,
            network=network,
            method={"stall_timeout": "500ms", "partition_objective": "link-traffic"},
        )
    )
    left = {"source": {"speed": "20mflops"}, "worker2": {"speed": "20mflops"}}
    fresh = run_simulated(
        two(
            30,
            network=network,
            devices=left,
            method={"partition_objective": "link-traffic"},
        )
    )
    assert outcome.status == "finished", outcome.error
    assert rates(outcome)["source", "worker2"] == pytest.approx(100e3, rel=0.03)
    assert partitions(outcome)[-1][1] == partitions(fresh)[-1][1]


def test_a_device_that_is_off_at_the_start_costs_seconds():
    outcome = run_simulated(
        two(30, {"kill": "worker1", "at": "0s"}, method={"stall_timeout": "2s"})
    )
    assert outcome.status == "finished", outcome.error
    assert [device for device, *_ in partitions(outcome)[0][1]] == ["source", "worker2"]
    assert fields_of(outcome, "bandwidth")
    assert next(event.time for event in outcome.events if event.event == "step") < 8
    assert any(
        "worker1 did not answer in 5 s" in event["text"]
        for event in fields_of(outcome, "log")
    )


def test_who_was_off_at_the_start_joins_when_it_comes():
    outcome = run_simulated(two(400, {"kill": "worker1", "at": "0s", "for": "6s"}))
    assert outcome.status == "finished", outcome.error
    assert [device for device, *_ in partitions(outcome)[-1][1]] == [
        "source",
        "worker1",
        "worker2",
    ]


def test_a_device_that_was_cut_off_from_its_neighbour_comes_back_when_the_link_heals():
    cut = {
        "flap": {"between": ["worker1", "worker2"], "down": "10h", "up": "1s"},
        "for": "3s",
    }
    cut["when"] = at_span_start("worker1", "backward", 13)
    outcome = disturbed(cut, steps=120, speed="2mflops")
    assert_right(outcome, 120)
    members = [
        [device for device, _, _ in partition]
        for _, _, partition in final_stretches(outcome)
    ]
    assert ["source", "worker1", "worker3"] in members
    assert "worker2" in members[-1]


def test_when_all_answer_again_as_they_were_nothing_is_done_again():
    """The fault handler's first case: training goes on with the batch whose gradients did not come."""
    paused = {
        "partition": [["worker2"]],
        "when": at_span_start("worker2", "backward", 13),
        "for": "4s",
    }
    outcome = disturbed(paused, method={"rejoin_timeout": "10s"})
    assert_right(outcome)
    assert [step["step"] for step in fields_of(outcome, "step")] == list(
        range(len(fields_of(outcome, "step")))
    )
    (decided,) = recovered(outcome)
    assert decided["case"] == "restart"


@pytest.mark.parametrize("shared", [False, True])
def test_what_both_ways_of_a_link_share_counts_half(shared):
    """The factor 2 of equation (5), by what the links are."""
    radio = {
        "link": {"delay": "1ms"},
        "cells": [{"devices": ["source", "worker1"], "rate": "10mbit"}],
    }
    network = radio if shared else {"link": {"rate": "10mbit", "delay": "1ms"}}
    found = rates(run_simulated(two(12, network=network, workers=1)))
    for rate in found.values():
        assert rate == pytest.approx(5e6 if shared else 10e6, rel=0.1)


def test_the_partition_to_begin_with_is_that_of_the_links_as_they_were_measured():
    """A link that is slower than the scenario says is known before the first batch."""
    slow = {"degrade": {"between": ["source", "worker1"], "rate": SLOW}, "at": "0s"}
    outcome = run_simulated(two(8, slow, workers=1))
    always = run_simulated(two(8, workers=1, network={"link": {"rate": SLOW}}))
    assert fields_of(outcome, "repartition")[0]["step"] == 0
    assert partitions(outcome)[-1] == partitions(always)[-1]
