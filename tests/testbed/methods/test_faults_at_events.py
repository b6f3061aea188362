"""Random faults at random events of every method: each run ends with a status and without a traceback."""

import gc
import random

import pytest

from testbed.ml.data import load
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import make_scenario

PIPELINES = (
    "pipeline",
    "gpipe",
    "model-parallelism",
    "pipedream",
    "respipe",
    "ftpipehd",
)
OWN_DATA = ("federated", "split-learning", "split-federated", "pipelearn")
"""Methods whose devices own the data."""
TIMESLOTS = ("edgepipe", "versatile")
INFERENCE = ("sequential", "distributed")
ACTIONS = ("kill", "kill", "pause", "pause", "partition", "degrade", "throttle")
RUNS = 8


def scenario_keys_of(method):
    # Methods with timeslots have no timing-only runs.
    work = {
        "numerics": "full" if method in TIMESLOTS else "none",
        "model": {"name": "mlp", "hidden": [12, 10, 8]},
    }
    if method in OWN_DATA:
        work["data"] = {"name": "digits", "train": 96, "test": 40, "split": "iid"}
    work |= {"task": "infer", "requests": 4} if method in INFERENCE else {"steps": 4}
    return {"workload": work, "method": {"name": method}, "time_limit": "60s"}


def simulate_method(method, faults=()):
    (trial,) = trials(make_scenario(**scenario_keys_of(method), faults=faults))
    return simulate(prepare(trial), load(trial.scenario.workload.data))


def random_fault(draw, event):
    """Return a random fault triggered by an event like the given one."""
    victim = draw.choice(["source", event.device])
    when = {"device": event.device, "event": event.event}
    if event.event == "begin":
        when = {"device": event.device, "begins": event.fields["span"]}
        for key in ("batch", "micro"):
            if key in event.fields:
                when[key] = event.fields[key]
    action = draw.choice(ACTIONS)
    values = {
        "partition": [[victim]],
        "degrade": {"device": victim, "rate": "10kbit", "loss": "20%"},
        "throttle": {"device": victim, "slowdown": 10},
    }
    duration = draw.choice(["0s", "10ms", "1s", "4s"])
    return {action: values.get(action, victim), "when": when, "for": duration}


def trigger_events(outcome):
    """Return every begin of a span, and one event of each other kind and device."""
    begins, last_of_kind = [], {}
    for event in outcome.events:
        if event.event == "begin":
            begins.append(event)
        if event.event != "host":
            last_of_kind[event.device, event.event] = event
    return begins + list(last_of_kind.values())


@pytest.mark.parametrize("method", PIPELINES + OWN_DATA + TIMESLOTS + INFERENCE)
def test_random_faults_at_random_events_cause_no_traceback(method, caplog):
    # Loops of earlier tests may have ended with pending tasks, which log when they are collected.
    gc.collect()
    caplog.clear()
    draw = random.Random(method)
    undisturbed = simulate_method(method)
    assert undisturbed.status == "finished"
    events = trigger_events(undisturbed)
    for _ in range(RUNS):
        count = draw.randint(1, 3)
        faults = [random_fault(draw, draw.choice(events)) for _ in range(count)]
        outcome = simulate_method(method, faults)
        assert "Traceback" not in (outcome.error or ""), (faults, outcome.error)
        assert not caplog.records, (faults, caplog.text)
