"""Runs of fully distributed inference: memory, losses of devices, overlap and latency."""

from collections import defaultdict

import pytest
import torch

from testbed.common.errors import InputError, TestbedError
from testbed.ml.models import create
from testbed.ml.models.sliced import cut_tensors, draw_tensors
from testbed.trace.intervals import total
from testbed.trace.metrics import metrics
from testbed_stahl.communication import (
    all_transfers,
    make_phases,
    predict_latency,
    sent_elements,
)
from testbed_stahl.dataflow import stored_layers
from testbed_stahl.demands import count_parameters
from testbed_stahl.request_work import Ledger
from tests.helpers.inferences import CNN, distributed_scenario, run_inference
from tests.helpers.runs import events_of, fields_of


def test_devices_hold_equal_shares_of_weights():
    model = {"name": "mlp", "hidden": [240, 480, 240]}
    for devices in (3, 5, 6, 7):
        inference = run_inference(
            distributed_scenario(devices - 1, {"scheme": "fuse"}, {"model": model})
        )
        whole = sum(tensor.nbytes for tensor in inference.weights.values())
        for device, fields in events_of(inference.outcome, "memory"):
            assert fields["weights"] == pytest.approx(whole / devices, rel=0.1), device


@pytest.mark.parametrize("are_weights_given", [True, False])
def test_drawn_weights_equal_slices_of_whole_model(are_weights_given):
    model = create("vgg5", {}, (3, 8, 8), 10)
    inference = run_inference(distributed_scenario(3, {"tiled_layers": None}), model)
    whole = model.build(0, len(model.units), 5).state_dict()
    for index in range(4):
        layers = stored_layers(inference.flow, index)
        drawn = draw_tensors(model, layers, 5)
        sliced = {}
        for layer, part in layers:
            sliced |= cut_tensors(layer, part, whole)
        assert drawn.keys() == sliced.keys()
        for name, tensor in drawn.items():
            assert tensor.equal(sliced[name])
    if are_weights_given:
        repeated = run_inference(
            distributed_scenario(
                3, {"tiled_layers": None}, network={"link": {"rate": "1gbit"}}
            ),
            model,
            weights=whole,
        )
        assert repeated.error < 1e-4


def test_plan_beyond_device_memory_is_rejected():
    devices = {
        "source": {"speed": "1gflops", "memory": "0.5kB"},
        "w": {"speed": "1gflops", "count": 2},
    }
    with pytest.raises(InputError, match="memory"):
        run_inference(distributed_scenario(2, devices=devices))


def answered_requests(inference):
    return [fields["request"] for fields in fields_of(inference.outcome, "request")]


KILL = {
    "kill": "worker2",
    "when": {"device": "worker2", "begins": "forward", "batch": 1},
}
TIMEOUTS = {"stall_timeout": "500ms", "rejoin_timeout": "1s"}


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_remaining_devices_finish_request_after_loss_with_replan(exchange):
    method = {"exchange": exchange, "on_loss": "replan", **TIMEOUTS}
    inference = run_inference(
        distributed_scenario(3, method, {"requests": 4, "model": CNN}, faults=[KILL])
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert answered_requests(inference) == [0, 1, 2, 3]
    assert inference.error < 1e-4
    # Request 3 begins after recovery, without the killed device.
    devices = {
        device
        for device, fields in events_of(inference.outcome, "begin")
        if fields.get("batch") == 3
    }
    assert devices == {"source", "worker1", "worker3"}


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_request_fails_after_loss_without_replan_and_next_one_succeeds(exchange):
    method = {"exchange": exchange, "on_loss": "fail", **TIMEOUTS}
    inference = run_inference(
        distributed_scenario(3, method, {"requests": 4, "model": CNN}, faults=[KILL])
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    (failed,) = fields_of(inference.outcome, "failed")
    assert failed["request"] == 1
    assert failed["error"].startswith("worker2 was lost during the inference")
    assert answered_requests(inference) == [0, 2, 3]
    assert metrics_of(inference)["requests_failed"] == 1


def test_requests_in_flight_shorten_run_and_respect_limit():
    ends, outputs = {}, {}
    for in_flight in (1, 3):
        method = {
            "scheme": "lop",
            "exchange": "direct",
            "in_flight": in_flight,
            "chunks": 1,
        }
        network = {"link": {"rate": "10mbit", "delay": "10us"}}
        inference = run_inference(
            distributed_scenario(
                2,
                method,
                {"requests": 8, "model": CNN},
                network=network,
                speed="5mflops",
            )
        )
        spans = [
            (event["start"], event["start"] + event["duration"], event["batch"])
            for event in fields_of(inference.outcome, "compute")
            if event.get("batch") is not None
        ]
        lifetimes = {
            batch: (
                min(s for s, _, b in spans if b == batch),
                max(e for _, e, b in spans if b == batch),
            )
            for batch in range(8)
        }
        peak = max(
            sum(begin <= at < end for begin, end in lifetimes.values())
            for at, _ in lifetimes.values()
        )
        assert peak == in_flight
        times = [
            event.time for event in inference.outcome.events if event.event == "request"
        ]
        ends[in_flight] = times[-1] - times[0]
        outputs[in_flight] = inference.error
    assert ends[3] < 0.8 * ends[1]
    assert max(outputs.values()) < 1e-4


def test_equal_runs_have_equal_events_and_outputs():
    spec = distributed_scenario(
        4, {"exchange": "direct", "in_flight": 2}, {"model": CNN, "requests": 4}
    )
    first, second = (run_inference(spec) for _ in range(2))
    assert [event.to_json() for event in first.outcome.events] == [
        event.to_json() for event in second.outcome.events
    ]
    assert first.outputs.equal(second.outputs)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_sending_overlaps_computing_on_each_worker(exchange):
    model = {"name": "cnn", "channels": [32, 32, 32], "hidden": [64]}
    method = {"scheme": "lop", "exchange": exchange, "min_chunk_bytes": 256}
    inference = run_inference(
        distributed_scenario(
            2, method, {"model": model, "requests": 1, "batch_size": 8}
        )
    )
    computing, sending = defaultdict(list), defaultdict(list)
    for device, fields in events_of(inference.outcome, "compute", "send"):
        span = (fields["start"], fields["start"] + fields["duration"])
        (computing if "span" in fields else sending)[device].append(span)
    for device in ("worker1", "worker2"):
        apart = total(computing[device]), total(sending[device])
        assert sum(apart) - total([*computing[device], *sending[device]]) > 0.5 * min(
            apart
        )


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
def test_layerwise_run_never_overlaps_sending_and_computing(scheme):
    model = {"name": "mlp", "hidden": [512, 256, 512, 256, 512]}
    board = {"speed": "100mflops", "uplink": "20mbit", "downlink": "20mbit"}
    keys = {
        "network": {"link": {"delay": "1ms"}},
        "devices": {"source": board, "worker": {**board, "count": 4}},
    }
    method = {"scheme": scheme, "min_chunk_bytes": 256, "layerwise": True}
    inference = run_inference(
        distributed_scenario(
            4, method, {"model": model, "requests": 1, "batch_size": 40}, **keys
        )
    )
    assert inference.error < 1e-4
    (request,) = fields_of(inference.outcome, "request")
    assert request["latency"] == pytest.approx(inference.plan.step_time, rel=0.05)
    spans = defaultdict(list)
    for device, fields in events_of(inference.outcome, "compute", "send"):
        if fields.get("batch") is not None or fields.get("message") in (
            "piece",
            "sums",
        ):
            spans[device].append(
                (fields["start"], fields["start"] + fields["duration"])
            )
    for device in ("worker1", "worker2", "worker3", "worker4"):
        assert sum(last - first for first, last in spans[device]) == pytest.approx(
            total(spans[device]), rel=0.01
        )


def test_schemes_rank_equally_by_latency_and_communication():
    model = {"name": "mlp", "hidden": [512, 64, 512, 64, 512]}
    times, sent = {}, {}
    for scheme in ("lop", "lip", "fuse"):
        method = {"scheme": scheme, "shares": "equal"}
        keys = {"network": {"link": {"rate": "1gbit"}}, "speed": "10gflops"}
        keys["devices"] = {
            "source": {"speed": "10gflops", "uplink": "10mbit", "downlink": "10mbit"}
        }
        keys["devices"]["worker"] = {**keys["devices"]["source"], "count": 5}
        inference = run_inference(
            distributed_scenario(
                5, method, {"model": model, "requests": 1, "batch_size": 32}, **keys
            )
        )
        times[scheme] = fields_of(inference.outcome, "request")[0]["latency"]
        sent[scheme] = sent_elements(all_transfers(inference.flow))
    assert sorted(times, key=times.__getitem__) == sorted(sent, key=sent.__getitem__)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", ["lop", "fuse"])
def test_latency_is_below_sum_of_compute_and_transfer(scheme, exchange):
    model = {"name": "mlp", "hidden": [512, 256, 512, 256, 512]}
    board = {"speed": "100mflops", "uplink": "20mbit", "downlink": "20mbit"}
    keys = {
        "network": {"link": {"delay": "1ms"}},
        "devices": {"source": board, "worker": {**board, "count": 5}},
    }
    method = {"scheme": scheme, "exchange": exchange, "min_chunk_bytes": 4096}
    inference = run_inference(
        distributed_scenario(
            5, method, {"model": model, "requests": 1, "batch_size": 40}, **keys
        )
    )
    (request,) = fields_of(inference.outcome, "request")
    phases = make_phases(
        inference.flow, inference.experiment.devices, inference.experiment.links
    )
    assert inference.plan.step_time == predict_latency(phases)
    # Values that pass the source take two transfers, which overlap in the prediction but not in this bound.
    legs = 2 if exchange == "via-source" else 1
    in_turn = sum(phase.compute + legs * (phase.network + 0.001) for phase in phases)
    # The prediction ignores that a layer may begin with the first chunks of the previous layer.
    assert 0.9 * predict_latency(phases) < request["latency"] < in_turn
    # The critical path consists of computing and sending only, and the busiest link bounds the latency from below.
    figures = metrics(inference.outcome, inference.experiment, inference.plan)
    assert figures["path_compute"] + figures["path_network"] == pytest.approx(
        request["latency"], rel=0.01
    )
    assert (
        1
        <= figures["over_bound"]
        < request["latency"] / max(phase.network for phase in phases)
    )
    assert figures["devices"]["source"]["weights"] == 4 * count_parameters(
        inference.flow, 0
    )


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", ["lop", "lip", "optimal"])
def test_faster_devices_take_larger_shares(scheme, exchange):
    devices = {
        "source": {"speed": "20mflops"},
        "slow": {"speed": "7mflops"},
        "fast": {"speed": "53mflops", "count": 2},
    }
    method = {"scheme": scheme, "exchange": exchange, "source": "slow"}
    inference = run_inference(
        distributed_scenario(3, method, {"model": CNN}, devices=devices)
    )
    assert inference.error < 1e-4
    work = {
        name: figures["flops"]
        for name, figures in metrics_of(inference)["devices"].items()
    }
    assert work["fast1"] > 1.5 * work["slow"]


def metrics_of(inference):
    return metrics(inference.outcome, inference.experiment, inference.plan)


def test_ledger_rejects_tensor_beyond_memory():
    ledger = Ledger("board", 1000)
    ledger.weights = 600
    kept = ledger.hold(torch.zeros(100))
    with pytest.raises(TestbedError, match="board has"):
        ledger.hold(torch.zeros(1))
    ledger.drop(kept)


def test_coordinator_answers_all_requests_despite_several_losses():
    faults = [
        {"kill": name, "when": {"device": name, "begins": "forward", "batch": batch}}
        for name, batch in (("worker1", 1), ("worker3", 3))
    ]
    inference = run_inference(
        distributed_scenario(
            3,
            {"exchange": "direct", **TIMEOUTS},
            {"requests": 6, "model": CNN},
            faults=faults,
        )
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert [
        event["request"] for event in fields_of(inference.outcome, "request")
    ] == list(range(6))
    assert inference.error < 1e-4
