"""The memory that the plan of a distributed inference predicts, beside the tensors that a run holds at its peak."""

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


# As YOLOv2: wide and then narrow layers, and early features that come in again, reorganised.
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
            (f"conv{index}", convolution(*each))
            for index, each in enumerate([(24, 3), (12, 1), (24, 3)], start=4)
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
WAYS = [
    *(
        (scheme, exchange)
        for scheme in ("lop", "lip", "fuse", "optimal")
        for exchange in ("via-source", "direct")
    ),
    ("sequential", "via-source"),
    ("single", "via-source"),
]


def shares_used(found: Inference) -> dict[int, float]:
    """Return by device the activations held at most, of those that the plan predicts. Weights are as predicted."""
    assert found.outcome.status == "finished", found.outcome.error
    devices = metrics(found.outcome, found.experiment, found.plan)["devices"]
    predicted = {part.device: part.memory for part in found.plan.assignments}
    used = {}
    for index, name in enumerate(found.flow.plan.devices):
        stored = 4 * count_parameters(found.flow, index)
        assert devices[name]["weights"] == stored
        if predicted[name] > stored:
            used[index] = devices[name]["activations"] / (predicted[name] - stored)
    return used


@pytest.mark.parametrize(("scheme", "exchange"), WAYS)
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize(
    ("model", "devices", "early"),
    [
        ("cnn", 2, 2),
        ("cnn", 6, 0),
        ("routed", 1, 2),
        ("routed", 3, 0),
        ("routed", 3, 2),
    ],
)
def test_no_device_holds_more_than_the_plan_says(
    model, scheme, exchange, devices, early, in_flight
):
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "tiled_layers": early,
        "in_flight": in_flight,
        "min_chunk_bytes": 64,
    }
    work = {"model": CNN, "requests": in_flight, "batch_size": 1}
    # The source is slower than the others: their parts come while it still has its own to do.
    keys = {"devices": {"source": {"speed": "5mflops"}}}
    if devices > 1:
        keys["devices"]["worker"] = {"speed": "40mflops", "count": devices - 1}
        method["shares"] = "equal"
    used = shares_used(
        run_inference(
            distributed_scenario(devices - 1, method, work, **keys),
            ROUTED if model == "routed" else None,
        )
    )
    assert all(each <= 1 for each in used.values())


@pytest.mark.parametrize(("scheme", "exchange"), WAYS)
@pytest.mark.parametrize("early", [0, 2])
def test_what_the_plan_says_is_needed_when_some_devices_are_slower(
    scheme, exchange, early
):
    """What is held at once depends on who waits for whom; the prediction is within 1.1 of the most."""
    most: defaultdict[int, float] = defaultdict(float)
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "tiled_layers": early,
        "shares": "equal",
        "tile_grid": (2, 2) if early else None,
    }
    for odd in range(3):
        for speed, others, rate in (
            ("1mflops", "20mflops", "1gbit"),
            ("20mflops", "1mflops", "20mbit"),
        ):
            speeds = [others] * 3
            speeds[odd] = speed
            keys = {
                "devices": {
                    f"d{index}": {"speed": each} for index, each in enumerate(speeds)
                }
            }
            keys["network"] = {"link": {"rate": rate, "delay": "100us"}}
            found = run_inference(
                distributed_scenario(
                    2, method, {"model": CNN, "requests": 1, "batch_size": 8}, **keys
                )
            )
            for device, used in shares_used(found).items():
                most[device] = max(most[device], used)
    assert all(1 / 1.1 <= each <= 1 for each in most.values())
