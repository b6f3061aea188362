"""A sweep of which some points cannot be run: the others are run, and the refused ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed_controller.api import build, sweep
from testbed_controller.cli.run import run
from testbed_controller.cli.validate import validate

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
    written = tmp_path / "uneven.yaml"
    written.write_text(SWEEP)
    return written


def test_the_points_that_can_be_run_are_run_and_the_command_names_the_others(
    file: Path,
) -> None:
    out = file.parent / "out"
    done = CliRunner().invoke(
        run, [str(file), "--runtime", "simulate", "--out", str(out), "--no-events"]
    )
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith("sizes=[90, 10, 10, 10], seed 5: ")
    assert "add up to 120 samples" in str(done.exception)
    assert "refused sizes=[90, 10, 10, 10], seed 5" in done.output
    assert len([each for each in out.iterdir() if each.is_dir()]) == 2


def test_validate_names_the_point_and_the_seed(file: Path) -> None:
    done = CliRunner().invoke(validate, [str(file)])
    assert done.exit_code == InputError.exit_code
    assert "sizes=[90, 10, 10, 10], seed 5: " in done.output


def test_a_mistake_that_all_points_have_in_common_is_said_once(file: Path) -> None:
    file.write_text(SWEEP.replace("train: 96", "train: 20"))
    done = CliRunner().invoke(validate, [str(file)])
    assert done.output.count("add up to") == 3  # each sum is another
    file.write_text(SWEEP.replace("name: mlp", "name: mlq"))
    done = CliRunner().invoke(validate, [str(file)])
    assert done.output.count("mlq") == 1
    assert "seed 5" not in done.output


def test_a_sweep_from_python_returns_the_runs_and_the_refusals(tmp_path: Path) -> None:
    work = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "digits", "train": 64, "test": 20},
    }
    work |= {"method": {"name": "single"}, "batch_size": 16, "steps": 1}
    scenario = build(
        name="small", devices={"source": {"profile": "laptop"}}, workload=work
    )
    runs = sweep(
        scenario, {"devices.source.memory": ["1GiB", "1kB"]}, out=tmp_path / "out"
    )
    assert len(runs) == 1
    assert [text.partition(",")[0] for text in runs.refused] == ["memory=1kB"]
