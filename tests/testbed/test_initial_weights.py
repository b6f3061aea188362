"""Weights to begin with come from a file, or from a scenario that is simulated first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from controller.cli.main import testbed as command_line
from controller.running.inputs import InitialWeights, load_data
from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.models import create
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers.runs import scenario

FIRST = """\
name: first
devices:
  centre: {profile: laptop}
workload:
  task: train
  model: {name: mlp}
  data: {name: digits, train: 128, test: 32}
  method: {name: single}
  batch_size: 32
  steps: 4
"""


def run(file: Path, *options: str) -> Path:
    out = file.with_suffix("")
    done = CliRunner().invoke(command_line, ["run", str(file), "--runtime", "simulate", "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return out


def begun(text: str, file: Path) -> list[Prepared]:
    file.write_text(text)
    return [prepare(each) for each in trials(load(file))]


def test_a_run_begins_with_what_the_scenario_leaves(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    named = FIRST.replace("name: first", "name: then").replace("{name: mlp}", "{name: mlp, weights: first.yaml}")
    (tmp_path / "then.yaml").write_text(named)
    (tmp_path / "again.yaml").write_text(FIRST.replace("name: first", "name: again"))
    left = run(tmp_path / "first.yaml") / "weights.safetensors"
    by_scenario = load_file(run(tmp_path / "then.yaml") / "weights.safetensors")
    by_file = load_file(run(tmp_path / "again.yaml", "--weights", str(left)) / "weights.safetensors")
    assert all(torch.equal(by_scenario[name], tensor) for name, tensor in by_file.items())
    assert not all(torch.equal(tensor, by_file[name]) for name, tensor in load_file(left).items())


def test_runs_that_begin_alike_share_the_weights(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    text = FIRST.replace("{name: mlp}", "{name: mlp, weights: first.yaml}") + "repetitions: 2\n"
    one, two = begun(text, tmp_path / "then.yaml")
    initial = InitialWeights(Console(quiet=True))
    assert initial.of(one) is initial.of(two)


CARELESS = """
from testbed.method import Method
from testbed.methods.single import Single


class Careless(Single):
    name = "careless"
    takes_weights = {takes}

    async def program(self, device, job):
        {before}
"""


def careless(tmp_path: Path, before: str, *, takes: bool = True) -> list[str]:
    """Return the command that runs a method of one's own with weights, which a run has left."""
    (tmp_path / "first.yaml").write_text(FIRST)
    left = run(tmp_path / "first.yaml") / "weights.safetensors"
    (tmp_path / "careless.py").write_text(CARELESS.format(before=before, takes=takes))
    own = FIRST.replace("{name: single}", "{file: careless.py, name: careless}")
    (tmp_path / "own.yaml").write_text(own)
    command = ["run", str(tmp_path / "own.yaml"), "--runtime", "simulate", "--out", str(tmp_path / "own")]
    return [*command, "--weights", str(left)]


def test_a_run_fails_whose_program_never_reads_the_weights(tmp_path):
    done = CliRunner().invoke(command_line, careless(tmp_path, "device.record('step', step=1, samples=32)"))
    assert done.exit_code == 1, done.output
    manifest = json.loads((tmp_path / "own" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "never read them: read job.weights" in manifest["error"]
    assert "read from this file" not in done.output


def test_a_run_goes_well_whose_program_reads_the_weights(tmp_path):
    done = CliRunner().invoke(command_line, careless(tmp_path, "await super().program(device, job)"))
    assert done.exit_code == 0, done.output


def test_a_method_that_does_not_say_that_it_takes_weights_is_not_given_any(tmp_path):
    done = CliRunner().invoke(command_line, careless(tmp_path, "return", takes=False))
    assert "'careless' begins with weights drawn from the seed, and reads none" in str(done.exception)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"program"}))
def test_every_method_begins_with_given_weights_or_refuses_them(name, tmp_path):
    method = METHODS[name]
    key = {"task": "train", "steps": 1} if "train" in method.tasks else {"task": "infer"}
    own = name in ("federated", "split-learning", "split-federated", "pipelearn")
    data = {"name": "digits", "train": 64, "test": 40, "split": "iid" if own else "lead"}
    radio = {"topology": "mesh", "link": {"rate": "20mbit", "delay": "1ms"}, "cells": [{"rate": "20mbit"}]}
    model = {"name": "mlp", "hidden": [12, 10, 8], "weights": str(tmp_path / "given.safetensors")}
    still = {"optimizer": {"learning_rate": 1e-12}}
    work = {"data": data, "model": model, "training": still if "train" in method.tasks else {}, **key}
    chosen = {"name": name, **({"final_weights": True} if name in ("edgepipe", "versatile") else {})}
    network = radio if name in ("edgepipe", "versatile") else {"topology": "mesh", "link": radio["link"]}
    described = scenario(2 if own else 3, workload=work, method=chosen, network=network)
    if "steps" not in key:
        described = scenario(3, workload={**work, "steps": None}, method={"name": name}, network=network)
    whole = create("mlp", {"hidden": [12, 10, 8]}, (1, 8, 8), 10)
    given = {key: value * 1.5 for key, value in whole.build(0, len(whole.units), 99).state_dict().items()}
    save_file(given, tmp_path / "given.safetensors")
    if not method.takes_weights:
        with pytest.raises(InputError, match="leave this out"):
            prepare(trials(described)[0])
        return
    prepared = prepare(trials(described)[0])
    read: list[str] = []
    outcome = simulate(prepared, load_data(prepared), lambda event: read.append(event.event), given)
    assert outcome.status == "finished", outcome.error
    assert "weights" in read
    if "train" in method.tasks:
        left = {key: tensor for key, tensor in outcome.weights.items() if key in given}
        assert left.keys() == given.keys()
        assert all(torch.allclose(left[key], given[key], atol=1e-6) for key in given)
