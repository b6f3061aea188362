"""Whatever strikes a method at whatever event: there is an outcome that says how the run ended, and no traceback."""

import gc
import random

import pytest

from testbed.ml.data import load
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import make_scenario

TRAINING = (
    *("pipeline", "gpipe", "model-parallelism", "pipedream", "respipe", "ftpipehd"),
    *(
        "federated",
        "split-learning",
        "split-federated",
        "pipelearn",
        "edgepipe",
        "versatile",
    ),
)
SLOTS = ("edgepipe", "versatile")
SPLIT = ("federated", "split-learning", "split-federated", "pipelearn")
INFERENCE = ("sequential", "distributed")
ACTIONS = ("kill", "kill", "pause", "pause", "partition", "degrade", "throttle")
STRIKES = 8


def keys(method):
    work = {
        "numerics": "full" if method in SLOTS else "none",
        "model": {"name": "mlp", "hidden": [12, 10, 8]},
    }
    if method in SPLIT:
        work["data"] = {"name": "digits", "train": 96, "test": 40, "split": "iid"}
    work |= {"task": "infer", "requests": 4} if method in INFERENCE else {"steps": 4}
    return {
        "workload": work,
        "method": {"name": method},
        "time_limit": "60s",
        "workers": 0 if method == "single" else 3,
    }


def run(method, faults=()):
    (trial,) = trials(make_scenario(**keys(method), faults=faults))
    return simulate(prepare(trial), load(trial.scenario.workload.data))


def fault(draw, event):
    """Return something that happens as an event like this is written."""
    device = draw.choice(["source", event.device])
    when = {"device": event.device, "event": event.event}
    if event.event == "begin":
        when = {"device": event.device, "begins": event.fields["span"]}
        when |= {
            key: event.fields[key] for key in ("batch", "micro") if key in event.fields
        }
    action = draw.choice(ACTIONS)
    value = {
        "partition": [[device]],
        "degrade": {"device": device, "rate": "10kbit", "loss": "20%"},
        "throttle": {"device": device, "slowdown": 10},
    }.get(action, device)
    return {action: value, "when": when, "for": draw.choice(["0s", "10ms", "1s", "4s"])}


@pytest.mark.parametrize("method", TRAINING + INFERENCE)
def test_any_action_at_any_event(method, caplog):
    gc.collect()  # of tests before this one, whose loops ended with tasks in them
    caplog.clear()
    draw = random.Random(method)
    calm = run(method)
    assert calm.status == "finished"
    kinds = {
        (event.device, event.event): event
        for event in calm.events
        if event.event != "host"
    }
    moments = [event for event in calm.events if event.event == "begin"] + list(
        kinds.values()
    )
    for _ in range(STRIKES):
        faults = [fault(draw, draw.choice(moments)) for _ in range(draw.randint(1, 3))]
        outcome = run(method, faults)
        assert "Traceback" not in (outcome.error or ""), (faults, outcome.error)
        assert not caplog.records, (faults, caplog.text)
