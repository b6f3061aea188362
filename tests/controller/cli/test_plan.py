"""Plans with several assignments for one device, their details, and `testbed plan`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from pydantic import ConfigDict, ValidationError

from testbed.ml.methods.pipeline import Pipeline
from testbed.ml.pipeline.planning import PipelineDetails
from testbed.plan import Assignment, Plan, PlanDetails
from testbed.trace.metrics import metrics
from testbed_controller.cli.main import testbed as command_line
from testbed_controller.report import html
from testbed_controller.results.recorder import initial_manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded


class RoundDetails(PlanDetails):
    model_config = ConfigDict(extra="forbid")
    rounds: int
    shares: tuple[float, ...] = ()


STAR = Plan(
    method="star",
    coordinator="server",
    assignments=(
        Assignment(device="one", start=0, stop=2, memory=1e6),
        Assignment(device="server", start=2, stop=4, memory=2e6, copy_for="one"),
        Assignment(device="two", start=0, stop=1, memory=1e6, part="outputs 0 to 3"),
        Assignment(device="server", start=1, stop=4, memory=3e6, copy_for="two"),
    ),
    details=RoundDetails(rounds=3, shares=(0.5, 0.5)),
)


def test_plan_may_have_several_assignments_for_one_device():
    assert STAR.devices == ("one", "server", "two")
    copies = [assignment.copy_for for assignment in STAR.assignments_of("server")]
    assert copies == ["one", "two"]
    # 2 MB for "one" and 3 MB for "two".
    assert STAR.memory("server") == 5e6
    assert STAR.assignments_of("three") == ()


def test_details_are_restored_from_json_as_class_of_method():
    text = STAR.model_dump_json()
    values = {"rounds": 3, "shares": [0.5, 0.5]}
    assert json.loads(text)["details"] == values
    # Without the method, the class of the details is unknown.
    restored = Plan.model_validate_json(text)
    assert restored.details.model_dump() == values
    assert restored.with_details(RoundDetails) == STAR
    assert restored.with_details(RoundDetails).details.rounds == 3
    with pytest.raises(ValidationError, match="rounds"):
        restored.with_details(PipelineDetails)


def test_plan_without_details_is_restored_from_json():
    plan = Plan(method="ring", coordinator="a", assignments=())
    assert plan.model_dump(mode="json")["details"] == {}
    restored = Plan.model_validate_json(plan.model_dump_json())
    assert restored.with_details(PlanDetails) == plan


@pytest.fixture
def _three_assignments(monkeypatch):
    """Make pipelines plan three assignments for device a and one for device b."""

    def plan(self, problem):
        return Plan(
            method="pipeline",
            coordinator="a",
            assignments=(
                Assignment(device="a", start=0, stop=2, memory=1e6, copy_for="b"),
                Assignment(
                    device="a", start=1, stop=2, memory=2e6, part="outputs 0 to 3"
                ),
                Assignment(device="b", start=2, stop=4, memory=5e6),
                Assignment(device="a", start=3, stop=4, memory=3e6),
            ),
            details=PipelineDetails(
                schedule="1f1b", micro_batches=1, partition="even", bottleneck=1.0
            ),
        )

    monkeypatch.setattr(Pipeline, "plan", plan)
    monkeypatch.setattr(Pipeline, "draw", lambda self, plan: None)


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(command_line, ["plan", *arguments])


def plan_with_memory(memory: str) -> Result:
    devices = (
        f"devices={{a: {{profile: laptop, memory: {memory}}}, b: {{profile: laptop}}}}"
    )
    return run_plan("quickstart", "--set", "faults=[]", "--set", devices)


@pytest.mark.usefixtures("_three_assignments")
def test_memory_of_all_assignments_of_device_is_needed():
    error = plan_with_memory("5MB").exception
    # 1 + 2 + 3 MB
    assert "'a' has 5 MB of memory, its part of the plan needs 6 MB" in str(error)


@pytest.mark.usefixtures("_three_assignments")
def test_assignments_of_device_are_listed_below_each_other(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = plan_with_memory("8MB")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if " MB " in line]
    # Only the first row of a device has its name.
    assert [row[:4].strip() for row in rows] == ["a *", "", "", "b"]
    assert " for b " in rows[0]
    assert "outputs 0 to 3 of 1 " in rows[1]
    # Device a uses 6 of 8 MB.
    assert ["75%" in row for row in rows] == [True, False, False, False]


def test_metrics_and_report_have_all_assignments_of_device(tmp_path):
    plan = recorded.make_plan()
    copy = Assignment(device="a", start=4, stop=6, memory=3e6, copy_for="b")
    plan = plan.model_copy(update={"assignments": (*plan.assignments, copy)})
    outcome = recorded.make_outcome()
    trial = recorded.make_trial()
    values = metrics(outcome, trial.experiment, plan)
    # Starts and stops of both assignments.
    assert values["devices"]["a"]["units"] == [0, 1, 4, 6]
    facts = initial_manifest(trial, outcome, {})
    page = html.render(Run(tmp_path, trial, plan, outcome, facts, values))
    # 1 MB of the recorded assignment and 3 MB of the copy.
    assert "unit 0, units 4–5 for b, 4 MB" in page


def test_optimal_plan_shows_step_time_of_even_plan():
    [optimal] = json.loads(run_plan("quickstart", "--json").output)
    partition = "workload.method.partition=even"
    [even] = json.loads(run_plan("quickstart", "--set", partition, "--json").output)
    assert optimal["even_step_time"] == even["step_time"] > optimal["step_time"]
    assert even["even_step_time"] is None
    assert "(2.56 s with partition: even)" in run_plan("quickstart").output


def test_brackets_in_label_of_point_are_shown():
    # rich would read [/paper] as markup.
    point = "points=[{label: 'as in [/paper]', seed: 1}]"
    result = run_plan("quickstart", "--set", point)
    assert result.exit_code == 0, result.output
    assert "at as in [/paper]" in result.output


def test_plan_names_device_that_is_faster_alone():
    # Links so slow that messages take longer than the computations.
    network = "network={link: {rate: 1mbit, delay: 50ms}}"
    result = run_plan("quickstart", "--set", network, "--set", "faults=[]")
    assert "source alone would be faster" in result.output
    # In federated learning, devices own their samples.
    assert "alone would be faster" not in run_plan("examples/federated").output
