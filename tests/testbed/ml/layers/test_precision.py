"""Devices that compute in other precisions: what comes out, how long it takes, what it needs, and who refuses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import PROFILES, DeviceSpec, Rates
from testbed.ml.layers.shard import Shard
from testbed.ml.models import create
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.preparation import load_data
from testbed.ml.training.config import TrainingConfig
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario

MODEL = create("cnn", {}, (1, 8, 8), 10)


def trial(precision: str, workers: int = 2, **keys) -> Prepared:
    devices = {"source": {"speed": "1gflops", "precision": precision}}
    if workers:
        devices["worker"] = {
            "speed": "1gflops",
            "count": workers,
            "precision": precision,
        }
    return prepare(trials(make_scenario(workers, devices=devices, **keys))[0])


@pytest.mark.parametrize("precision", ["f16", "bf16", "int8"])
def test_values_are_near_those_of_float32(precision: str) -> None:
    shards = [
        Shard(MODEL, 0, len(MODEL.units), 1, TrainingConfig(), each)
        for each in ("f32", precision)
    ]
    inputs = torch.rand(4, 1, 8, 8)
    exact, found = (shard.infer(inputs) for shard in shards)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    assert torch.allclose(found, exact, atol=0.05 * float(exact.abs().max()))


def test_layers_take_their_rates_and_updates_those_of_float32() -> None:
    kinds = {"convolution": Rates(4e9, 8e9, 2e9)}
    plain = DeviceSpec("a", 1e9, 1e9, memory_rate=1e9, kinds=kinds)
    narrow = replace(plain, precision="f16", faster=2.0)
    for kind, times in (("linear", 0.5), ("convolution", 0.5), ("other", 1.0)):
        cost = Cost(8e9, 4e9, 2e9, kind)
        assert narrow.seconds(cost) == pytest.approx(times * plain.seconds(cost))
    eight = replace(plain, precision="int8")
    assert eight.seconds(Cost(0, 0, 8e9, "convolution")) == pytest.approx(1.0)
    assert eight.seconds(Cost(4e9, 8e9, 0, "convolution")) == pytest.approx(2.0)
    assert {kind for kinds, _ in narrow.rates for kind in kinds} == {
        kind for kinds, _ in plain.rates for kind in kinds
    }


def test_memory_follows_the_precision() -> None:
    units = range(len(MODEL.units))
    assert (
        inference_bytes(MODEL, units, 8, "f16") == inference_bytes(MODEL, units, 8) / 2
    )
    saved = inference_bytes(MODEL, units, 8) - inference_bytes(MODEL, units, 8, "int8")
    assert saved == pytest.approx(0.75 * MODEL.weight_bytes(units))
    trained = training_bytes(MODEL, units, 8, 1) - training_bytes(
        MODEL, units, 8, 1, precision="bf16"
    )
    assert trained == pytest.approx(
        4 * (MODEL.activation_bytes(units) + MODEL.cut_bytes(0))
    )


@pytest.mark.parametrize("method", ["single", "pipeline", "pipedream"])
@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_training_learns(method: str, precision: str) -> None:
    work = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 40}
    losses = []
    for each in ("f32", precision):
        found = trial(each, workload=work, method={"name": method})
        outcome = simulate(found, load_data(found))
        assert outcome.status == "finished", outcome.error
        losses.append([event["loss"] for event in fields_of(outcome, "step")])
    assert losses[1] != losses[0]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.02)
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)
    assert losses[1][-1] < losses[1][0]


def test_profiles_have_speeds_of_precisions_and_unknown_ones_are_asked_for() -> None:
    assert PROFILES["jetson-nano"].precisions["f16"] == pytest.approx(
        2 * PROFILES["jetson-nano"].speed, rel=0.01
    )
    devices = {"source": {"profile": "jetson-nano", "precision": "f16"}}
    (device,) = prepare(
        trials(make_scenario(0, devices=devices, method={"name": "single"}))[0]
    ).problem.devices
    assert device.faster == pytest.approx(2.0, rel=0.01)
    with pytest.raises(
        InputError, match="no speed in bf16 is known of laptop: give `speed`"
    ):
        trials(
            make_scenario(
                0, devices={"source": {"profile": "laptop", "precision": "bf16"}}
            )
        )


def test_methods_without_precision_support_reject_it() -> None:
    infer = {"task": "infer", "steps": None, "training": {}}
    with pytest.raises(InputError, match="'distributed' computes in float32"):
        trial("int8", workload=infer, method={"name": "distributed"})
    with pytest.raises(
        InputError, match="int8 applies to weights that are not trained"
    ):
        trial("int8", method={"name": "pipeline"})
    found = trial("int8", workload=infer, method={"name": "sequential"})
    outcome = simulate(found, load_data(found))
    assert outcome.status == "finished", outcome.error
    with pytest.raises(InputError, match="applies to user programs only"):
        trials(make_scenario(0, devices={"source": {"gpu": True}}))
