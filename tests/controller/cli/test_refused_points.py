"""Sweeps with invalid points: valid points are run, and invalid ones are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed_controller.api import build, sweep
from testbed_controller.cli.run import run
from testbed_controller.cli.validate import validate

# The second split needs 120 samples; the data set has 96.
SWEEP = """
name: uneven
devices:
  server: {profile: laptop}
  client: {profile: laptop, count: 4}
network: {topology: star, link: {rate: 20mbit, delay: 5ms}}
workload:
  model: {name: mlp, hidden: [8]}
  data: {name: digits, train: 96, test: 20, split: {sizes: [24, 24, 24, 24]}}
  method: {name: federated}
  batch_size: 8
  steps: 1
seed: 5
sweep:
  workload.data.split.sizes: [[24, 24, 24, 24], [90, 10, 10, 10], [90, 2, 2, 2]]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "uneven.yaml"
    file.write_text(SWEEP)
    return file


def test_valid_points_are_run_and_others_reported(file: Path) -> None:
    out = file.parent / "out"
    result = CliRunner().invoke(
        run, [str(file), "--runtime", "simulate", "--out", str(out), "--no-events"]
    )
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("sizes=[90, 10, 10, 10], seed 5: ")
    assert "add up to 120 samples" in str(result.exception)
    assert "refused sizes=[90, 10, 10, 10], seed 5" in result.output
    folders = [path for path in out.iterdir() if path.is_dir()]
    assert len(folders) == 2


def test_validate_names_point_and_seed_of_problem(file: Path) -> None:
    result = CliRunner().invoke(validate, [str(file)])
    assert result.exit_code == InputError.exit_code
    assert "sizes=[90, 10, 10, 10], seed 5: " in result.output


def test_problem_common_to_all_points_is_reported_once(file: Path) -> None:
    file.write_text(SWEEP.replace("train: 96", "train: 20"))
    result = CliRunner().invoke(validate, [str(file)])
    # Messages differ, as each split has another sum.
    assert result.output.count("add up to") == 3
    file.write_text(SWEEP.replace("name: mlp", "name: mlq"))
    result = CliRunner().invoke(validate, [str(file)])
    assert result.output.count("mlq") == 1
    assert "seed 5" not in result.output


def test_sweep_in_python_returns_runs_and_refused_points(tmp_path: Path) -> None:
    workload = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "digits", "train": 64, "test": 20},
        "method": {"name": "single"},
        "batch_size": 16,
        "steps": 1,
    }
    devices = {"source": {"profile": "laptop"}}
    scenario = build(name="small", devices=devices, workload=workload)
    # The model needs more than 1 kB.
    points = {"devices.source.memory": ["1GiB", "1kB"]}
    runs = sweep(scenario, points, out=tmp_path / "out")
    assert len(runs) == 1
    assert [text.partition(",")[0] for text in runs.refused] == ["memory=1kB"]
