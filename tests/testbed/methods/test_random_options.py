"""Pipelines with random options under random faults complete every step or request."""

import random

import pytest

from tests.helpers.runs import make_scenario, run_simulated
from tests.testbed.methods.outcomes import values_of

SYNCHRONOUS = ("pipeline", "gpipe", "model-parallelism")
ASYNCHRONOUS = ("ftpipehd", "pipedream", "respipe")
METHODS = (*SYNCHRONOUS, *ASYNCHRONOUS, "sequential")
DEVICES = ("source", "worker1", "worker2", "worker3")
COORDINATOR_EVENTS = (
    "step",
    "recovery",
    "stretch",
    "repartition",
    "evaluate",
    "request",
    "bandwidth",
)
DEVICE_EVENTS = ("send", "receive", "begin", "compute", "versions")
STEPS = 12


def random_options(draw: random.Random, method: str) -> dict:
    options = {
        "name": method,
        "stall_timeout": draw.choice(["200ms", "500ms"]),
        "rejoin_timeout": draw.choice(["1s", "3s"]),
    }
    if method == "sequential":
        return options | {"in_flight": draw.randint(1, 4)}
    options["evaluate_every"] = draw.choice([1, 3, 5])
    if method in SYNCHRONOUS:
        options["checkpoint_every"] = draw.choice([1, 2, 4])
        options["micro_batches"] = draw.randint(1, 6)
        return options
    options["chain_replication_interval"] = draw.choice([1, 2, 5])
    options["global_replication_interval"] = draw.choice([0, 1, 3])
    if method == "ftpipehd":
        options["profile_runs"] = 1
        options["repartition_first"] = draw.choice([0, 1, 4])
        options["repartition_every"] = 3
    return options


def random_fault(draw: random.Random) -> dict:
    """Return a temporary fault triggered by an event of any device."""
    # The coordinator may be the victim, since every fault ends.
    victim = draw.choice(DEVICES)
    action = draw.choice(["kill", "kill", "pause", "partition"])
    device_event = (draw.choice(DEVICES), draw.choice(DEVICE_EVENTS))
    coordinator_event = ("source", draw.choice(COORDINATOR_EVENTS))
    device, event = draw.choice([device_event, coordinator_event])
    when = {"device": device, "event": event}
    # Only these events have a number.
    if event in ("step", "request"):
        when["batch"] = draw.randrange(STEPS)
    return {
        action: [[victim]] if action == "partition" else victim,
        "for": draw.choice(["1ms", "300ms", "2s", "5s"]),
        "when": when,
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_every_step_or_request_is_completed_under_random_faults(method, seed):
    # Seeded by text, so that a failure is reproducible and methods have different faults.
    draw = random.Random(f"{method} {seed}")
    is_inference = method == "sequential"
    unit = "request" if is_inference else "step"
    work = {"task": "infer", "requests": STEPS} if is_inference else {"steps": STEPS}
    faults = [random_fault(draw) for _ in range(draw.randint(1, 4))]
    options = random_options(draw, method)
    outcome = run_simulated(make_scenario(method=options, workload=work, faults=faults))
    assert outcome.status == "finished", (faults, outcome.error)
    assert set(values_of(outcome, unit, unit)) == set(range(STEPS)), faults
