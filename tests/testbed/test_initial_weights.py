"""Weights to begin with come from a file, or from a scenario that is simulated first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file, save_file

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.ml.models import create
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed_controller.cli.main import testbed as command_line
from testbed_controller.running.inputs import InitialWeights
from tests.helpers.runs import make_scenario

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
    done = CliRunner().invoke(
        command_line,
        ["run", str(file), "--runtime", "simulate", "--out", str(out), *options],
    )
    assert done.exit_code == 0, done.output
    return out


def begun(text: str, file: Path) -> list[Prepared]:
    file.write_text(text)
    return [prepare(each) for each in trials(load(file))]


def test_a_run_begins_with_what_the_scenario_leaves(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    named = FIRST.replace("name: first", "name: then").replace(
        "{name: mlp}", "{name: mlp, weights: first.yaml}"
    )
    (tmp_path / "then.yaml").write_text(named)
    (tmp_path / "again.yaml").write_text(FIRST.replace("name: first", "name: again"))
    left = run(tmp_path / "first.yaml") / "weights.safetensors"
    by_scenario = load_file(run(tmp_path / "then.yaml") / "weights.safetensors")
    by_file = load_file(
        run(tmp_path / "again.yaml", "--weights", str(left)) / "weights.safetensors"
    )
    assert all(
        torch.equal(by_scenario[name], tensor) for name, tensor in by_file.items()
    )
    assert not all(
        torch.equal(tensor, by_file[name]) for name, tensor in load_file(left).items()
    )


def test_runs_that_begin_alike_share_the_weights(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    text = (
        FIRST.replace("{name: mlp}", "{name: mlp, weights: first.yaml}")
        + "repetitions: 2\n"
    )
    one, two = begun(text, tmp_path / "then.yaml")
    initial = InitialWeights(Console(quiet=True))
    assert initial.weights_for(one) is initial.weights_for(two)


CARELESS = """
from testbed.ml.method import Method
from testbed.ml.methods.single import Single


class Careless(Single):
    name = "careless"
    supports = Method.supports if {without} else Single.supports

    async def program(self, device, context):
        {before}
"""


def careless(tmp_path: Path, before: str, *, without: bool = False) -> list[str]:
    """Return the command that runs a method of one's own with weights, which a run has left."""
    (tmp_path / "first.yaml").write_text(FIRST)
    left = run(tmp_path / "first.yaml") / "weights.safetensors"
    (tmp_path / "careless.py").write_text(
        CARELESS.format(before=before, without=without)
    )
    own = FIRST.replace("{name: single}", "{file: careless.py, name: careless}")
    (tmp_path / "own.yaml").write_text(own)
    command = [
        "run",
        str(tmp_path / "own.yaml"),
        "--runtime",
        "simulate",
        "--out",
        str(tmp_path / "own"),
    ]
    return [*command, "--weights", str(left)]


def test_a_run_fails_whose_program_never_reads_the_weights(tmp_path):
    done = CliRunner().invoke(
        command_line, careless(tmp_path, "device.record('step', step=1, samples=32)")
    )
    assert done.exit_code == 1, done.output
    manifest = json.loads((tmp_path / "own" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "never read them: read context.weights" in manifest["error"]
    assert "read from this file" not in done.output


def test_a_run_goes_well_whose_program_reads_the_weights(tmp_path):
    done = CliRunner().invoke(
        command_line, careless(tmp_path, "await super().program(device, context)")
    )
    assert done.exit_code == 0, done.output


def test_a_method_that_does_not_say_that_it_takes_weights_is_not_given_any(tmp_path):
    done = CliRunner().invoke(command_line, careless(tmp_path, "return", without=True))
    assert "'careless' does not support initial weights" in str(done.exception)
    assert not (tmp_path / "own").exists()


def test_a_former_flag_of_a_method_is_refused_with_its_capability():
    with pytest.raises(
        TypeError,
        match=r"Former.takes_weights has no effect: write 'initial_weights' in `supports`",
    ):
        type("Former", (METHODS["single"].__class__,), {"takes_weights": True})


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, method in METHODS.items()
        if {"train", "infer"} & set(method.tasks)
    ),
)
def test_every_method_begins_with_given_weights_or_refuses_them(name, tmp_path):
    method = METHODS[name]
    key = (
        {"task": "train", "steps": 1} if "train" in method.tasks else {"task": "infer"}
    )
    own = name in ("federated", "split-learning", "split-federated", "pipelearn")
    data = {
        "name": "digits",
        "train": 64,
        "test": 40,
        "split": "iid" if own else "coordinator",
    }
    radio = {
        "topology": "mesh",
        "link": {"rate": "20mbit", "delay": "1ms"},
        "cells": [{"rate": "20mbit"}],
    }
    model = {
        "name": "mlp",
        "hidden": [12, 10, 8],
        "weights": str(tmp_path / "given.safetensors"),
    }
    still = {"optimizer": {"learning_rate": 1e-12}}
    work = {
        "data": data,
        "model": model,
        "training": still if "train" in method.tasks else {},
        **key,
    }
    chosen = {
        "name": name,
        **({"final_weights": True} if name in ("edgepipe", "versatile") else {}),
    }
    network = (
        radio
        if name in ("edgepipe", "versatile")
        else {"topology": "mesh", "link": radio["link"]}
    )
    described = make_scenario(
        2 if own else 3, workload=work, method=chosen, network=network
    )
    if "steps" not in key:
        described = make_scenario(
            3, workload={**work, "steps": None}, method={"name": name}, network=network
        )
    whole = create("mlp", {"hidden": [12, 10, 8]}, (1, 8, 8), 10)
    given = {
        key: value * 1.5
        for key, value in whole.build(0, len(whole.units), 99).state_dict().items()
    }
    save_file(given, tmp_path / "given.safetensors")
    if "initial_weights" not in method.supports:
        with pytest.raises(InputError, match="remove"):
            prepare(trials(described)[0])
        return
    prepared = prepare(trials(described)[0])
    read: list[str] = []
    outcome = simulate(
        prepared, load_data(prepared), lambda event: read.append(event.event), given
    )
    assert outcome.status == "finished", outcome.error
    assert "weights" in read
    if "train" in method.tasks:
        left = {key: tensor for key, tensor in outcome.weights.items() if key in given}
        assert left.keys() == given.keys()
        assert all(torch.allclose(left[key], given[key], atol=1e-6) for key in given)


OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(12)
        self.middle = nn.Linear(12, 12)
        self.last = nn.Linear(12, 10)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.norm(self.first(x.flatten(1)))))))
"""
OWN_RUN = FIRST.replace("{name: mlp}", "{file: own.py, name: Net}")


def own_network(folder: Path) -> torch.nn.Module:
    (folder / "own.py").write_text(OWN)
    names: dict[str, type[torch.nn.Module]] = {}
    exec(compile(OWN, "own.py", "exec"), names)
    torch.manual_seed(4)
    return names["Net"]()


@pytest.mark.parametrize("units", ["", ", units: [last]"])
def test_a_run_leaves_the_state_dict_of_ones_own_network_whatever_its_units(
    tmp_path: Path, units: str
) -> None:
    network = own_network(tmp_path)
    (tmp_path / "own.yaml").write_text(
        OWN_RUN.replace("name: Net", f"name: Net{units}")
    )
    network.load_state_dict(
        load_file(run(tmp_path / "own.yaml") / "weights.safetensors")
    )


def nested(state: dict[str, torch.Tensor]) -> dict[str, object]:
    return {
        "epoch": 3,
        "state_dict": {f"module.{name}": tensor for name, tensor in state.items()},
    }


FILES = {
    "plain.safetensors": lambda state, path: save_file(state, path),
    "plain.pt": lambda state, path: torch.save(state, path),
    "checkpoint.pth": lambda state, path: torch.save(nested(state), path),
    "old.pt": lambda state, path: torch.save(
        state, path, _use_new_zipfile_serialization=False
    ),
    "compiled.safetensors": lambda state, path: save_file(
        {f"_orig_mod.{n}": t for n, t in state.items()}, path
    ),
    "no_counters.safetensors": lambda state, path: save_file(
        {name: tensor for name, tensor in state.items() if "num_batches" not in name},
        path,
    ),
    "no_unused.safetensors": lambda state, path: save_file(
        {name: tensor for name, tensor in state.items() if "unused" not in name}, path
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_state_dict_of_ones_own_network_is_read(tmp_path: Path, name: str) -> None:
    network = own_network(tmp_path)
    FILES[name](network.state_dict(), tmp_path / name)
    (prepared,) = begun(
        OWN_RUN.replace("name: Net", f"name: Net, weights: {name}"),
        tmp_path / "own.yaml",
    )
    found = InitialWeights(Console(quiet=True)).weights_for(prepared)
    assert found is not None
    model = prepared.problem.model.build(0, len(prepared.problem.model.units), 0)
    model.load_state_dict(found)
    samples = torch.rand((4, 1, 8, 8))
    assert torch.equal(model.eval()(samples), network.eval()(samples))


def test_names_with_units_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    own_network(tmp_path)
    (prepared,) = begun(OWN_RUN, tmp_path / "own.yaml")
    model = prepared.problem.model
    state = model.build(0, len(model.units), 5).state_dict()
    save_file(state, tmp_path / "old.safetensors")
    (prepared,) = begun(
        OWN_RUN.replace("name: Net", "name: Net, weights: old.safetensors"),
        tmp_path / "own.yaml",
    )
    found = InitialWeights(Console(quiet=True)).weights_for(prepared)
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"last.bias": None}, "missing last.bias"),
        ({"head.weight": torch.zeros(2)}, "head.weight does not belong to the model"),
        (
            {"last.weight": torch.zeros(3, 12)},
            r"last.weight is torch.float32 of \[3, 12\] instead of .* \[10, 12\]",
        ),
    ],
)
@pytest.mark.parametrize("file", ["w.safetensors", "w.pt"])
def test_weights_that_do_not_match_are_found_before_the_run(
    tmp_path: Path, file: str, change: dict, said: str
) -> None:
    state = {**own_network(tmp_path).state_dict(), **change}
    FILES[f"plain.{file.partition('.')[2]}"](
        {name: tensor for name, tensor in state.items() if tensor is not None},
        tmp_path / file,
    )
    with pytest.raises(InputError, match=said):
        begun(
            OWN_RUN.replace("name: Net", f"name: Net, weights: {file}"),
            tmp_path / "own.yaml",
        )


def test_a_pickled_network_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    own_network(tmp_path)
    with pytest.raises(
        InputError, match=r"save the `state_dict\(\)` of the network alone"
    ):
        begun(
            OWN_RUN.replace("name: Net", "name: Net, weights: whole.pt"),
            tmp_path / "own.yaml",
        )
