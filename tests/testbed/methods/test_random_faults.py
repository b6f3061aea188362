"""Pipeline training under random, concurrent faults ends with the weights of an undisturbed run."""

import random

import pytest

from tests.helpers.runs import make_scenario, run_simulated
from tests.testbed.methods.outcomes import (
    assert_equal_weights,
    assert_finished,
    final_evaluation,
    values_of,
)

DEVICES = ("source", "worker1", "worker2", "worker3")
WORKERS = DEVICES[1:]
METHOD = {"checkpoint_every": 4, "stall_timeout": "500ms", "rejoin_timeout": "5s"}


def random_effect(draw: random.Random, kind: str, victim: str) -> dict:
    if kind == "partition":
        group = draw.sample(DEVICES, draw.randint(1, 2))
        return {"partition": [sorted(group)]}
    if kind == "degrade":
        rate = draw.choice(["100bit", "200kbit"])
        return {"degrade": {"device": victim, "rate": rate, "delay": "100ms"}}
    return {kind: victim}


def random_fault(draw: random.Random, is_first: bool) -> dict:
    kind = draw.choice(["kill", "kill", "pause", "partition", "degrade"])
    duration = draw.choice(["300ms", "1s", "3s", "8s", None])
    # A coordinator that is killed for good would end the run.
    victim = draw.choice(WORKERS)
    fault = random_effect(draw, kind, victim)
    if duration:
        fault["for"] = duration
    span = {
        "device": victim,
        "begins": draw.choice(["forward", "backward", "update"]),
        "batch": 5,
    }
    moments = [{"at": f"{draw.randint(0, 250)}ms"}, {"when": span}]
    # Only a later fault can follow another one or a recovery.
    if not is_first:
        moments.append({"after": f"{draw.choice([1, 200, 2000, 6000])}ms"})
        moments.append({"when": {"device": "source", "event": "recovery"}})
    return fault | draw.choice(moments)


def random_scenario(seed: int):
    draw = random.Random(seed)
    count = draw.randint(1, 5)
    faults = [random_fault(draw, is_first=index == 0) for index in range(count)]
    return make_scenario(method=METHOD, faults=faults)


@pytest.fixture(scope="module")
def undisturbed():
    return run_simulated(make_scenario(method=METHOD))


@pytest.mark.parametrize("seed", range(40))
def test_training_under_random_faults_ends_with_undisturbed_weights(undisturbed, seed):
    outcome = run_simulated(random_scenario(seed))
    assert_finished(outcome)
    assert_equal_weights(outcome, undisturbed.weights)
    assert set(values_of(outcome, "step", "step")) == set(range(12))
    assert final_evaluation(outcome) == final_evaluation(undisturbed)
    phases = values_of(outcome, "recovery", "phase")
    # A recovery that another fault interrupts is not completed.
    assert phases.count("detected") >= phases.count("resumed")
