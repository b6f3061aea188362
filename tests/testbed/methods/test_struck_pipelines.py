"""Pipelines under random faults at random events: a run that says finished has every step, and no run stands still."""

import random

import pytest

from tests.helpers.runs import fields_of, make_scenario, run_simulated

METHODS = (
    "pipeline",
    "gpipe",
    "model-parallelism",
    "ftpipehd",
    "pipedream",
    "respipe",
    "sequential",
)
ASYNCHRONOUS = METHODS[3:6]
DEVICES = ("source", "worker1", "worker2", "worker3")
OF_LEAD = (
    "step",
    "recovery",
    "stretch",
    "repartition",
    "evaluate",
    "request",
    "bandwidth",
)
OF_ALL = ("send", "receive", "begin", "compute", "versions")
STEPS = 12


def options(draw: random.Random, method: str) -> dict:
    chosen = {
        "name": method,
        "stall_timeout": draw.choice(["200ms", "500ms"]),
        "rejoin_timeout": draw.choice(["1s", "3s"]),
    }
    if method == "sequential":
        return chosen | {"in_flight": draw.randint(1, 4)}
    chosen |= {"evaluate_every": draw.choice([1, 3, 5])}
    if method not in ASYNCHRONOUS:
        return chosen | {
            "checkpoint_every": draw.choice([1, 2, 4]),
            "micro_batches": draw.randint(1, 6),
        }
    chosen |= {
        "chain_replication_interval": draw.choice([1, 2, 5]),
        "global_replication_interval": draw.choice([0, 1, 3]),
    }
    if method == "ftpipehd":
        chosen |= {
            "profile_runs": 1,
            "repartition_first": draw.choice([0, 1, 4]),
            "repartition_every": 3,
        }
    return chosen


def fault(draw: random.Random) -> dict:
    """Return something that strikes at an event of any device; the lead comes back."""
    victim = draw.choice(DEVICES)
    action = draw.choice(["kill", "kill", "pause", "partition"])
    device, event = draw.choice(
        [(draw.choice(DEVICES), draw.choice(OF_ALL)), ("source", draw.choice(OF_LEAD))]
    )
    when = {"device": device, "event": event}
    if event in ("step", "request"):
        when["batch"] = draw.randrange(STEPS)
    return {
        action: [[victim]] if action == "partition" else victim,
        "for": draw.choice(["1ms", "300ms", "2s", "5s"]),
        "when": when,
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_recorded(method, seed):
    draw = random.Random(f"{method} {seed}")
    work = (
        {"task": "infer", "requests": STEPS}
        if method == "sequential"
        else {"steps": STEPS}
    )
    faults = [fault(draw) for _ in range(draw.randint(1, 4))]
    outcome = run_simulated(
        make_scenario(method=options(draw, method), workload=work, faults=faults)
    )
    assert outcome.status == "finished", (faults, outcome.error)
    done = {
        fields.get("step", fields.get("request"))
        for name in ("step", "request")
        for fields in fields_of(outcome, name)
    }
    assert done == set(range(STEPS)), faults
