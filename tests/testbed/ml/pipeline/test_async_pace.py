"""Tests of the speed of asynchronous pipelines, undisturbed and after faults, against the limits of devices."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from testbed.methods import METHODS
from testbed.ml.partition.asynchronous import AsynchronousPipeline, divisible_limit
from testbed.ml.partition.cuts import Cuts
from testbed.ml.pipeline.planning import pipeline_over
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed.wire.framing import wire_bytes
from tests.helpers.delayed_gradients import final_stretches
from tests.helpers.runs import (
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    trials,
)
from tests.testbed.ml.pipeline.fault_runs import devices_of

MODEL = {"name": "mlp", "hidden": [48] * 23}
UNEQUAL = (("d0", "50mflops"), ("d1", "50mflops"), ("d2", "5mflops"))
"""Relative speeds 1, 1, 1/10."""
FREQUENT_REPLICATION = {
    "chain_replication_interval": 10,
    "global_replication_interval": 20,
    "resume": "last-replica",
}


@dataclass(frozen=True)
class Measurement:
    """A run with its metrics, and the last partition with its predicted times."""

    outcome: Outcome
    metrics: dict[str, Any]
    pipeline: AsynchronousPipeline
    """The pipeline over the last devices, with capacities from the scenario."""
    cuts: Cuts


@cache
def measure(
    name: str,
    rate: str = "100mbit",
    devices: tuple[tuple[str, str], ...] = UNEQUAL,
    kill: str | None = None,
) -> Measurement:
    """Train 60 batches; the device ``kill`` fails in the backward of batch 35."""
    faults = []
    if kill is not None:
        # Between the replications after batches 30 and 40, so that some batches are trained again.
        when = {"device": kill, "begins": "backward", "batch": 35}
        faults.append({"kill": kill, "when": when})
    scenario = make_scenario(
        workload={"steps": 60, "model": MODEL, "batch_size": 32},
        method={"name": name, **FREQUENT_REPLICATION},
        devices={device: {"speed": speed} for device, speed in devices},
        network={"link": {"rate": rate, "delay": "1ms"}},
        faults=faults,
    )
    outcome = run_simulated(scenario)
    assert outcome.status == "finished", outcome.error
    (trial,) = trials(scenario)
    problem, _ = problem_of(scenario)
    method = METHODS[name]
    values = metrics(outcome, trial.experiment, method.plan(problem), method.declared)
    _, _, partition = final_stretches(outcome)[-1]
    names = devices_of(partition)
    speeds = [problem.device(device).speed for device in names]
    capacities = [speeds[0] / speed for speed in speeds]
    pipeline = pipeline_over(problem, names, capacities=capacities)
    cuts = (0, *(last for _, _, last in partition))
    return Measurement(outcome, values, pipeline, cuts)


@pytest.mark.parametrize("rate", ["100mbit", "20mbit"])
def test_speedup_by_repartition_is_as_predicted(rate):
    times = {}
    predictions = {}
    for name in ("pipedream", "ftpipehd"):
        run = measure(name, rate)
        # PipeDream never repartitions, so its metrics have no time after a repartition.
        times[name] = run.metrics.get("step_time_after", run.metrics["step_time"])
        predictions[name] = run.pipeline.bottleneck(run.cuts)
    speedup = times["pipedream"] / times["ftpipehd"]
    predicted = predictions["pipedream"] / predictions["ftpipehd"]
    assert speedup >= 0.97 * predicted
    # Units are not divisible at any point, so the limit of a divisible chain is not reached.
    limit = divisible_limit([1, 1, 0.1])
    assert limit == pytest.approx(7.0)
    assert 5 < predicted < limit


@pytest.mark.parametrize("name", ["pipedream", "ftpipehd"])
def test_busiest_device_computes_at_least_95_percent_of_time(name):
    assert measure(name).metrics["busiest_share"] >= 0.95


def test_speed_after_loss_equals_speed_without_lost_device():
    after_loss = measure("ftpipehd", kill="d1").metrics
    remaining = (("d0", "50mflops"), ("d2", "5mflops"))
    without_device = measure("ftpipehd", devices=remaining).metrics
    assert after_loss["step_time_after"] == pytest.approx(
        without_device["step_time_after"], rel=0.05
    )


def test_redistribution_is_5_times_faster_than_take_over_after_loss():
    redistributed = measure("ftpipehd", kill="d1").metrics
    # ResPipe's slow next device takes over all units of the lost one, of which it has replicas.
    taken_over = measure("respipe", kill="d1").metrics
    assert taken_over["step_time_after"] >= 5 * redistributed["step_time_after"]
    assert taken_over["recovery_list"][0]["moved"] == 0


def moved_wire_bytes(outcome, begin, end):
    """Return the bytes of units on the wire by link, received between two times."""
    moved = defaultdict(float)
    for event in outcome.events.of("receive"):
        if begin < event.time < end and event.fields["message"] == "unit":
            link = event.fields["peer"], event.device
            moved[link] += wire_bytes(event.fields["bytes"])
    return moved


@pytest.mark.parametrize("kill", ["d1", "d3"])
def test_recovery_time_is_bounded_by_transfer_of_moved_units(kill):
    devices = tuple((f"d{index}", "50mflops") for index in range(4))
    run = measure("ftpipehd", "5mbit", devices, kill)
    (recovery,) = run.metrics["recovery_list"]
    phases = ("struck", "detected", "repartitioned", "redistributed")
    times = [recovery[phase] for phase in phases]
    assert times == sorted(set(times))
    assert recovery["redistributed"] <= recovery["resumed"] < recovery["trained"]
    # The replica was after batch 30, and batch 35 had begun: batches that are trained again count for the outage.
    repeated = []
    for event in run.outcome.events.of("step"):
        if event.fields["step"] == 35:
            repeated.append(event.time)
    outage = run.metrics["outage_time"]
    assert outage == repeated[-1] - recovery["struck"]
    assert outage > recovery["trained"] - recovery["struck"]
    moved = moved_wire_bytes(run.outcome, recovery["detected"], recovery["trained"])
    assert run.metrics["recovery_bytes"] == recovery["moved"]
    assert recovery["moved"] > 0
    # The busiest link of 5 Mbit/s, and one batch through the empty pipeline.
    transfer = 8 * max(moved.values()) / 5e6
    fill = run.pipeline.passage_costs.of(run.cuts, operator.add)
    seconds = recovery["trained"] - recovery["detected"]
    assert seconds <= 1.5 * transfer + fill


def test_costs_of_repartition_are_reported():
    run = measure("ftpipehd")
    (change,) = fields_of(run.outcome, "repartition")
    values = run.metrics
    assert values["repartitions"] == 1
    assert values["repartition_bytes"] > 0
    assert values["repartition_pause"] == change["seconds"]
    assert change["seconds"] > change["draining"] > 0
    assert values["repartition_moving"] == change["seconds"] - change["draining"]
    assert values["versions_kept"] == 3


def test_evaluation_in_drained_pipeline_does_not_count_for_repartition():
    costs = []
    for evaluate_every in (None, 3):
        method = {
            "name": "ftpipehd",
            "repartition_first": 3,
            "profile_runs": 1,
            "evaluate_every": evaluate_every,
            "in_flight": 1,
        }
        outcome = run_simulated(
            make_scenario(
                workload={"steps": 6, "model": MODEL},
                method=method,
                devices={device: {"speed": speed} for device, speed in UNEQUAL},
            )
        )
        (change,) = fields_of(outcome, "repartition")
        costs.append((change["step"], change["seconds"] - change["draining"]))
    without_evaluation, with_evaluation = costs
    assert without_evaluation == pytest.approx(with_evaluation)
