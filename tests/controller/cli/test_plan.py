"""A plan is a tuple of assignments, several for one device in some methods, with details of the method."""

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
from testbed_controller.results.recorder import manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded


class Rounds(PlanDetails):
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
    details=Rounds(rounds=3, shares=(0.5, 0.5)),
)


def test_a_device_holds_several_pieces():
    assert STAR.devices == ("one", "server", "two")
    assert [assignment.copy_for for assignment in STAR.assignments_of("server")] == [
        "one",
        "two",
    ]
    assert STAR.memory("server") == 5e6
    assert STAR.assignments_of("three") == ()


def test_details_travel_as_json_and_are_read_as_the_method_declares_them():
    written = STAR.model_dump_json()
    assert json.loads(written)["details"] == {"rounds": 3, "shares": [0.5, 0.5]}
    read = Plan.model_validate_json(written)
    assert read.details.model_dump() == {"rounds": 3, "shares": [0.5, 0.5]}
    assert read.with_details(Rounds) == STAR
    assert read.with_details(Rounds).details.rounds == 3
    with pytest.raises(ValidationError, match="rounds"):
        read.with_details(PipelineDetails)


def test_a_plan_without_details():
    bare = Plan(method="ring", coordinator="a", assignments=())
    assert bare.model_dump(mode="json")["details"] == {}
    assert (
        Plan.model_validate_json(bare.model_dump_json()).with_details(PlanDetails)
        == bare
    )


@pytest.fixture
def star(monkeypatch):
    """Let the method of the recorded scenario give its first device three assignments, two of which are copies."""

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


EVEN = ["plan", "quickstart", "--set", "workload.method.partition=even"]


def planned(memory: str) -> Result:
    devices = (
        f"devices={{a: {{profile: laptop, memory: {memory}}}, b: {{profile: laptop}}}}"
    )
    return CliRunner().invoke(
        command_line, ["plan", "quickstart", "--set", "faults=[]", "--set", devices]
    )


def test_the_memory_of_all_pieces_counts(star):
    assert "'a' has 5 MB of memory, its part of the plan needs 6 MB" in str(
        planned("5MB").exception
    )


def test_the_command_shows_the_pieces_of_a_device_below_each_other(star, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = planned("8MB")
    assert result.exit_code == 0, result.output
    held = [line for line in result.output.splitlines() if " MB " in line]
    assert [line[:4].strip() for line in held] == ["a *", "", "", "b"]
    assert " for b " in held[0]
    assert "outputs 0 to 3 of 1 " in held[1]
    assert ["75%" in line for line in held] == [True, False, False, False]


def test_metrics_and_report_keep_all_pieces_of_a_device(tmp_path):
    first, *others = recorded.make_plan().assignments
    more = Assignment(device="a", start=4, stop=6, memory=3e6, copy_for="b")
    plan = recorded.make_plan().model_copy(
        update={"assignments": (first, *others, more)}
    )
    outcome, trial = recorded.make_outcome(), recorded.make_trial()
    figures = metrics(outcome, trial.experiment, plan)
    assert figures["devices"]["a"]["units"] == [0, 1, 4, 6]
    page = html.render(
        Run(tmp_path, trial, plan, outcome, manifest(trial, outcome, {}), figures)
    )
    assert "unit 0, units 4–5 for b, 4 MB" in page


def test_an_optimal_plan_says_what_an_even_one_would_take():
    result = CliRunner().invoke(command_line, ["plan", "quickstart", "--json"])
    optimal = json.loads(result.output)[0]
    even = json.loads(CliRunner().invoke(command_line, [*EVEN, "--json"]).output)[0]
    assert optimal["even_step_time"] == even["step_time"] > optimal["step_time"]
    assert even["even_step_time"] is None
    assert (
        "(2.56 s with partition: even)"
        in CliRunner().invoke(command_line, ["plan", "quickstart"]).output
    )


def test_brackets_in_the_label_of_a_point_are_shown():
    point = "points=[{label: 'as in [/paper]', seed: 1}]"
    result = CliRunner().invoke(command_line, ["plan", "quickstart", "--set", point])
    assert result.exit_code == 0, result.output
    assert "at as in [/paper]" in result.output


def test_the_plan_names_a_device_that_alone_is_quicker():
    slow_link = [
        "--set",
        "network={link: {rate: 1mbit, delay: 50ms}}",
        "--set",
        "faults=[]",
    ]
    shown = CliRunner().invoke(command_line, ["plan", "quickstart", *slow_link]).output
    assert "source alone would be faster" in shown
    shown = CliRunner().invoke(command_line, ["plan", "examples/federated"]).output
    assert "alone would be faster" not in shown
