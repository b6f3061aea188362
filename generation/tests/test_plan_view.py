"""`testbed plan` shows the predicted computing times of each device in text generation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

from testbed_controller.api import load, simulate
from testbed_controller.cli.main import testbed as command_line
from testbed_generation.architecture import preset

SCENARIO = """
name: planned
workload:
  task: generate
  model: {preset: tinystories-260k}
  prompts: [Once upon a time]
  tokens: 20
  numerics: none
  method: METHOD
devices:
  pi: {count: 3, profile: raspberry-pi-4b}
network: {topology: mesh, link: {rate: 100mbit, delay: 5ms}}
"""


def write_scenario(folder: Path, method: str) -> Path:
    path = folder / "planned.yaml"
    path.write_text(SCENARIO.replace("METHOD", method))
    return path


def view_plan(path: Path, *options: str) -> str:
    result = CliRunner().invoke(command_line, ["plan", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "method", ["{name: sequential, partition: even}", "{name: ring}"]
)
def test_planned_times_equal_times_of_run(method: str, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, method)
    [plan] = json.loads(view_plan(path, "--json"))
    planned: dict[str, dict[str, float]] = {}
    for assignment in plan["assignments"]:
        totals = planned.setdefault(assignment["device"], {})
        for kind, seconds in assignment["pass_times"].items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    run = simulate(load(path), tmp_path / "run").run
    for device, totals in planned.items():
        computations = []
        for event in run.outcome.events:
            if event.event == "compute" and event.device == device:
                computations.append(event.fields)
        prefill = prefill_seconds(computations)
        assert prefill == pytest.approx(totals["prefill of 16"], rel=0.01)
        # The plan is for the middle of the text; the attention of later tokens takes longer.
        token = median_token_seconds(computations)
        assert token == pytest.approx(totals["token"], rel=0.05)


def prefill_seconds(computations: list[dict[str, Any]]) -> float:
    """Return the time that a device computes for the prompt."""
    seconds = 0.0
    for fields in computations:
        if fields["span"] == "prefill":
            seconds += fields["duration"]
    return seconds


def median_token_seconds(computations: list[dict[str, Any]]) -> float:
    """Return the time that a device computes for a token, as the median over all tokens."""
    seconds: dict[int, float] = {}
    for fields in computations:
        if fields["span"] == "decode":
            # In a ring a device computes several times for each token.
            token = fields["micro"]
            seconds[token] = seconds.get(token, 0.0) + fields["duration"]
    return median(seconds.values())


def test_plan_table_has_columns_for_prefill_and_token(tmp_path: Path) -> None:
    text = view_plan(write_scenario(tmp_path, "{name: sequential, partition: even}"))
    [heading] = [line for line in text.splitlines() if "parameters" in line]
    assert heading.split()[-4:] == ["prefill", "of", "16", "token"]
    assert " 0 s" not in text
    assert "FLOP: per token" in " ".join(text.split())
    path = write_scenario(tmp_path, "{name: tensor-parallel}")
    [plan] = json.loads(view_plan(path, "--json"))
    for assignment in plan["assignments"]:
        assert assignment["pass_times"]["token"] > 0


@pytest.mark.parametrize("dataflow", ["all-reduce", "gather"])
def test_parameters_of_all_shards_add_up_to_those_of_layers(
    dataflow: str, tmp_path: Path
) -> None:
    path = write_scenario(tmp_path, f"{{name: tensor-parallel, dataflow: {dataflow}}}")
    # 192 hidden columns, 64 rows and 4 key-value heads divide over 2 devices.
    model = "{preset: tinystories-260k, hidden: 192}"
    text = path.read_text().replace("count: 3", "count: 2")
    path.write_text(text.replace("{preset: tinystories-260k}", model))
    [plan] = json.loads(view_plan(path, "--json"))
    parameters = [assignment["parameters"] for assignment in plan["assignments"]]
    architecture = replace(preset("tinystories-260k"), hidden=192)
    assert sum(parameters) == architecture.layers * architecture.layer_values
    assert min(parameters) > 0
