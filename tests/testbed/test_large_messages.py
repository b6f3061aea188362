"""The limit of a message's size, and trained weights that cannot be gathered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from testbed.common.errors import InputError, TestbedError
from testbed.device import Device
from testbed.hardware import DeviceSpec, check_message, largest_message
from testbed.ml.data import load
from testbed.ml.layers.shard import State
from testbed.ml.models.weights import read as read_weights
from testbed.ml.pipeline.checkpointing import Collector
from testbed.ml.preparation import export_weights, weights_file
from testbed.network.link import Link
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.simulation.world import ProgramError
from testbed.trace.outcome import Outcome
from testbed.wire import arrays
from testbed.wire.message import Message
from tests.helpers import recorded
from tests.helpers.runs import make_scenario, problem_of, run_simulated
from tests.helpers.worlds import make_world

DEVICE_NAMES = ["source", "worker1", "worker2", "worker3"]


def test_device_with_less_memory_limits_message_size() -> None:
    large = DeviceSpec("large", speed=1e9, memory=9 * 2.0**30)
    small = DeviceSpec("small", speed=1e9, memory=600e6)
    # A message may take half of the memory of 600 MB.
    assert largest_message(large, large) > 2_200_000_000
    assert largest_message(large, small) == largest_message(small, large) == 300_000_000
    check_message(300_000_000, large, small)
    with pytest.raises(
        TestbedError, match="a message of 301 MB from large to small is too large"
    ):
        check_message(301_000_000, large, small)


def prepare_scenario(scenario: Scenario) -> Prepared:
    (trial,) = trials(scenario)
    return prepare(trial)


def make_exchange_scenario(payload: str) -> Scenario:
    workload = {
        "task": "infer",
        "model": {"name": "mlp"},
        "method": {"name": "exchange", "payload": payload},
        "requests": 1,
    }
    devices = {
        name: {"speed": "1gflops", "memory": "800MB"} for name in ("left", "right")
    }
    return Scenario.model_validate(
        {"name": "large", "devices": devices, "workload": workload}
    )


def test_planned_message_above_limit_is_refused_before_run() -> None:
    prepare_scenario(make_exchange_scenario("390MB"))
    # A device holds two payloads: its own and the received one.
    with pytest.raises(
        InputError,
        match="'left' has 800 MB of memory, its part of the plan needs 820 MB",
    ):
        prepare_scenario(make_exchange_scenario("410MB"))


def test_stage_too_large_to_send_is_refused_before_run() -> None:
    devices = {
        "source": {"speed": "1gflops"},
        "worker": {"speed": "1gflops", "memory": "15MB"},
    }
    method = {"name": "pipeline", "partition": "even"}
    workload = {"model": {"name": "mlp", "hidden": [64, 1000, 1000]}}
    scenario = make_scenario(workload=workload, method=method, devices=devices)
    # The weights of the stage take 8 MB, more than half of 15 MB and less than half of 17 MB.
    with pytest.raises(
        InputError,
        match=r"devices.worker.memory: a message of 8.0\d MB from worker to source is too",
    ):
        prepare_scenario(scenario)
    devices["worker"]["memory"] = "17MB"
    scenario = make_scenario(workload=workload, method=method, devices=devices)
    assert simulate_prepared(prepare_scenario(scenario)).status == "finished"


MODEL = {"model": {"name": "mlp", "hidden": [120, 100, 80, 80]}}
INFERENCE = {**MODEL, "task": "infer", "requests": 4}
OWN_DATA = {
    **MODEL,
    "data": {"name": "digits", "train": 96, "test": 40, "split": "iid"},
}
MESH = {"link": {"rate": "20mbit", "delay": "2ms"}, "topology": "mesh"}


def simulate_prepared(prepared: Prepared) -> Outcome:
    file = weights_file(prepared.scenario)
    weights = None
    if file is not None:
        weights = read_weights(file, prepared.problem.model)
    return simulate(prepared, load(prepared.scenario.workload.data), weights=weights)


def write_weights(file: Path) -> None:
    """Write random weights of the model into a file."""
    problem, _ = problem_of(make_scenario(workload=MODEL))
    module = problem.model.build(0, len(problem.model.units), 1)
    file.write_bytes(arrays.pack(module.state_dict()))


def planned_sizes(prepared: Prepared) -> dict[tuple[str, str], float]:
    """Return the largest planned message of each link, in bytes."""
    sizes: dict[tuple[str, str], float] = {}
    messages = prepared.method.largest_messages(prepared.problem, prepared.plan)
    for sender, receiver, size in messages:
        pair = (sender, receiver)
        sizes[pair] = max(size, sizes.get(pair, 0.0))
    return sizes


def sent_sizes(outcome: Outcome) -> dict[tuple[str, str], float]:
    """Return the largest sent message of each link, in bytes."""
    sizes: dict[tuple[str, str], float] = {}
    for event in outcome.events.of("send"):
        pair = (event.device, event.fields["peer"])
        sizes[pair] = max(event.fields["bytes"], sizes.get(pair, 0.0))
    return sizes


@pytest.mark.parametrize("has_weights", [False, True], ids=["seed", "weights"])
@pytest.mark.parametrize(
    ("workload", "method", "network"),
    [
        (MODEL, {"name": "pipeline"}, {}),
        (
            MODEL,
            {
                "name": "pipedream",
                "chain_replication_interval": 4,
                "global_replication_interval": 5,
            },
            {},
        ),
        (INFERENCE, {"name": "sequential"}, {}),
        (INFERENCE, {"name": "distributed"}, {"network": MESH}),
        (OWN_DATA, {"name": "federated"}, {}),
        (OWN_DATA, {"name": "split-federated", "split_point": 2}, {}),
    ],
    ids=lambda keys: keys.get("name", ""),
)
def test_planned_largest_messages_match_sent_messages(
    tmp_path: Path,
    workload: dict[str, Any],
    method: dict[str, Any],
    network: dict[str, Any],
    has_weights: bool,
) -> None:
    if has_weights:
        # Weights from a file are distributed by messages; others are drawn from the seed on each device.
        file = tmp_path / "weights.safetensors"
        write_weights(file)
        workload = {**workload, "model": {**workload["model"], "weights": str(file)}}
    scenario = make_scenario(workload=workload, method=method, **network)
    prepared = prepare_scenario(scenario)
    planned = planned_sizes(prepared)
    for pair, size in sent_sizes(simulate_prepared(prepared)).items():
        # Gradients are not planned, since they are no larger than activations; both take less than 10 kB here.
        if size > 10_000:
            assert planned[pair] == pytest.approx(size, abs=2000), pair


@pytest.mark.parametrize("is_cast", [False, True], ids=["message", "cast"])
def test_simulation_refuses_message_above_limit(is_cast: bool) -> None:
    async def send_large_message(device: Device) -> None:
        # Devices of this world have a gigabyte of memory.
        message = Message("m", padding=500_000_001)
        if is_cast:
            await device.cast(["b"], message)
        else:
            await device.send("b", message)

    async def receive_once(device: Device) -> None:
        await device.receive()

    programs = {"a": send_large_message, "b": receive_once}
    with pytest.raises(ProgramError) as error:
        make_world(programs, link=Link(delay=0.25)).run()
    assert "is too large" in str(error.value.__cause__)


GATHER_ONCE = {"checkpoint_every": 12}
"""A checkpoint after the last of 12 steps only."""


@pytest.fixture
def failed_gathering(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Return the outcome of a training with a failure at the end of the gathering of all weights."""
    add = Collector.add

    def fail_when_complete(self: Collector, step: int, unit: int, state: State) -> None:
        if add(self, step, unit, state) is not None:
            raise TestbedError("the weights cannot be held")

    monkeypatch.setattr(Collector, "add", fail_when_complete)
    return run_simulated(make_scenario(method=GATHER_ONCE))


def test_stages_store_their_weights_if_gathering_fails(
    failed_gathering: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed_gathering.status == "failed"
    # No checkpoint was complete.
    assert failed_gathering.weights_file is None
    assert [*failed_gathering.parts] == DEVICE_NAMES
    stored: dict[str, torch.Tensor] = {}
    for part in failed_gathering.parts.values():
        stored |= arrays.unpack(bytearray(part))
    # The collector works again in a second run.
    monkeypatch.undo()
    gathered = run_simulated(make_scenario(method=GATHER_ONCE)).weights
    assert gathered is not None
    assert stored.keys() == gathered.keys()
    for name, value in stored.items():
        assert torch.equal(value, gathered[name]), name


def test_weights_of_stages_are_written_to_results(
    failed_gathering: Outcome, tmp_path: Path
) -> None:
    parts = failed_gathering.parts
    folder = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(parts=parts),
    )
    file = folder / "weights-worker1.safetensors"
    assert file.read_bytes() == parts["worker1"]


def test_run_at_time_limit_stores_weights_of_stages_without_empty_file() -> None:
    outcome = run_simulated(make_scenario(method=GATHER_ONCE, time_limit="0.2s"))
    assert outcome.status == "timed out"
    assert outcome.weights_file is None
    assert [*outcome.parts] == DEVICE_NAMES


def test_asynchronous_stages_store_weights_without_replication() -> None:
    method = {"name": "pipedream", "global_replication_interval": 0}
    outcome = run_simulated(make_scenario(method=method, time_limit="0.05s"))
    assert outcome.status == "timed out"
    assert [*outcome.parts] == DEVICE_NAMES


def test_exported_weights_of_device_have_names_of_user_network() -> None:
    problem, _ = problem_of(make_scenario())
    # A model with a builder is a user's network; names of its tensors begin with the unit in the testbed.
    user_model = replace(problem.model, builder=problem.model.build)
    prepared = SimpleNamespace(problem=replace(problem, model=user_model))
    part = arrays.pack({"3.head.weight": torch.ones(2)})
    outcome = recorded.make_outcome(parts={"a": part})
    exported = export_weights(cast(Prepared, prepared), outcome)
    assert [*arrays.unpack(bytearray(exported.parts["a"]))] == ["head.weight"]
    assert exported.weights_file is None
