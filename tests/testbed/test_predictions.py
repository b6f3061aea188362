"""Planned step times compared with simulated ones, over links with several delays."""

from itertools import pairwise
from statistics import median

import pytest

from testbed.common import yamltext
from testbed.ml.data import load
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.runs import fields_of

SCENARIOS = ROOT / "scenarios"
DISTURBANCES = ("faults", "trace", "expect", "sweep")
"""Keys of a scenario that planners do not consider. They do not consider jitter either, so no scenario has jitter here.
"""


def undisturbed_scenario(name: str, delay: str) -> Scenario:
    """Return a scenario without disturbances, with a new delay of all links, and with 12 steps or 8 requests."""
    tree = yamltext.values((SCENARIOS / f"{name}.yaml").read_text())
    for key in DISTURBANCES:
        tree.pop(key, None)
    tree["network"]["link"]["delay"] = delay
    workload = tree["workload"]
    if workload["task"] == "infer":
        workload["requests"] = 8
    else:
        workload.pop("epochs", None)
        workload["steps"] = 12
    return Scenario.model_validate(tree)


@pytest.mark.parametrize("delay", ["0ms", "1ms", "5ms", "20ms", "50ms"])
@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "smoke/degrade",
        "smoke/pause",
        "smoke/gpipe-kill-for-good",
        "smoke/ftpipehd-faults",
        "smoke/pipeline-partition-heal",
        "smoke/sequential-infer",
        "smoke/distributed-kill",
    ],
)
def test_simulated_step_time_matches_plan(name: str, delay: str) -> None:
    scenario = undisturbed_scenario(name, delay)
    (trial,) = trials(scenario)
    prepared = prepare(trial)
    outcome = simulate(prepared, load(scenario.workload.data))
    if scenario.workload.task == "infer":
        requests = fields_of(outcome, "request")
        step_time = median(fields["latency"] for fields in requests)
    else:
        ends = [event.time for event in outcome.events if event.event == "step"]
        # The pipeline fills during the first steps.
        step_time = median(later - earlier for earlier, later in pairwise(ends[4:]))
    assert step_time == pytest.approx(prepared.plan.step_time, rel=0.05)


# An earlier planner added the delay of every message, so that model parallelism seemed faster than GPipe with five
# micro-batches.
@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("gpipe", 5), ("1f1b", 5), ("model-parallelism", 1)],
)
def test_planned_step_time_considers_overlap_of_delays(
    schedule: str, micro_batches: int
) -> None:
    scenario = Scenario.model_validate(
        {
            "name": "delays",
            "devices": {"a": {"speed": "50mflops"}, "b": {"speed": "50mflops"}},
            "network": {"link": {"rate": "100mbit", "delay": "5ms"}},
            "workload": {
                "task": "train",
                "model": {"name": "mlp", "hidden": [64]},
                "data": {"name": "digits"},
                "method": {
                    "name": "pipeline",
                    "schedule": schedule,
                    "micro_batches": micro_batches,
                },
                "training": {"optimizer": {"learning_rate": 0.1}},
                "batch_size": 80,
                "steps": 8,
            },
        }
    )
    (trial,) = trials(scenario)
    prepared = prepare(trial)
    outcome = simulate(prepared, load(scenario.workload.data))
    ends = [event.time for event in outcome.events if event.event == "step"]
    assert ends[-1] - ends[-2] == pytest.approx(prepared.plan.step_time, rel=0.01)
