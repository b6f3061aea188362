"""Outputs and traffic of fully distributed inference on the virtual clock."""

from collections import defaultdict

import pytest

from testbed.ml.models import create
from testbed.ml.models.chain import chain
from testbed.ml.models.layers import (
    Conv2d,
    GlobalAveragePool2d,
    Linear,
    MaxPool2d,
    ReLU,
)
from testbed.wire.message import ENVELOPE
from testbed_stahl.communication import all_transfers
from tests.helpers.inferences import CNN, FC, distributed_scenario, run_inference
from tests.helpers.runs import events_of

SCHEMES = ("lop", "lip", "fuse", "optimal", "sequential", "single")
TRAFFIC = ("piece", "sums", "tile", "tiled")


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("devices", range(1, 9))
def test_distributed_mlp_output_matches_single_device(scheme, exchange, devices):
    inference = run_inference(
        distributed_scenario(devices - 1, {"scheme": scheme, "exchange": exchange})
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-4


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
@pytest.mark.parametrize(("devices", "tiled_layers"), [(2, 0), (3, 2), (5, 3), (8, 0)])
def test_distributed_cnn_output_matches_single_device(
    scheme, exchange, devices, tiled_layers
):
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "tiled_layers": tiled_layers,
        "source": "worker1",
    }
    inference = run_inference(distributed_scenario(devices - 1, method, {"model": CNN}))
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-4


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal", "sequential"])
@pytest.mark.parametrize("model", [FC, CNN])
@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("min_chunk_bytes", [64, 16_384])
def test_sent_messages_match_plan(scheme, model, exchange, min_chunk_bytes):
    method = {
        "scheme": scheme,
        "exchange": exchange,
        "min_chunk_bytes": min_chunk_bytes,
    }
    inference = run_inference(
        distributed_scenario(3, method, {"model": model, "requests": 1})
    )
    flow = inference.flow
    devices = flow.plan.devices
    planned, sent = defaultdict(list), defaultdict(list)
    for transfer in all_transfers(flow):
        pair = (devices[transfer.sender], devices[transfer.receiver])
        planned[pair] += transfer.messages
    for device, fields in events_of(inference.outcome, "receive"):
        if fields["message"] in TRAFFIC:
            sent[fields["peer"], device].append(fields["bytes"])
    assert sent.keys() == planned.keys()
    for pair, sizes in sent.items():
        # A message is larger than its values by its header, which is at most an envelope.
        values = [4 * flow.settings.samples * elements for elements in planned[pair]]
        assert len(sizes) == len(values)
        for size, values_size in zip(sorted(sizes), sorted(values), strict=True):
            assert 0 < size - values_size <= ENVELOPE


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_pooling_directly_after_route_is_computed(exchange):
    units = [
        ("a", [Conv2d(3, 3, padding=1), ReLU()]),
        ("b", [Conv2d(2, 3, padding=1), ReLU()]),
        ("join", [MaxPool2d(), Conv2d(4, 1)]),
        ("mean", [GlobalAveragePool2d(), Linear(10)]),
    ]
    model = chain("routed", (1, 8, 8), 10, units, {2: (1, 0)})
    inference = run_inference(
        distributed_scenario(2, {"scheme": "lop", "exchange": exchange}), model
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-4


FAST = {"speed": "100gflops", "network": {"link": {"rate": "1gbit", "delay": "1ms"}}}
SMALL = {"hidden": [100, 90]}


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize(
    ("name", "options", "shape", "scheme", "devices"),
    [
        *(
            ("alexnet", SMALL, (3, 80, 80), scheme, 5)
            for scheme in ("lop", "lip", "fuse", "optimal")
        ),
        *(
            ("vgg16", SMALL, (3, 32, 32), scheme, 3)
            for scheme in ("lop", "lip", "optimal")
        ),
        ("mobilenetv2", {}, (3, 32, 32), "lop", 3),
        ("yolov2", {}, (3, 64, 32), "optimal", 2),
    ],
)
def test_distributed_large_network_output_matches_single_device(
    name, options, shape, scheme, devices, exchange
):
    method = {"scheme": scheme, "exchange": exchange, "tiled_layers": None}
    inference = run_inference(
        distributed_scenario(
            devices - 1, method, {"requests": 1, "batch_size": 1}, **FAST
        ),
        create(name, options, shape, 10),
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-4
