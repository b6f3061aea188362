"""Messages may be as large as the devices' memory allows, and what was trained is kept where it cannot be gathered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed.common.errors import InputError, TestbedError
from testbed.device import Device
from testbed.hardware import DeviceSpec, check_message, largest_message
from testbed.ml.layers.shard import State
from testbed.ml.pipeline.checkpointing import Collector
from testbed.network.link import Link
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation.world import ProgramError
from testbed.wire import tensors
from testbed.wire.message import Message
from tests.helpers import recorded
from tests.helpers.runs import run, scenario
from tests.helpers.worlds import world


def test_the_device_with_less_memory_bounds_a_message() -> None:
    large, small = DeviceSpec("large", 1e9, 9 * 2.0**30), DeviceSpec("small", 1e9, 600e6)
    assert largest_message(large, large) > 2_200_000_000
    assert largest_message(large, small) == largest_message(small, large) == 300_000_000
    check_message(300_000_000, large, small)
    with pytest.raises(TestbedError, match="a message of 301 MB from large to small is too large"):
        check_message(301_000_000, large, small)


def exchange(payload: str) -> Scenario:
    workload = {
        "task": "infer",
        "model": {"name": "mlp"},
        "method": {"name": "exchange", "payload": payload},
        "requests": 1,
    }
    devices = {name: {"speed": "1gflops", "memory": "800MB"} for name in ("left", "right")}
    return Scenario.model_validate({"name": "large", "devices": devices, "workload": workload})


def test_a_message_that_the_plan_knows_to_be_too_large_is_refused_before_the_run() -> None:
    prepare(trials(exchange("390MB"))[0])
    with pytest.raises(InputError, match="'left' has 800 MB of memory, its part of the plan needs 820 MB"):
        prepare(trials(exchange("410MB"))[0])


@pytest.mark.parametrize("cast", [False, True])
def test_the_simulation_refuses_a_message_that_a_container_would_refuse(cast: bool) -> None:
    async def lead(device: Device) -> None:
        message = Message("m", padding=500_000_001)
        await (device.cast(["b"], message) if cast else device.send("b", message))

    async def idle(device: Device) -> None:
        await device.receive()

    with pytest.raises(ProgramError) as failed:
        world({"lead": lead, "b": idle}, link=Link(delay=0.25)).run()
    assert "is too large" in str(failed.value.__cause__)


def test_stages_keep_what_they_trained_where_it_cannot_be_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rarely_gathered = scenario(method={"checkpoint_every": 12})
    whole = run(rarely_gathered).weights
    assert whole is not None
    add = Collector.add

    def fail_when_complete(self: Collector, step: int, unit: int, state: State) -> None:
        if add(self, step, unit, state) is not None:
            raise TestbedError("the weights cannot be held")

    monkeypatch.setattr(Collector, "add", fail_when_complete)
    outcome = run(rarely_gathered)
    assert outcome.status == "failed"
    kept: dict[str, torch.Tensor] = {}
    for part in outcome.parts.values():
        kept |= tensors.to_torch(tensors.read(bytearray(part))[0])
    assert outcome.weights_file is None  # no checkpoint was complete
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]
    assert kept.keys() == whole.keys()
    for name, value in kept.items():
        assert torch.equal(value, whole[name]), name
    place = recorded.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome(parts=outcome.parts))
    assert (place / "weights-worker1.safetensors").read_bytes() == outcome.parts["worker1"]


def test_a_run_at_its_time_limit_leaves_each_stage_and_no_empty_file() -> None:
    outcome = run(scenario(method={"checkpoint_every": 12}, time_limit="0.2s"))
    assert outcome.status == "timed out"
    assert outcome.weights_file is None
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]


def test_a_stage_without_a_checkpoint_leaves_what_it_trained_asynchronously() -> None:
    outcome = run(scenario(method={"name": "pipedream", "global_every": 0}, time_limit="0.05s"))
    assert outcome.status == "timed out"
    assert [*outcome.parts] == ["source", "worker1", "worker2", "worker3"]
