"""Planned memory of distributed inference against the peak memory of runs."""

from collections import defaultdict

import pytest

from testbed.ml.models.chain import chain
from testbed.ml.models.layers import (
    Conv2d,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Reorganise,
)
from testbed.trace.metrics import metrics
from testbed_stahl.demands import count_parameters
from tests.helpers.inferences import CNN, Inference, distributed_scenario, run_inference


def convolution(channels: int, kernel: int) -> tuple[Conv2d, LeakyReLU]:
    return Conv2d(channels, kernel, padding=kernel // 2), LeakyReLU(0.1)


# Like YOLOv2, the model alternates wide and narrow layers and reorganises early features for a later layer.
ROUTED = chain(
    "routed",
    (3, 32, 32),
    10,
    [
        ("conv0", convolution(8, 3)),
        ("pool1", (MaxPool2d(),)),
        ("conv2", convolution(16, 3)),
        ("pool3", (MaxPool2d(),)),
        *(
            (f"conv{index}", convolution(*shape))
            for index, shape in enumerate([(24, 3), (12, 1), (24, 3)], start=4)
        ),
        ("route7", ()),
        ("conv8", convolution(4, 1)),
        ("reorg9", (Reorganise(2),)),
        ("route10", ()),
        ("conv11", convolution(32, 3)),
        ("pool12", (MaxPool2d(),)),
        ("out", (Flatten(), Linear(10))),
    ],
    {7: (2,), 10: (9, 6)},
)
SCHEMES_AND_EXCHANGES = [
    *(
        (scheme, exchange)
        for scheme in ("lop", "lip", "fuse", "optimal")
        for exchange in ("via-source", "direct")
    ),
    ("sequential", "via-source"),
    ("single", "via-source"),
]


def measure_memory_use(inference: Inference) -> dict[int, float]:
    """Return the peak activations of each device as a share of the planned ones; weights must match exactly."""
    assert inference.outcome.status == "finished", inference.outcome.error
    devices = metrics(inference.outcome, inference.experiment, inference.plan)[
        "devices"
    ]
    predicted = {part.device: part.memory for part in inference.plan.assignments}
    used = {}
    for index, name in enumerate(inference.flow.plan.devices):
        stored = 4 * count_parameters(inference.flow, index)
        assert devices[name]["weights"] == stored
        if predicted[name] > stored:
            used[index] = devices[name]["activations"] / (predicted[name] - stored)
    return used


@pytest.mark.parametrize(("scheme", "exchange"), SCHEMES_AND_EXCHANGES)
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(
    ("model", "devices", "tiled_layers"),
    [
        ("cnn", 2, 2),
        ("cnn", 6, 0),
        ("routed", 1, 2),
        ("routed", 3, 0),
        ("routed", 3, 2),
    ],
)
def test_activations_never_exceed_planned_memory(
    model, scheme, exchange, devices, tiled_layers, in_flight
):
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "tiled_layers": tiled_layers,
        "in_flight": in_flight,
        "min_chunk_bytes": 64,
    }
    work = {"model": CNN, "requests": in_flight, "batch_size": 1}
    # The source is the slowest device, so parts of others arrive while it still computes its own.
    keys = {"devices": {"source": {"speed": "5mflops"}}}
    if devices > 1:
        keys["devices"]["worker"] = {"speed": "40mflops", "count": devices - 1}
        method["shares"] = "equal"
    scenario = distributed_scenario(devices - 1, method, work, **keys)
    inference = run_inference(scenario, ROUTED if model == "routed" else None)
    for share in measure_memory_use(inference).values():
        assert share <= 1


@pytest.mark.parametrize(("scheme", "exchange"), SCHEMES_AND_EXCHANGES)
@pytest.mark.parametrize("tiled_layers", [0, 2])
def test_planned_memory_is_nearly_used_with_one_slower_or_faster_device(
    scheme, exchange, tiled_layers
):
    """The peak depends on the order of arrival, so the largest of several runs must be within 10 % of the plan."""
    largest_shares: defaultdict[int, float] = defaultdict(float)
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "tiled_layers": tiled_layers,
        "shares": "equal",
        "tile_grid": (2, 2) if tiled_layers else None,
    }
    work = {"model": CNN, "requests": 1, "batch_size": 8}
    for different in range(3):
        for speed, common_speed, rate in (
            ("1mflops", "20mflops", "1gbit"),
            ("20mflops", "1mflops", "20mbit"),
        ):
            speeds = [common_speed] * 3
            speeds[different] = speed
            devices = {}
            for index, device_speed in enumerate(speeds):
                devices[f"d{index}"] = {"speed": device_speed}
            network = {"link": {"rate": rate, "delay": "100us"}}
            scenario = distributed_scenario(
                2, method, work, devices=devices, network=network
            )
            inference = run_inference(scenario)
            for device, used in measure_memory_use(inference).items():
                largest_shares[device] = max(largest_shares[device], used)
    for share in largest_shares.values():
        assert 1 / 1.1 <= share <= 1
