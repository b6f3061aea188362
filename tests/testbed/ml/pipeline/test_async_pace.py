"""How fast asynchronous pipelines are, undisturbed and after a fault: what the devices and links allow."""

from collections import defaultdict
from functools import cache

import pytest

from testbed.methods import METHODS
from testbed.ml.partition.asynchronous import divisible_limit
from testbed.ml.pipeline.planning import pipeline_over
from testbed.trace.metrics import metrics
from testbed.wire.framing import wire_bytes
from tests.helpers.delayed_gradients import final_stretches
from tests.helpers.runs import (
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    trials,
)

MODEL = {"name": "mlp", "hidden": [48] * 23}
UNEQUAL = (("d0", "50mflops"), ("d1", "50mflops"), ("d2", "5mflops"))
"""Relative speeds 1, 1, 1/10."""
OFTEN = {
    "chain_replication_interval": 10,
    "global_replication_interval": 20,
    "resume": "last-replica",
}


def network(rate):
    return {"link": {"rate": rate, "delay": "1ms"}}


@cache
def measured(name, rate="100mbit", devices=UNEQUAL, kill=None, steps=60):
    """Run, and return the outcome, its figures, and what was known of the last partition's pace from the scenario."""
    method = {"name": name, **OFTEN}
    when = {"device": kill, "begins": "backward", "batch": 35}
    spec = make_scenario(
        workload={"steps": steps, "model": MODEL, "batch_size": 32},
        method=method,
        devices={device: {"speed": speed} for device, speed in devices},
        network=network(rate),
        faults=[{"kill": kill, "when": when}] if kill else [],
    )
    outcome = run_simulated(spec)
    assert outcome.status == "finished", outcome.error
    (trial,) = trials(spec)
    problem, _ = problem_of(spec)
    partition = final_stretches(outcome)[-1][2]
    names = [device for device, _, _ in partition]
    speeds = [problem.device(name).speed for name in names]
    pipeline = pipeline_over(
        problem, names, capacities=[speeds[0] / speed for speed in speeds]
    )
    cuts = (0, *(last for _, _, last in partition))
    method = METHODS[name]
    return (
        outcome,
        metrics(outcome, trial.experiment, method.plan(problem), method.declared),
        pipeline,
        cuts,
    )


@pytest.mark.parametrize("rate", ["100mbit", "20mbit"])
def test_adapting_pays_as_much_as_predicted(rate):
    times, predicted = {}, {}
    for name in ("pipedream", "ftpipehd"):
        _, figures, pipeline, cuts = measured(name, rate)
        times[name], predicted[name] = (
            figures.get("step_time_after", figures["step_time"]),
            pipeline.bottleneck(cuts),
        )
    gained, possible = (
        times["pipedream"] / times["ftpipehd"],
        predicted["pipedream"] / predicted["ftpipehd"],
    )
    assert gained >= 0.97 * possible
    assert 5 < possible < divisible_limit([1, 1, 0.1]) == pytest.approx(7.0)


@pytest.mark.parametrize("name", ["pipedream", "ftpipehd"])
def test_the_slowest_is_always_busy(name):
    assert measured(name)[1]["busiest_share"] >= 0.95


def test_after_a_fault_it_is_as_fast_as_without_the_lost_one():
    _, figures, *_ = measured("ftpipehd", kill="d1")
    left = (("d0", "50mflops"), ("d2", "5mflops"))
    _, fresh, *_ = measured("ftpipehd", devices=left)
    assert figures["step_time_after"] == pytest.approx(
        fresh["step_time_after"], rel=0.05
    )


def test_taking_over_is_no_match_for_redistribution():
    _, ours, *_ = measured("ftpipehd", kill="d1")
    _, theirs, *_ = measured("respipe", kill="d1")
    assert theirs["step_time_after"] >= 5 * ours["step_time_after"]
    assert theirs["recovery_list"][0]["moved"] == 0


@pytest.mark.parametrize("kill", ["d1", "d3"])
def test_recovery_takes_as_long_as_what_it_moves(kill):
    devices = tuple((f"d{index}", "50mflops") for index in range(4))
    outcome, figures, pipeline, cuts = measured("ftpipehd", "5mbit", devices, kill)
    (recovery,) = figures["recovery_list"]
    assert (
        recovery["struck"]
        < recovery["detected"]
        < recovery["repartitioned"]
        < recovery["redistributed"]
    )
    assert recovery["redistributed"] <= recovery["resumed"] < recovery["trained"]
    # The replica was after batch 30, batch 35 had begun: what is done again counts.
    again = [
        event.time
        for event in outcome.events
        if event.event == "step" and event.fields["step"] == 35
    ]
    assert (
        figures["outage_time"]
        == again[-1] - recovery["struck"]
        > recovery["trained"] - recovery["struck"]
    )
    moved = defaultdict(float)
    for event in outcome.events:
        late = recovery["detected"] < event.time < recovery["trained"]
        if late and event.event == "receive" and event.fields["message"] == "unit":
            moved[event.fields["peer"], event.device] += wire_bytes(
                event.fields["bytes"]
            )
    assert figures["recovery_bytes"] == recovery["moved"] > 0
    carrying = 8 * max(moved.values()) / 5e6
    fill = pipeline.passage_costs.of(cuts, lambda one, other: one + other)
    assert recovery["trained"] - recovery["detected"] <= 1.5 * carrying + fill


def test_costs_of_a_change_are_reported():
    outcome, figures, *_ = measured("ftpipehd")
    (change,) = fields_of(outcome, "repartition")
    assert figures["repartitions"] == 1
    assert figures["repartition_bytes"] > 0
    assert figures["repartition_pause"] == change["seconds"] > change["draining"] > 0
    assert figures["repartition_moving"] == change["seconds"] - change["draining"]
    assert figures["versions_kept"] == 3


def test_an_evaluation_between_draining_and_moving_is_no_cost_of_the_change():
    """What a change costs is the same whether or not the empty pipeline is used for something else in between."""
    costs = []
    for evaluated in (None, 3):
        method = {
            "name": "ftpipehd",
            "repartition_first": 3,
            "profile_runs": 1,
            "evaluate_every": evaluated,
            "in_flight": 1,
        }
        devices = {device: {"speed": speed} for device, speed in UNEQUAL}
        outcome = run_simulated(
            make_scenario(
                workload={"steps": 6, "model": MODEL}, method=method, devices=devices
            )
        )
        (change,) = fields_of(outcome, "repartition")
        costs.append((change["step"], change["seconds"] - change["draining"]))
    assert costs[0] == pytest.approx(costs[1])
