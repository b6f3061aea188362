"""Devices with reduced precision: outputs, durations, memory, training, and unsupported combinations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from testbed.common.errors import InputError
from testbed.device import Cost, Precision
from testbed.hardware import PROFILES, DeviceSpec, Rates
from testbed.ml.layers.shard import Shard
from testbed.ml.models import create
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.preparation import load_data
from testbed.ml.training.config import TrainingConfig
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of, make_scenario

MODEL = create("cnn", {}, (1, 8, 8), 10)
UNITS = range(len(MODEL.units))
SAMPLES = 8


def prepare_with_precision(precision: str, **keys: object) -> Prepared:
    """Prepare a scenario with a source and two workers of one precision."""
    device = {"speed": "1gflops", "precision": precision}
    devices = {"source": device, "worker": {**device, "count": 2}}
    (trial,) = trials(make_scenario(devices=devices, **keys))
    return prepare(trial)


def run_to_end(prepared: Prepared) -> Outcome:
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    return outcome


@pytest.mark.parametrize("precision", ["f16", "bf16", "int8"])
def test_outputs_are_close_to_float32(precision: Precision) -> None:
    inputs = torch.rand(4, 1, 8, 8)

    def infer_with(precision: Precision) -> torch.Tensor:
        shard = Shard(
            MODEL,
            start=0,
            stop=len(MODEL.units),
            seed=1,
            training=TrainingConfig(),
            precision=precision,
        )
        return shard.infer(inputs)

    exact = infer_with("f32")
    rounded = infer_with(precision)
    # Messages and losses are float32 at each precision.
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    largest = float(exact.abs().max())
    assert torch.allclose(rounded, exact, atol=0.05 * largest)


KINDS = {"convolution": Rates(speed=4e9, memory_rate=8e9, weight_rate=2e9)}
"""Rates of FLOPs, of bytes of activations and of bytes of weights; the device's own rates apply to other layers."""
FLOAT32 = DeviceSpec("a", speed=1e9, memory=1e9, memory_rate=1e9, kinds=KINDS)
FLOAT16 = replace(FLOAT32, precision="f16", faster=2.0)
"""The same device with twice the FLOP/s, as `faster` says, and half the bytes."""


@pytest.mark.parametrize(
    ("kind", "factor"), [("linear", 0.5), ("convolution", 0.5), ("other", 1.0)]
)
def test_only_layers_are_faster_in_float16(kind: str, factor: float) -> None:
    # Work of the kind "other" belongs to no layer, such as an optimizer's update in float32.
    cost = Cost(flops=8e9, accessed=4e9, weights=2e9, kind=kind)
    assert FLOAT16.seconds(cost) == pytest.approx(factor * FLOAT32.seconds(cost))


def test_float16_has_rates_for_same_kinds_of_layers() -> None:
    # Work of a kind without rates would take no time.
    def kinds_of(device: DeviceSpec) -> set[str]:
        names: set[str] = set()
        for kinds, _ in device.rates:
            names.update(kinds)
        return names

    assert kinds_of(FLOAT16) == kinds_of(FLOAT32)


def test_int8_shortens_access_to_weights_only() -> None:
    int8 = replace(FLOAT32, precision="int8")
    weights_only = Cost(flops=0, accessed=0, weights=8e9, kind="convolution")
    # A quarter of 8 GB at 2 GB/s.
    assert int8.seconds(weights_only) == pytest.approx(1.0)
    without_weights = Cost(flops=4e9, accessed=8e9, weights=0, kind="convolution")
    # 4 GFLOP at 4 GFLOP/s, and 8 GB of activations at 8 GB/s.
    assert int8.seconds(without_weights) == pytest.approx(2.0)


def test_float16_halves_inference_memory() -> None:
    float32 = inference_bytes(MODEL, UNITS, SAMPLES)
    assert inference_bytes(MODEL, UNITS, SAMPLES, "f16") == float32 / 2


def test_int8_saves_three_quarters_of_weights() -> None:
    float32 = inference_bytes(MODEL, UNITS, SAMPLES)
    saved = float32 - inference_bytes(MODEL, UNITS, SAMPLES, "int8")
    assert saved == pytest.approx(0.75 * MODEL.weight_bytes(UNITS))


def test_bfloat16_halves_activations_in_training() -> None:
    float32 = training_bytes(MODEL, UNITS, SAMPLES, state_values=1)
    bfloat16 = training_bytes(MODEL, UNITS, SAMPLES, state_values=1, precision="bf16")
    # Weights and gradients remain float32. Cut 0 is the input of the model.
    activations = MODEL.activation_bytes(UNITS) + MODEL.cut_bytes(0)
    assert float32 - bfloat16 == pytest.approx(SAMPLES * activations / 2)


@pytest.mark.parametrize("method", ["single", "pipeline", "pipedream"])
@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_training_has_losses_close_to_float32(method: str, precision: str) -> None:
    training = {"optimizer": {"learning_rate": 0.1}}
    workload = {"training": training, "steps": 40}

    def losses_with(precision: str) -> list[float]:
        prepared = prepare_with_precision(
            precision, workload=workload, method={"name": method}
        )
        return [step["loss"] for step in fields_of(run_to_end(prepared), "step")]

    exact = losses_with("f32")
    rounded = losses_with(precision)
    assert rounded != exact
    # Rounding accumulates over the steps.
    assert rounded[0] == pytest.approx(exact[0], rel=0.02)
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.05)
    assert rounded[-1] < rounded[0]


def test_profile_has_speeds_of_precisions() -> None:
    nano = PROFILES["jetson-nano"]
    assert nano.precisions["f16"] == pytest.approx(2 * nano.speed, rel=0.01)
    devices = {"source": {"profile": "jetson-nano", "precision": "f16"}}
    (trial,) = trials(make_scenario(devices=devices, method={"name": "single"}))
    (device,) = prepare(trial).problem.devices
    assert device.faster == pytest.approx(2.0, rel=0.01)


def test_profile_without_speed_of_precision_is_rejected() -> None:
    devices = {"source": {"profile": "laptop", "precision": "bf16"}}
    message = "the profile laptop has no speed in bf16: give a `speed`"
    with pytest.raises(InputError, match=message):
        trials(make_scenario(devices=devices))


INFERENCE = {"task": "infer", "training": {}}


def test_method_without_precision_support_is_rejected() -> None:
    message = "'distributed' computes in float32"
    with pytest.raises(InputError, match=message):
        prepare_with_precision(
            "int8", workload=INFERENCE, method={"name": "distributed"}
        )


def test_int8_is_for_inference_only() -> None:
    message = "int8 applies to weights that are not trained"
    with pytest.raises(InputError, match=message):
        prepare_with_precision("int8", method={"name": "pipeline"})
    inference = prepare_with_precision(
        "int8", workload=INFERENCE, method={"name": "sequential"}
    )
    run_to_end(inference)


def test_gpu_is_for_user_programs_only() -> None:
    with pytest.raises(InputError, match="applies to user programs only"):
        trials(make_scenario(devices={"source": {"gpu": True}}))
