"""Asynchronous pipelines outlive their devices: whatever happens, each batch counts once, in one state of the model."""

import os
import random

import pytest
import torch
from delayed import Reference, stretches
from runs import of, run, scenario

DEVICES = ("source", "worker1", "worker2", "worker3")
WORKERS = DEVICES[1:]
STEPS = 36
METHOD = {
    "name": "ftpipehd",
    "aggregate": 0,
    "chain_every": 4,
    "global_every": 8,
    "repartition_first": 5,
    "repartition_every": 10,
    "profile_runs": 1,
    "patience": "500ms",
    "least_gain": 0,
}
MODEL = {"name": "mlp", "hidden": [24] * 6}
"""Units that can be shared out, so that there is something to adapt."""
SEEDS = int(os.environ.get("RANDOM_FAULTS", "24"))
"""How many random schedules; all that there are to be is 200."""


def disturbed(*faults, method=METHOD, steps=STEPS, **keys):
    return run(scenario(workload={"steps": steps, "model": MODEL}, method={**METHOD, **method}, faults=faults, **keys))


def assert_right(outcome, steps=STEPS, **keys):
    """The run ended, every batch was done, and the weights are those of the stretches that were not undone."""
    assert outcome.status == "finished", outcome.error
    assert {step["step"] for step in of(outcome, "step")} == set(range(steps))
    assert len(of(outcome, "evaluate")) == 1
    reference = Reference(scenario(workload={"steps": steps, "model": MODEL}, **keys)).replay(outcome, steps)
    assert outcome.weights.keys() == reference.newest.keys()
    for name, tensor in reference.newest.items():
        assert torch.equal(outcome.weights[name], tensor), name
    last = {step["step"]: step["loss"] for step in of(outcome, "step")}
    assert [last[step] for step in range(steps)] == reference.losses


def recovered(outcome):
    return [event for event in of(outcome, "recovery") if event["phase"] == "repartitioned"]


def during(device, span, batch):
    return {"device": device, "begins": span, "batch": batch}


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("method", ["ftpipehd", "respipe", "pipedream"])
def test_worker_killed_for_good(method, victim):
    given = {"name": method, "chain_every": 4, "global_every": 8, "patience": "500ms"}
    fault = {"kill": victim, "when": during(victim, "backward", 13)}
    outcome = run(scenario(workload={"steps": STEPS, "model": MODEL}, method=given, faults=[fault]))
    if method != "ftpipehd":
        assert_right(outcome)
        assert stretches(outcome)[-1][0] == 12
    assert victim not in [device for device, _, _ in stretches(outcome)[-1][2]]
    assert [event["phase"] for event in of(outcome, "recovery")] == [
        "detected",
        "repartitioned",
        "redistributed",
        "resumed",
        "trained",
    ]


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("batch", [2, 13, 34])
def test_central_node_dies_and_comes_back(batch, also):
    faults = [{"kill": "source", "when": during("source", "forward", batch), "for": "1s"}]
    if also:
        faults.append({"kill": "worker1", "when": during("source", "forward", batch)})
    outcome = disturbed(*faults)
    assert_right(outcome)
    _, decided, *_ = of(outcome, "recovery")
    assert decided["case"] == "restart"
    assert decided["step"] == max(0, batch - 3) // 4 * 4  # what was replicated, wherever; nothing starts over
    assert ("worker1" in [device for device, _, _ in decided["partition"]]) is not also


def random_fault(draw: random.Random, first: bool) -> dict:
    kind = draw.choice(["kill", "kill", "pause", "partition", "degrade", "throttle", "central"])
    lasting = draw.choice(["300ms", "1s", "3s", "8s", None])
    victim = draw.choice(WORKERS)
    if kind == "partition":
        fault = {"partition": [sorted(draw.sample(DEVICES, draw.randint(1, 2)))]}
    elif kind == "degrade":
        fault = {"degrade": {"device": victim, "rate": draw.choice(["100bit", "200kbit"]), "delay": "100ms"}}
    elif kind == "throttle":
        fault = {"throttle": {"device": draw.choice(DEVICES), "slowdown": draw.choice([2, 10, 100])}}
    elif kind == "central":
        fault = {draw.choice(["kill", "pause"]): "source"}
        lasting = lasting or "2s"
    else:
        fault = {kind: victim}
    if lasting:
        fault["for"] = lasting
    moments = [{"at": f"{draw.randint(0, 2500)}ms"}]
    span = draw.choice(["forward", "backward", "update"])
    moments.append({"when": {"device": victim, "begins": span, "batch": draw.randint(0, STEPS - 1)}})
    moments.append({"when": {"device": victim, "begins": draw.choice(["replicate", "keep", "load"])}})
    if not first:
        moments.append({"after": f"{draw.choice([1, 200, 2000, 6000])}ms"})
        moments.append({"when": {"device": "source", "event": draw.choice(["recovery", "stretch", "repartition"])}})
    return fault | draw.choice(moments)


def random_scenario(seed: int):
    draw = random.Random(seed)
    faults = [random_fault(draw, index == 0) for index in range(draw.randint(1, 5))]
    name = draw.choice(["ftpipehd", "ftpipehd", "respipe", "pipedream"])
    given = {"name": name, "chain_every": 4, "global_every": 8, "patience": "500ms"}
    method = METHOD if name == "ftpipehd" else given
    window = draw.choice(["0s", "5s"])
    devices = {name: {"speed": draw.choice(["2mflops", "1mflops", "200kflops"])} for name in DEVICES}
    return scenario(
        workload={"steps": STEPS, "model": MODEL},
        method={**method, "return_window": window},
        devices=devices,
        faults=faults,
        time_limit="30000s",
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_faults(seed):
    outcome = run(random_scenario(seed))
    if outcome.status == "failed" and "not enough devices" in outcome.error:
        return
    assert_right(outcome)
