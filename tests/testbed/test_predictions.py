"""What planners predict against what the simulator measures, over links of several delays."""

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
from tests.helpers.runs import events_of

SCENARIOS = ROOT / "scenarios"
DISTURBANCES = ("faults", "trace", "expect", "sweep")
"""Not foreseen by any planner. A scenario with jitter is not here for that reason either."""


def undisturbed(name: str, delay: str) -> Scenario:
    """Return a scenario without what disturbs it, over links of this delay, a dozen steps or eight requests long."""
    tree = yamltext.values((SCENARIOS / f"{name}.yaml").read_text())
    tree = {key: value for key, value in tree.items() if key not in DISTURBANCES}
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
def test_a_step_takes_as_long_as_predicted(name: str, delay: str) -> None:
    scenario = undisturbed(name, delay)
    (trial,) = trials(scenario)
    prepared = prepare(trial)
    outcome = simulate(prepared, load(scenario.workload.data))
    if scenario.workload.task == "infer":
        taken = median(fields["latency"] for _, fields in events_of(outcome, "request"))
    else:
        ends = [event.time for event in outcome.events if event.event == "step"]
        taken = median(later - earlier for earlier, later in pairwise(ends[4:]))
    assert taken == pytest.approx(prepared.plan.step_time, rel=0.05)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "model-parallelism"])
def test_delays_do_not_change_which_schedule_is_the_fastest(schedule: str) -> None:
    """Five micro-batches over 5 ms: every message was waited for, and model parallelism seemed faster than GPipe."""
    micro = 1 if schedule == "model-parallelism" else 5
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
                    "micro_batches": micro,
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
