"""Messages may be as large as the devices' memory allows, and what was trained is kept where it cannot be gathered."""

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
from testbed.ml.models.weights import read as weights_of
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


def test_the_device_with_less_memory_bounds_a_message() -> None:
    large, small = (
        DeviceSpec("large", 1e9, 9 * 2.0**30),
        DeviceSpec("small", 1e9, 600e6),
    )
    assert largest_message(large, large) > 2_200_000_000
    assert largest_message(large, small) == largest_message(small, large) == 300_000_000
    check_message(300_000_000, large, small)
    with pytest.raises(
        TestbedError, match="a message of 301 MB from large to small is too large"
    ):
        check_message(301_000_000, large, small)


def exchange(payload: str) -> Scenario:
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


def test_a_message_that_the_plan_knows_to_be_too_large_is_refused_before_the_run() -> (
    None
):
    prepare(trials(exchange("390MB"))[0])
    with pytest.raises(
        InputError,
        match="'left' has 800 MB of memory, its part of the plan needs 820 MB",
    ):
        prepare(trials(exchange("410MB"))[0])


def test_gathered_weights_that_a_stage_cannot_send_are_refused_before_the_run() -> None:
    devices = {
        "source": {"speed": "1gflops"},
        "worker": {"speed": "1gflops", "memory": "15MB"},
    }
    method = {"name": "pipeline", "partition": "even"}
    workload = {"model": {"name": "mlp", "hidden": [64, 1000, 1000]}}
    refused = make_scenario(workload=workload, method=method, devices=devices)
    with pytest.raises(
        InputError,
        match=r"devices.worker.memory: a message of 8.0\d MB from worker to source is too",
    ):
        prepare(trials(refused)[0])
    devices["worker"]["memory"] = "17MB"
    assert (
        simulated(
            prepare(
                trials(
                    make_scenario(workload=workload, method=method, devices=devices)
                )[0]
            )
        ).status
        == "finished"
    )


MODEL = {"model": {"name": "mlp", "hidden": [120, 100, 80, 80]}}
INFERENCE = {**MODEL, "task": "infer", "requests": 4}
OWN_DATA = {
    **MODEL,
    "data": {"name": "digits", "train": 96, "test": 40, "split": "iid"},
}
MESH = {"link": {"rate": "20mbit", "delay": "2ms"}, "topology": "mesh"}


def simulated(prepared: Prepared) -> Outcome:
    file = weights_file(prepared.scenario)
    weights = None if file is None else weights_of(file, prepared.problem.model)
    return simulate(prepared, load(prepared.scenario.workload.data), weights=weights)


@pytest.mark.parametrize("given", [False, True], ids=["seed", "weights"])
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
def test_a_plan_knows_the_largest_messages_of_its_run(
    tmp_path: Path,
    workload: dict[str, Any],
    method: dict[str, Any],
    network: dict[str, Any],
    given: bool,
) -> None:
    if given:
        model = problem_of(make_scenario(workload=MODEL))[0].model
        file = tmp_path / "weights.safetensors"
        module = model.build(0, len(model.units), 1)
        file.write_bytes(arrays.pack(module.state_dict()))
        workload = {**workload, "model": {**workload["model"], "weights": str(file)}}
    prepared = prepare(
        trials(make_scenario(workload=workload, method=method, **network))[0]
    )
    planned: dict[tuple[str, str], float] = {}
    for sender, receiver, size in prepared.method.largest_messages(
        prepared.problem, prepared.plan
    ):
        planned[sender, receiver] = max(size, planned.get((sender, receiver), 0.0))
    sent: dict[tuple[str, str], float] = {}
    for event in simulated(prepared).events.of("send"):
        pair = (event.device, event.fields["peer"])
        sent[pair] = max(event.fields["bytes"], sent.get(pair, 0.0))
    forward = {
        pair: size for pair, size in sent.items() if size > 10_000
    }  # gradients are no larger than activations
    assert forward.keys() <= planned.keys()
    for pair, size in forward.items():
        assert planned[pair] == pytest.approx(size, abs=2000), pair


@pytest.mark.parametrize("casts", [False, True])
def test_the_simulation_refuses_a_message_that_a_container_would_refuse(
    casts: bool,
) -> None:
    async def lead(device: Device) -> None:
        message = Message("m", padding=500_000_001)
        await (device.cast(["b"], message) if casts else device.send("b", message))

    async def idle(device: Device) -> None:
        await device.receive()

    with pytest.raises(ProgramError) as failed:
        make_world({"lead": lead, "b": idle}, link=Link(delay=0.25)).run()
    assert "is too large" in str(failed.value.__cause__)


def test_stages_keep_what_they_trained_where_it_cannot_be_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rarely_gathered = make_scenario(method={"checkpoint_every": 12})
    whole = run_simulated(rarely_gathered).weights
    assert whole is not None
    add = Collector.add

    def fail_when_complete(self: Collector, step: int, unit: int, state: State) -> None:
        if add(self, step, unit, state) is not None:
            raise TestbedError("the weights cannot be held")

    monkeypatch.setattr(Collector, "add", fail_when_complete)
    outcome = run_simulated(rarely_gathered)
    assert outcome.status == "failed"
    kept: dict[str, torch.Tensor] = {}
    for part in outcome.parts.values():
        kept |= arrays.unpack(bytearray(part))
    assert outcome.weights_file is None  # no checkpoint was complete
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]
    assert kept.keys() == whole.keys()
    for name, value in kept.items():
        assert torch.equal(value, whole[name]), name
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(parts=outcome.parts),
    )
    assert (place / "weights-worker1.safetensors").read_bytes() == outcome.parts[
        "worker1"
    ]


def test_a_run_at_its_time_limit_leaves_each_stage_and_no_empty_file() -> None:
    outcome = run_simulated(
        make_scenario(method={"checkpoint_every": 12}, time_limit="0.2s")
    )
    assert outcome.status == "timed out"
    assert outcome.weights_file is None
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]


def test_a_stage_without_a_checkpoint_leaves_what_it_trained_asynchronously() -> None:
    outcome = run_simulated(
        make_scenario(
            method={"name": "pipedream", "global_replication_interval": 0},
            time_limit="0.05s",
        )
    )
    assert outcome.status == "timed out"
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]


def test_the_parts_of_a_users_own_network_have_its_names() -> None:
    part = arrays.pack({"3.head.weight": torch.ones(2)})
    problem, _ = problem_of(make_scenario())
    own = SimpleNamespace(
        problem=replace(
            problem, model=replace(problem.model, builder=problem.model.build)
        )
    )
    left = export_weights(cast(Prepared, own), recorded.make_outcome(parts={"a": part}))
    assert [*arrays.unpack(bytearray(left.parts["a"]))] == ["head.weight"]
    assert left.weights_file is None
