"""Initial weights from a file, or from a scenario that is simulated first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from safetensors.torch import load_file, save_file

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.ml.models import create
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed_controller.cli.main import testbed as command_line
from testbed_controller.running.inputs import InitialWeights
from tests.helpers.runs import make_scenario

State = dict[str, torch.Tensor]

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
SECOND = FIRST.replace("name: first", "name: second").replace(
    "{name: mlp}", "{name: mlp, weights: first.yaml}"
)
"""A scenario whose initial weights are the final weights of the first one."""


def invoke_run(file: Path, *options: str) -> Result:
    """Simulate a scenario with the command; the results are in the folder of the file's name without suffix."""
    results = str(file.with_suffix(""))
    command = ["run", str(file), "--runtime", "simulate", "--out", results]
    return CliRunner().invoke(command_line, [*command, *options])


def final_weights_of(file: Path, *options: str) -> Path:
    """Simulate a scenario with the command and return the file of the final weights."""
    result = invoke_run(file, *options)
    assert result.exit_code == 0, result.output
    return file.with_suffix("") / "weights.safetensors"


def prepare_text(text: str, file: Path) -> list[Prepared]:
    file.write_text(text)
    return [prepare(trial) for trial in trials(load(file))]


def equal_states(first: State, second: State) -> bool:
    return all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_weights_from_scenario_equal_weights_from_file(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    (tmp_path / "second.yaml").write_text(SECOND)
    (tmp_path / "again.yaml").write_text(FIRST.replace("name: first", "name: again"))
    first_file = final_weights_of(tmp_path / "first.yaml")
    from_scenario = load_file(final_weights_of(tmp_path / "second.yaml"))
    option = ("--weights", str(first_file))
    from_file = load_file(final_weights_of(tmp_path / "again.yaml", *option))
    assert equal_states(from_scenario, from_file)
    # Training has continued from the first weights.
    assert not equal_states(from_file, load_file(first_file))


def test_repetitions_share_initial_weights(tmp_path):
    (tmp_path / "first.yaml").write_text(FIRST)
    prepared = prepare_text(SECOND + "repetitions: 2\n", tmp_path / "second.yaml")
    initial = InitialWeights(Console(quiet=True))
    # The first scenario is simulated once.
    assert initial.weights_for(prepared[0]) is initial.weights_for(prepared[1])


METHOD_FILE = """
from testbed.ml.method import Method
from testbed.ml.methods.single import Single


class UserMethod(Single):
    name = "user-method"
    supports = {supports}

    async def program(self, device, context):
        {statement}
"""


def run_user_method(
    tmp_path: Path, statement: str, supports: str = "Single.supports"
) -> Result:
    """Run a method whose program is one statement, with initial weights from a file."""
    (tmp_path / "first.yaml").write_text(FIRST)
    weights = final_weights_of(tmp_path / "first.yaml")
    method = METHOD_FILE.format(statement=statement, supports=supports)
    (tmp_path / "user_method.py").write_text(method)
    scenario = FIRST.replace(
        "{name: single}", "{file: user_method.py, name: user-method}"
    )
    (tmp_path / "user.yaml").write_text(scenario)
    return invoke_run(tmp_path / "user.yaml", "--weights", str(weights))


def test_run_fails_if_program_ignores_initial_weights(tmp_path):
    result = run_user_method(tmp_path, "device.record('step', step=1, samples=32)")
    assert result.exit_code == 1, result.output
    manifest = json.loads((tmp_path / "user" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "never read them: read context.weights" in manifest["error"]
    assert "read from this file" not in result.output


def test_run_succeeds_if_program_reads_initial_weights(tmp_path):
    result = run_user_method(tmp_path, "await super().program(device, context)")
    assert result.exit_code == 0, result.output


def test_method_without_support_for_initial_weights_is_refused(tmp_path):
    result = run_user_method(tmp_path, "return", supports="Method.supports")
    assert "'user-method' does not support initial weights" in str(result.exception)
    assert not (tmp_path / "user").exists()


def test_former_flag_of_method_is_refused_with_replacement():
    with pytest.raises(
        TypeError,
        match=r"Former.takes_weights has no effect: write 'initial_weights' in `supports`",
    ):
        type("Former", (METHODS["single"].__class__,), {"takes_weights": True})


LOCAL_DATA_METHODS = ("federated", "split-learning", "split-federated", "pipelearn")
"""Methods whose devices train on their own samples."""
CASTING_METHODS = ("edgepipe", "versatile")
"""Methods that cast within a cell, and return final weights only on request."""
HIDDEN_SIZES = [12, 10, 8]


def network_methods() -> list[str]:
    """Return the methods with a training or inference task."""
    names = []
    for name, method in METHODS.items():
        if {"train", "infer"} & set(method.tasks):
            names.append(name)
    return sorted(names)


def scenario_with_weights(name: str, file: Path) -> Scenario:
    """Return a scenario of a method with initial weights from a file."""
    has_local_data = name in LOCAL_DATA_METHODS
    split = "iid" if has_local_data else "coordinator"
    workload: dict[str, Any] = {
        "data": {"name": "digits", "train": 64, "test": 40, "split": split},
        "model": {"name": "mlp", "hidden": HIDDEN_SIZES, "weights": str(file)},
    }
    if "train" in METHODS[name].tasks:
        # Weights remain the same with a learning rate that is nearly zero.
        training = {"optimizer": {"learning_rate": 1e-12}}
        workload |= {"task": "train", "steps": 1, "training": training}
    else:
        workload |= {"task": "infer", "training": {}}
    method: dict[str, Any] = {"name": name}
    network: dict[str, Any] = {
        "topology": "mesh",
        "link": {"rate": "20mbit", "delay": "1ms"},
    }
    if name in CASTING_METHODS:
        method["final_weights"] = True
        network["cells"] = [{"rate": "20mbit"}]
    workers = 2 if has_local_data else 3
    return make_scenario(workers, workload=workload, method=method, network=network)


def random_weights() -> State:
    """Return weights unlike the initial ones of any seed."""
    model = create("mlp", {"hidden": HIDDEN_SIZES}, (1, 8, 8), 10)
    state = model.build(0, len(model.units), 99).state_dict()
    return {name: 1.5 * tensor for name, tensor in state.items()}


@pytest.mark.parametrize("name", network_methods())
def test_method_uses_or_refuses_initial_weights(name, tmp_path):
    weights = random_weights()
    file = tmp_path / "weights.safetensors"
    save_file(weights, file)
    (trial,) = trials(scenario_with_weights(name, file))
    method = METHODS[name]
    if "initial_weights" not in method.supports:
        with pytest.raises(InputError, match="remove"):
            prepare(trial)
        return
    prepared = prepare(trial)
    event_names: list[str] = []
    outcome = simulate(
        prepared,
        load_data(prepared),
        lambda event: event_names.append(event.event),
        weights,
    )
    assert outcome.status == "finished", outcome.error
    assert "weights" in event_names
    if "train" in method.tasks:
        assert outcome.weights.keys() >= weights.keys()
        for key, tensor in weights.items():
            assert torch.allclose(outcome.weights[key], tensor, atol=1e-6)


NETWORK_FILE = """
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


def user_network_scenario(options: str = "") -> str:
    """Return the text of a scenario to train the network of the file; ``options`` follow the network's name."""
    return FIRST.replace("{name: mlp}", f"{{file: own.py, name: Net{options}}}")


def write_network(folder: Path) -> torch.nn.Module:
    """Write the file of the user's network into a folder, and return an instance of the network."""
    (folder / "own.py").write_text(NETWORK_FILE)
    names: dict[str, type[torch.nn.Module]] = {}
    exec(compile(NETWORK_FILE, "own.py", "exec"), names)
    # The initial weights of a scenario have another seed.
    torch.manual_seed(4)
    return names["Net"]()


@pytest.mark.parametrize("options", ["", ", units: [last]"], ids=["default", "units"])
def test_final_weights_are_state_dict_of_user_network(
    tmp_path: Path, options: str
) -> None:
    network = write_network(tmp_path)
    (tmp_path / "own.yaml").write_text(user_network_scenario(options))
    # Raises for missing, additional or misshapen tensors.
    network.load_state_dict(load_file(final_weights_of(tmp_path / "own.yaml")))


def save_checkpoint(state: State, path: Path) -> None:
    """Save a state as a training script with `DataParallel` does."""
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "state_dict": prefixed}, path)


def save_legacy_format(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_compiled(state: State, path: Path) -> None:
    """Save a state with the names of a network from `torch.compile`."""
    save_file({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, path)


def save_without(part: str) -> Callable[[State, Path], None]:
    """Return a function to save a state without the tensors whose names contain a part."""

    def save(state: State, path: Path) -> None:
        remaining = {name: state[name] for name in state if part not in name}
        save_file(remaining, path)

    return save


SAVE_FUNCTIONS: dict[str, Callable[[State, Path], None]] = {
    "plain.safetensors": save_file,
    "plain.pt": torch.save,
    "checkpoint.pth": save_checkpoint,
    "old.pt": save_legacy_format,
    "compiled.safetensors": save_compiled,
    # Older versions of torch do not count batches in normalisations.
    "no_counters.safetensors": save_without("num_batches"),
    "no_unused.safetensors": save_without("unused"),
}


@pytest.mark.parametrize("name", SAVE_FUNCTIONS)
def test_state_dict_of_user_network_is_read(tmp_path: Path, name: str) -> None:
    network = write_network(tmp_path)
    SAVE_FUNCTIONS[name](network.state_dict(), tmp_path / name)
    scenario = user_network_scenario(f", weights: {name}")
    (prepared,) = prepare_text(scenario, tmp_path / "own.yaml")
    weights = InitialWeights(Console(quiet=True)).weights_for(prepared)
    assert weights is not None
    model = prepared.problem.model.build(0, len(prepared.problem.model.units), 0)
    model.load_state_dict(weights)
    samples = torch.rand((4, 1, 8, 8))
    assert torch.equal(model.eval()(samples), network.eval()(samples))


def test_tensor_names_with_units_are_read(tmp_path: Path) -> None:
    # An earlier version of the testbed wrote these names.
    write_network(tmp_path)
    (prepared,) = prepare_text(user_network_scenario(), tmp_path / "own.yaml")
    model = prepared.problem.model
    state = model.build(0, len(model.units), 5).state_dict()
    save_file(state, tmp_path / "old.safetensors")
    scenario = user_network_scenario(", weights: old.safetensors")
    (prepared,) = prepare_text(scenario, tmp_path / "own.yaml")
    weights = InitialWeights(Console(quiet=True)).weights_for(prepared)
    assert weights is not None
    assert equal_states(weights, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last.bias": None}, "missing last.bias"),
        ({"head.weight": torch.zeros(2)}, "head.weight does not belong to the model"),
        (
            {"last.weight": torch.zeros(3, 12)},
            r"last.weight is torch.float32 of \[3, 12\] instead of .* \[10, 12\]",
        ),
    ],
    ids=["missing tensor", "unknown tensor", "wrong shape"],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_of_other_network_are_refused(
    tmp_path: Path, suffix: str, change: dict[str, torch.Tensor | None], message: str
) -> None:
    state = {**write_network(tmp_path).state_dict(), **change}
    remaining = {name: value for name, value in state.items() if value is not None}
    save = SAVE_FUNCTIONS[f"plain.{suffix}"]
    save(remaining, tmp_path / f"w.{suffix}")
    scenario = user_network_scenario(f", weights: w.{suffix}")
    with pytest.raises(InputError, match=message):
        prepare_text(scenario, tmp_path / "own.yaml")


def test_pickled_network_is_refused_with_instruction(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "network.pt")
    write_network(tmp_path)
    scenario = user_network_scenario(", weights: network.pt")
    with pytest.raises(
        InputError, match=r"save only the `state_dict\(\)` of the network"
    ):
        prepare_text(scenario, tmp_path / "own.yaml")
