"""Measurement of a board: costs of its layers, its profile as a file, and the energy of a run."""

from __future__ import annotations

import math
import socket
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

from testbed.common.errors import InputError
from testbed.device import KINDS, Cost
from testbed.hardware import DeviceSpec, Rates
from testbed.ml.models.chain import backward_of, forward_of
from testbed.ml.models.layers import BatchNorm2d, Conv2d, Layer, Linear, MaxPool2d, ReLU
from testbed.ml.preparation import load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed_controller.cli.machine import profile
from testbed_controller.profiling import board
from tests.helpers.training import sgd_config

SCENARIO = """
name: own
devices: {{device: {{profile: {profile}}}}}
network: {{}}
workload: {{model: {{name: mlp}}, method: {{name: single}}, data: {{name: synthetic, train: 64, test: 8}}, steps: 2}}
"""


def write_scenario(folder: Path, profile: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(SCENARIO.format(profile=profile))
    return path


def test_measured_layers_have_costs_of_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Times do not matter here, and take long to measure.
    monkeypatch.setattr(board, "training_seconds", lambda module, inputs: 1.0)
    monkeypatch.setattr(board, "update_seconds", lambda values: 1.0)
    modules = {}
    for kind, name, module, shape, _ in board.sample_layers():
        modules[kind, name] = (module, shape)
    *measured, _, update = board.measure_layers()
    kinds = {update.kind}
    for measurement in measured:
        kinds.add(measurement.kind)
        module, shape = modules[measurement.kind, measurement.name]
        layer_cost = describe_module(module).cost(shape)
        forward = forward_of(layer_cost, board.BATCH_SIZE)
        cost = forward + backward_of(layer_cost, board.BATCH_SIZE)
        # FLOPs, bytes of activations and bytes of weights.
        assert cost.of() == measurement[2:5]
        assert cost.of([measurement.kind]) == measurement[2:5]  # type: ignore[list-item]
    assert kinds == {*KINDS}
    # The update is measured with 2^20 parameters.
    assert update.flops == sgd_config(momentum=0).update_flops * (1 << 20)


def describe_module(module: nn.Module) -> Layer:
    """Return the testbed's description of a module of torch."""
    if isinstance(module, nn.Conv2d):
        return Conv2d(
            module.out_channels,
            module.kernel_size[0],
            1,
            int(module.padding[0]),
            module.groups,
        )
    if isinstance(module, nn.Linear):
        return Linear(module.out_features)
    return {nn.BatchNorm2d: BatchNorm2d(), nn.ReLU: ReLU(), nn.MaxPool2d: MaxPool2d()}[
        type(module)
    ]


def test_measured_profile_is_valid_device_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FLOPs, bytes of activations, bytes of weights and seconds of layers on a machine with 2 GFLOP/s in convolutions,
    # and with 4 GFLOP/s and 1 GB/s of weights in linear layers. Row b: 8 / 4 + 1 / 1 = 3 s.
    measured = [
        board.LayerMeasurement("linear", "a", 4e9, 5.0, 1e9, 2.0),
        board.LayerMeasurement("linear", "b", 8e9, 1e9, 1e9, 3.0),
        board.LayerMeasurement("linear", "c", 4e9, 0.0, 3e9, 4.0),
        board.LayerMeasurement("convolution", "d", 2e9, 1.0, 1.0, 1.0),
        board.LayerMeasurement("convolution", "e", 4e9, 5e9, 0.0, 2.0),
    ]
    monkeypatch.setattr(board, "measure_layers", lambda: measured)
    path = tmp_path / "pi.yaml"
    result = CliRunner().invoke(profile, ["--out", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    with path.open("a") as file:
        file.write("watts: {idle: 2, busy: 5}\n")
    trial = trials(load(write_scenario(tmp_path, "pi.yaml")))[0]
    (device,) = trial.experiment.devices
    assert device.profile == "pi.yaml"
    assert device.watts == (2.0, 5.0)
    assert device.kinds["convolution"] == Rates(pytest.approx(2e9))
    assert device.kinds["linear"] == Rates(pytest.approx(4e9), None, pytest.approx(1e9))
    # 12 / 4 + 4 / 1
    assert device.seconds(Cost(12e9, 1e9, 4e9, "linear")) == pytest.approx(7.0)
    # Whole MiB.
    assert device.memory == board.available_memory() >> 20 << 20
    # The resolved scenario contains the profile, which other machines do not have.
    path.unlink()
    resolved = trial.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    (restored,) = trials(Scenario.model_validate(resolved))
    assert restored.experiment.devices == (device,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"own.yaml:3: devices.device.profile: .*pi.yaml: cannot be read"),
        ("speed: 1gflops\n", "memory"),
        (
            "speed: 1gflops\nmemory: 1GiB\nwatts: {idle: 3, busy: 2}\n",
            "'busy' must be at least 'idle'",
        ),
    ],
)
def test_invalid_profile_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "pi.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        trials(load(write_scenario(tmp_path, "pi.yaml")))


def test_energy_is_idle_power_and_additional_power_of_computing(tmp_path: Path) -> None:
    assert DeviceSpec("a", 1.0, 1.0).joules(10.0, 4.0) is None
    # 2 W for 10 s, and 5 - 2 W more for 4 s.
    device = DeviceSpec("a", 1.0, 1.0, watts=(2.0, 5.0))
    assert device.joules(10.0, 4.0) == 2 * 10 + 3 * 4
    spec = "{speed: 1mflops, memory: 1GiB, watts: {idle: 2, busy: 5}}"
    prepared = prepare(trials(load(write_scenario(tmp_path, spec)))[0])
    outcome = simulate(prepared, load_data(prepared))
    values = metrics(outcome, prepared.experiment, prepared.plan)
    row = values["devices"]["device"]
    energy = 2 * values["duration"] + 3 * row["compute"]
    assert row["energy"] == pytest.approx(energy)
    assert values["energy"] == row["energy"]


def test_link_between_two_ends_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "TRANSFER_BYTES", 1 << 16)
    with socket.create_server(("", 0)) as unused:
        port = unused.getsockname()[1]
    threading.Thread(target=board.serve_peer, args=(port,), daemon=True).start()
    # The server starts after a moment.
    for _ in range(200):
        try:
            rate, delay = board.measure_link("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    assert math.isfinite(rate)
    assert 0 < delay < 1
