"""How fully distributed inference runs on the virtual clock: memory, losses, overlap, time."""

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


def test_each_of_n_devices_holds_an_nth_of_the_weights():
    model = {"name": "mlp", "hidden": [240, 480, 240]}
    for devices in (3, 5, 6, 7):
        found = run_inference(
            distributed_scenario(devices - 1, {"scheme": "fuse"}, {"model": model})
        )
        whole = sum(tensor.nbytes for tensor in found.weights.values())
        for device, fields in events_of(found.outcome, "memory"):
            assert fields["weights"] == pytest.approx(whole / devices, rel=0.1), device


@pytest.mark.parametrize("given", [True, False])
def test_devices_have_the_same_weights_drawn_or_given(given):

    model = create("vgg5", {}, (3, 8, 8), 10)
    found = run_inference(distributed_scenario(3, {"tiled_layers": None}), model)
    whole = model.build(0, len(model.units), 5).state_dict()
    for index in range(4):
        held = stored_layers(found.flow, index)
        drawn = draw_tensors(model, held, 5)
        sliced = {
            name: tensor
            for one in held
            for name, tensor in cut_tensors(*one, whole).items()
        }
        assert drawn.keys() == sliced.keys()
        assert all(drawn[name].equal(sliced[name]) for name in drawn)
    if given:
        again = run_inference(
            distributed_scenario(
                3, {"tiled_layers": None}, network={"link": {"rate": "1gbit"}}
            ),
            model,
            weights=whole,
        )
        assert again.error < 1e-4


def test_a_device_without_enough_memory_is_refused_before_it_fails():
    with pytest.raises(InputError, match="memory"):
        run_inference(
            distributed_scenario(
                2,
                devices={
                    "source": {"speed": "1gflops", "memory": "0.5kB"},
                    "w": {"speed": "1gflops", "count": 2},
                },
            )
        )


KILL = {
    "kill": "worker2",
    "when": {"device": "worker2", "begins": "forward", "batch": 1},
}
CALM = {"stall_timeout": "500ms", "rejoin_timeout": "1s"}


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_a_request_is_finished_by_the_other_devices_where_the_scenario_says_so(
    exchange,
):
    method = {"exchange": exchange, "on_loss": "replan", **CALM}
    found = run_inference(
        distributed_scenario(3, method, {"requests": 4, "model": CNN}, faults=[KILL])
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert [event["request"] for event in fields_of(found.outcome, "request")] == [
        0,
        1,
        2,
        3,
    ]
    assert found.error < 1e-4
    after = [
        event.device
        for event in found.outcome.events
        if event.event == "begin" and event.fields.get("batch") == 3
    ]
    assert {*after} == {"source", "worker1", "worker3"}


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_a_request_fails_clearly_where_the_scenario_says_so_and_the_next_one_works(
    exchange,
):
    method = {"exchange": exchange, "on_loss": "fail", **CALM}
    found = run_inference(
        distributed_scenario(3, method, {"requests": 4, "model": CNN}, faults=[KILL])
    )
    assert found.outcome.status == "finished", found.outcome.error
    (failed,) = fields_of(found.outcome, "failed")
    assert failed["request"] == 1
    assert failed["error"].startswith("worker2 was lost during the inference")
    assert [event["request"] for event in fields_of(found.outcome, "request")] == [
        0,
        2,
        3,
    ]
    assert metrics(found.outcome, found.experiment, found.plan)["requests_failed"] == 1


def test_several_requests_under_way_are_done_sooner_and_never_more_than_asked_for():
    ends, outputs = {}, {}
    for in_flight in (1, 3):
        method = {
            "scheme": "lop",
            "exchange": "direct",
            "in_flight": in_flight,
            "chunks": 1,
        }
        network = {"link": {"rate": "10mbit", "delay": "10us"}}
        found = run_inference(
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
            for event in fields_of(found.outcome, "compute")
            if event.get("batch") is not None
        ]
        life = {
            batch: (
                min(s for s, _, b in spans if b == batch),
                max(e for _, e, b in spans if b == batch),
            )
            for batch in range(8)
        }
        most = max(
            sum(begin <= at < end for begin, end in life.values())
            for at, _ in life.values()
        )
        assert most == in_flight
        times = [
            event.time for event in found.outcome.events if event.event == "request"
        ]
        ends[in_flight] = times[-1] - times[0]
        outputs[in_flight] = found.error
    assert ends[3] < 0.8 * ends[1]
    assert max(outputs.values()) < 1e-4


def test_two_runs_are_alike_to_the_last_byte():
    spec = distributed_scenario(
        4, {"exchange": "direct", "in_flight": 2}, {"model": CNN, "requests": 4}
    )
    one, other = (run_inference(spec) for _ in range(2))
    assert [event.to_json() for event in one.outcome.events] == [
        event.to_json() for event in other.outcome.events
    ]
    assert one.outputs.equal(other.outputs)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
def test_parts_are_sent_while_the_next_are_computed(exchange):
    model = {"name": "cnn", "channels": [32, 32, 32], "hidden": [64]}
    method = {"scheme": "lop", "exchange": exchange, "min_chunk_bytes": 256}
    found = run_inference(
        distributed_scenario(
            2, method, {"model": model, "requests": 1, "batch_size": 8}
        )
    )
    computing, sending = defaultdict(list), defaultdict(list)
    for device, fields in events_of(found.outcome, "compute", "send"):
        span = (fields["start"], fields["start"] + fields["duration"])
        (computing if "span" in fields else sending)[device].append(span)
    for device in ("worker1", "worker2"):
        apart = total(computing[device]), total(sending[device])
        assert sum(apart) - total([*computing[device], *sending[device]]) > 0.5 * min(
            apart
        )


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
def test_layer_by_layer_nothing_is_sent_while_the_same_device_computes(scheme):
    model = {"name": "mlp", "hidden": [512, 256, 512, 256, 512]}
    board = {"speed": "100mflops", "uplink": "20mbit", "downlink": "20mbit"}
    keys = {
        "network": {"link": {"delay": "1ms"}},
        "devices": {"source": board, "worker": {**board, "count": 4}},
    }
    method = {"scheme": scheme, "min_chunk_bytes": 256, "layerwise": True}
    found = run_inference(
        distributed_scenario(
            4, method, {"model": model, "requests": 1, "batch_size": 40}, **keys
        )
    )
    assert found.error < 1e-4
    (request,) = fields_of(found.outcome, "request")
    assert request["latency"] == pytest.approx(found.plan.step_time, rel=0.05)
    spans = defaultdict(list)
    for device, fields in events_of(found.outcome, "compute", "send"):
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


def test_schemes_rank_by_run_time_as_by_communication():
    model = {"name": "mlp", "hidden": [512, 64, 512, 64, 512]}
    times, sent = {}, {}
    for scheme in ("lop", "lip", "fuse"):
        method = {"scheme": scheme, "shares": "equal"}
        keys = {"network": {"link": {"rate": "1gbit"}}, "speed": "10gflops"}
        keys["devices"] = {
            "source": {"speed": "10gflops", "uplink": "10mbit", "downlink": "10mbit"}
        }
        keys["devices"]["worker"] = {**keys["devices"]["source"], "count": 5}
        found = run_inference(
            distributed_scenario(
                5, method, {"model": model, "requests": 1, "batch_size": 32}, **keys
            )
        )
        times[scheme] = fields_of(found.outcome, "request")[0]["latency"]
        sent[scheme] = sent_elements(all_transfers(found.flow))
    assert sorted(times, key=times.__getitem__) == sorted(sent, key=sent.__getitem__)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", ["lop", "fuse"])
def test_an_inference_takes_less_than_computing_and_sending_in_turn(scheme, exchange):
    model = {"name": "mlp", "hidden": [512, 256, 512, 256, 512]}
    board = {"speed": "100mflops", "uplink": "20mbit", "downlink": "20mbit"}
    keys = {
        "network": {"link": {"delay": "1ms"}},
        "devices": {"source": board, "worker": {**board, "count": 5}},
    }
    method = {"scheme": scheme, "exchange": exchange, "min_chunk_bytes": 4096}
    found = run_inference(
        distributed_scenario(
            5, method, {"model": model, "requests": 1, "batch_size": 40}, **keys
        )
    )
    (request,) = fields_of(found.outcome, "request")
    apart = make_phases(found.flow, found.experiment.devices, found.experiment.links)
    assert found.plan.step_time == predict_latency(apart)
    # Through the source in two legs: each at most as long as the two that overlap.
    legs = 2 if exchange == "via-source" else 1
    in_turn = sum(phase.compute + legs * (phase.network + 0.001) for phase in apart)
    # The prediction leaves out that a layer begins on the first chunks of the one before.
    assert 0.9 * predict_latency(apart) < request["latency"] < in_turn
    # What everything waited for was one of the two at every instant, and nothing beats the busiest link.
    figures = metrics(found.outcome, found.experiment, found.plan)
    assert figures["path_compute"] + figures["path_network"] == pytest.approx(
        request["latency"], rel=0.01
    )
    assert (
        1
        <= figures["over_bound"]
        < request["latency"] / max(phase.network for phase in apart)
    )
    assert figures["devices"]["source"]["weights"] == 4 * count_parameters(
        found.flow, 0
    )


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("scheme", ["lop", "lip", "optimal"])
def test_faster_devices_take_larger_shares_of_the_same_result(scheme, exchange):
    devices = {
        "source": {"speed": "20mflops"},
        "slow": {"speed": "7mflops"},
        "fast": {"speed": "53mflops", "count": 2},
    }
    method = {"scheme": scheme, "exchange": exchange, "source": "slow"}
    found = run_inference(
        distributed_scenario(3, method, {"model": CNN}, devices=devices)
    )
    assert found.error < 1e-4
    work = {
        name: figures["flops"] for name, figures in metrics_of(found)["devices"].items()
    }
    assert work["fast1"] > 1.5 * work["slow"]


def metrics_of(found):
    return metrics(found.outcome, found.experiment, found.plan)


def test_a_device_that_holds_more_than_its_memory_fails():
    ledger = Ledger("board", 1000)
    ledger.weights = 600
    kept = ledger.hold(torch.zeros(100))
    with pytest.raises(TestbedError, match="board has"):
        ledger.hold(torch.zeros(1))
    ledger.drop(kept)


def test_the_lead_answers_again_after_each_of_several_losses():
    faults = [
        {"kill": name, "when": {"device": name, "begins": "forward", "batch": batch}}
        for name, batch in (("worker1", 1), ("worker3", 3))
    ]
    found = run_inference(
        distributed_scenario(
            3,
            {"exchange": "direct", **CALM},
            {"requests": 6, "model": CNN},
            faults=faults,
        )
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert [event["request"] for event in fields_of(found.outcome, "request")] == list(
        range(6)
    )
    assert found.error < 1e-4
