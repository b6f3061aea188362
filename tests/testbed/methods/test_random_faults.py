"""Random faults, several at once and during recoveries: training ends, and with the weights of an undisturbed run."""

import random

import pytest
import torch

from tests.helpers.runs import fields_of, make_scenario, run_simulated

DEVICES = ("source", "worker1", "worker2", "worker3")
WORKERS = DEVICES[1:]
METHOD = {"checkpoint_every": 4, "stall_timeout": "500ms", "rejoin_timeout": "5s"}


def random_fault(draw: random.Random, first: bool) -> dict:
    kind = draw.choice(["kill", "kill", "pause", "partition", "degrade"])
    lasting = draw.choice(["300ms", "1s", "3s", "8s", None])
    victim = draw.choice(WORKERS)
    if kind == "partition":
        fault = {"partition": [sorted(draw.sample(DEVICES, draw.randint(1, 2)))]}
    elif kind == "degrade":
        fault = {
            "degrade": {
                "device": victim,
                "rate": draw.choice(["100bit", "200kbit"]),
                "delay": "100ms",
            }
        }
    else:
        fault = {kind: victim}
    if lasting:
        fault["for"] = lasting
    moments = [{"at": f"{draw.randint(0, 250)}ms"}]
    moments.append(
        {
            "when": {
                "device": victim,
                "begins": draw.choice(["forward", "backward", "update"]),
                "batch": 5,
            }
        }
    )
    if not first:
        moments.append({"after": f"{draw.choice([1, 200, 2000, 6000])}ms"})
        moments.append({"when": {"device": "source", "event": "recovery"}})
    return fault | draw.choice(moments)


def random_scenario(seed: int):
    draw = random.Random(seed)
    faults = [random_fault(draw, index == 0) for index in range(draw.randint(1, 5))]
    return make_scenario(method=METHOD, faults=faults)


@pytest.fixture(scope="module")
def undisturbed():
    return run_simulated(make_scenario(method=METHOD))


@pytest.mark.parametrize("seed", range(40))
def test_training_ends_with_the_right_weights(undisturbed, seed):
    outcome = run_simulated(random_scenario(seed))
    assert outcome.status == "finished", outcome.error
    for name, tensor in undisturbed.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name
    assert {step["step"] for step in fields_of(outcome, "step")} == set(range(12))
    assert fields_of(outcome, "evaluate")[-1] == fields_of(undisturbed, "evaluate")[-1]
    phases = [event["phase"] for event in fields_of(outcome, "recovery")]
    assert phases.count("detected") >= phases.count("resumed")
