"""A board is measured with what models charge, its file is a profile, and its watts give the energy of a run."""

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


def written(folder: Path, profile: str) -> Path:
    place = folder / "own.yaml"
    place.write_text(SCENARIO.format(profile=profile))
    return place


def test_board_layers_have_the_costs_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "training_seconds", lambda module, inputs: 1.0)
    monkeypatch.setattr(board, "update_seconds", lambda values: 1.0)
    layers = {
        (kind, name): (module, shape)
        for kind, name, module, shape, _ in board.sample_layers()
    }
    *measured, _, update = board.measure_layers()
    for each in measured:
        module, shape = layers[each.kind, each.name]
        layer = ours(module)
        cost = forward_of(layer.cost(shape), board.BATCH) + backward_of(
            layer.cost(shape), board.BATCH
        )
        assert cost.of([each.kind]) == cost.of() == each[2:5]  # type: ignore[list-item]
    assert {*(each.kind for each in measured), update.kind} == {*KINDS}
    assert update.flops == sgd_config(momentum=0).update_flops * (1 << 20)


def ours(module: nn.Module) -> Layer:
    """Return torch's module as the testbed describes it."""
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


def test_measured_profile_is_a_valid_device_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layers of a machine that does 2 GFLOP/s, and in linear layers 4 GFLOP/s and 1 GB/s of weights.
    rows = [
        *(
            ("linear", "a", 4e9, 5.0, 1e9, 2.0),
            ("linear", "b", 8e9, 1e9, 1e9, 3.0),
            ("linear", "c", 4e9, 0.0, 3e9, 4.0),
        ),
        *(
            ("convolution", "d", 2e9, 1.0, 1.0, 1.0),
            ("convolution", "e", 4e9, 5e9, 0.0, 2.0),
        ),
    ]
    monkeypatch.setattr(
        board, "measure_layers", lambda: [board.Measured(*row) for row in rows]
    )
    done = CliRunner().invoke(
        profile, ["--out", str(tmp_path / "pi.yaml")], catch_exceptions=False
    )
    assert done.exit_code == 0
    with (tmp_path / "pi.yaml").open("a") as file:
        file.write("watts: {idle: 2, busy: 5}\n")
    trial = trials(load(written(tmp_path, "pi.yaml")))[0]
    (device,) = trial.experiment.devices
    assert (device.profile, device.watts) == ("pi.yaml", (2.0, 5.0))
    assert device.kinds["convolution"] == Rates(pytest.approx(2e9))
    assert device.kinds["linear"] == Rates(pytest.approx(4e9), None, pytest.approx(1e9))
    assert device.seconds(Cost(12e9, 1e9, 4e9, "linear")) == pytest.approx(7.0)
    assert device.memory == board.available_memory() >> 20 << 20
    (tmp_path / "pi.yaml").unlink()
    sent = Scenario.model_validate(
        trial.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    assert trials(sent)[0].experiment.devices == (device,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"own.yaml:3: devices.device.profile: .*pi.yaml: cannot be read"),
        ("speed: 1gflops\n", "memory"),
        ("speed: 1gflops\nmemory: 1GiB\nwatts: {idle: 3, busy: 2}\n", "busy >= idle"),
    ],
)
def test_invalid_profile_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "pi.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        trials(load(written(tmp_path, "pi.yaml")))


def test_energy_by_its_formula(tmp_path: Path) -> None:
    assert DeviceSpec("a", 1.0, 1.0).joules(10.0, 4.0) is None
    assert (
        DeviceSpec("a", 1.0, 1.0, watts=(2.0, 5.0)).joules(10.0, 4.0) == 2 * 10 + 3 * 4
    )
    path = written(
        tmp_path, "{speed: 1mflops, memory: 1GiB, watts: {idle: 2, busy: 5}}"
    )
    prepared = prepare(trials(load(path))[0])
    from testbed.ml.preparation import load_data

    found = metrics(
        simulate(prepared, load_data(prepared)), prepared.experiment, prepared.plan
    )
    row = found["devices"]["device"]
    assert (
        found["energy"]
        == row["energy"]
        == pytest.approx(2 * found["duration"] + 3 * row["compute"])
    )


def test_link_measurement_between_two_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "SENT", 1 << 16)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=board.serve_peer, args=(port,), daemon=True).start()
    for _ in range(200):
        try:
            rate, delay = board.measure_link("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    assert math.isfinite(rate)
    assert 0 < delay < 1
