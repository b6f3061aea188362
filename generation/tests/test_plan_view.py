"""`testbed plan` shows when a device computes how long in text generation."""

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
    done = CliRunner().invoke(command_line, ["plan", str(path), *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "method", ["{name: sequential, partition: even}", "{name: ring}"]
)
def test_times_of_the_plan_are_those_of_the_run(method: str, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, method)
    [view] = json.loads(view_plan(path, "--json"))
    planned: dict[str, dict[str, float]] = {}
    for assignment in view["assignments"]:
        totals = planned.setdefault(assignment["device"], {})
        for kind, seconds in assignment["pass_times"].items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    run = simulate(load(path), tmp_path / "run").run
    for device, totals in planned.items():
        computed = [
            event.fields
            for event in run.outcome.events
            if event.event == "compute" and event.device == device
        ]
        prefill = [each["duration"] for each in computed if each["span"] == "prefill"]
        assert sum(prefill) == pytest.approx(totals["prefill of 16"], rel=0.01)
        assert sum_by_token(computed) == pytest.approx(totals["token"], rel=0.05)


def sum_by_token(computed: list[dict[str, Any]]) -> float:
    """Return the median over the tokens of the time that a device computes for a token."""
    seconds: dict[int, float] = {}
    for fields in computed:
        if fields["span"] == "decode":
            token = fields["micro"]
            seconds[token] = seconds.get(token, 0.0) + fields["duration"]
    return median(seconds.values())


def test_table_has_columns_for_prefill_and_token(tmp_path: Path) -> None:
    text = view_plan(write_scenario(tmp_path, "{name: sequential, partition: even}"))
    [heading] = [line for line in text.splitlines() if "parameters" in line]
    assert heading.split()[-4:] == ["prefill", "of", "16", "token"]
    assert " 0 s" not in text
    assert "FLOP: per token" in " ".join(text.split())
    shards = view_plan(write_scenario(tmp_path, "{name: tensor-parallel}"), "--json")
    times = [
        each["pass_times"]["token"] for each in json.loads(shards)[0]["assignments"]
    ]
    assert all(seconds > 0 for seconds in times)


@pytest.mark.parametrize("dataflow", ["all-reduce", "gather"])
def test_parameters_of_all_shards_are_those_of_the_layers(
    dataflow: str, tmp_path: Path
) -> None:
    path = write_scenario(tmp_path, f"{{name: tensor-parallel, dataflow: {dataflow}}}")
    # 192 hidden columns and 64 rows divide over two devices, four key-value heads over any number up to four.
    text = path.read_text().replace("count: 3", "count: 2")
    path.write_text(
        text.replace(
            "{preset: tinystories-260k}", "{preset: tinystories-260k, hidden: 192}"
        )
    )
    [view] = json.loads(view_plan(path, "--json"))
    parameters = [each["parameters"] for each in view["assignments"]]
    architecture = replace(preset("tinystories-260k"), hidden=192)
    assert sum(parameters) == architecture.layers * architecture.layer_values
    assert all(number > 0 for number in parameters)
