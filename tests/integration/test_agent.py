"""The agent in real processes on loopback: requests, programs, messages, faults. No containers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.ml.data.dataset import Dataset, pack
from testbed.trace.events import Event
from testbed.wire import arrays
from testbed.wire.message import Message, encode
from testbed.wire.token import data_token
from testbed_agent.pacing import LEAD_SECONDS
from testbed_controller.lab.clients import AgentError, AgentGone
from tests.helpers.agents import (
    RUN_TOKEN,
    TOKEN,
    LoopbackDevice,
    make_deployment,
    replace_fields,
)
from tests.helpers.waiting import wait_for


@pytest.fixture(scope="module")
def booted() -> Iterator[list[LoopbackDevice]]:
    devices = [LoopbackDevice("a", 0), LoopbackDevice("b", 1)]
    for device in devices:
        device.boot()
    yield devices
    for device in devices:
        device.kill()


@pytest.fixture
def pair(booted: list[LoopbackDevice]) -> Iterator[list[LoopbackDevice]]:
    """Two agents that run nothing."""
    yield booted
    for device in booted:
        if device.process is None or device.process.poll() is not None:
            device.boot()
        elif device.agent.health()["state"] == "running":
            device.agent.stop()


def run(
    devices: list[LoopbackDevice], do: str, **options: Any
) -> dict[str, list[Event]]:
    """Run a scripted program on all to its end; return each one's events."""
    seen = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        list(
            pool.map(
                lambda device: device.agent.deploy(
                    make_deployment(device, devices, do, **options)
                ),
                devices,
            )
        )
        for device in devices:
            seen[device.name] = int(device.agent.metrics()["testbed_events_total"])
        origin = time.monotonic() + 0.05
        for device in devices:
            device.agent.start(origin)
        events = pool.map(
            lambda device: list(device.agent.events(seen[device.name])), devices
        )
        return dict(zip([device.name for device in devices], events, strict=True))


def start_and_wait(device: LoopbackDevice) -> None:
    """Start what is deployed and return once its program takes messages."""
    after = int(device.agent.metrics()["testbed_events_total"])
    device.agent.start(time.monotonic())
    next(
        event
        for event in device.agent.events(after)
        if event.fields.get("state") == "started"
    )


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.event == name]


def test_programs_exchange_tensors(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "ping", count=5, size=1 << 20)
    states = [event.fields["state"] for event in named(events["a"], "state")]
    assert states == ["up", "started", "finished"]
    assert [event.fields["number"] for event in named(events["a"], "log")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    sends = named(events["a"], "send")
    assert len(sends) == 5
    assert all(
        event.fields["peer"] == "b" and event.fields["bytes"] > 1 << 20
        for event in sends
    )
    receives = named(events["b"], "receive")
    assert [event.fields["message"] for event in receives] == ["ping"] * 5


# Programs


def test_many_messages_arrive_once_and_in_order(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "stream", count=500, size=2000)
    assert named(events["b"], "log")[0].fields["text"] == "received in order"
    assert len(named(events["b"], "receive")) == 500
    sent = [event.fields for event in named(events["a"], "send")]
    left = [fields["start"] + fields["queued"] for fields in sent]
    assert left[-1] > left[0]  # it waited for those before it
    assert sent[-1]["queued"] > 0


@pytest.mark.timed
def test_compute_is_paced_and_says_when_the_host_is_too_slow(
    pair: list[LoopbackDevice],
) -> None:
    events = run(pair[:1], "compute")["a"]
    works = {
        name: [e.fields for e in named(events, "compute") if e.fields["span"] == name]
        for name in ("quick", "late")
    }
    (quick,), (late,) = works["quick"], works["late"]
    assert quick["flops"] == pytest.approx(0.005e9)
    assert quick["duration"] == pytest.approx(0.005) or quick["duration"] > 0.005
    assert quick["deficit"] == 0
    assert late["busy"] >= 0.03
    assert (
        late["duration"] >= late["busy"] - LEAD_SECONDS
    )  # it may begin when the work before it is not yet due
    assert late["deficit"] == pytest.approx(late["busy"] - 0.01)
    assert late["batch"] == 3
    queued = [
        e.fields for e in named(events, "compute") if e.fields["span"] == "queued"
    ]
    assert len(queued) == 20
    assert [e.fields["span"] for e in named(events, "begin")].count("queued") == 20
    assert sorted(work["duration"] for work in queued)[10] == pytest.approx(
        0.01, rel=0.1
    )
    # Lateness of single wake-ups does not add up: twenty times 10 ms end 200 ms after the first began, give or take
    # what a busy host is late by in the end.
    assert (
        0.2 - 1e-6
        <= queued[-1]["start"] + queued[-1]["duration"] - queued[0]["start"]
        < 0.22
    )
    assert [e.fields["text"] for e in named(events, "log")] == ["caught"]
    assert "failing" not in [e.fields["span"] for e in named(events, "compute")]


def test_a_program_that_fails_says_why(pair: list[LoopbackDevice]) -> None:
    events = run(pair[:1], "fail")["a"]
    (state,) = [
        event for event in named(events, "state") if event.fields["state"] == "failed"
    ]
    assert "RuntimeError: this program is broken" in state.fields["error"]
    health = pair[0].agent.health()
    assert health["state"] == "failed"
    assert "this program is broken" in health["error"]
    assert (
        "run_until_complete" in health["error"] or "agent_programs" in health["error"]
    )


def test_a_program_is_stopped(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_forever"))
    after = int(agent.metrics()["testbed_events_total"])
    agent.start(time.monotonic())
    stream = agent.events(after)
    assert next(event for event in stream if event.event == "log").fields["number"] == 0
    agent.stop()
    assert [event.fields.get("state") for event in stream][-1] == "stopped"
    assert agent.health()["state"] == "stopped"
    assert agent.metrics()['testbed_state{state="stopped"}'] == 1


@pytest.mark.timed
def test_a_program_starts_at_the_origin(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_name"))
    after = int(agent.metrics()["testbed_events_total"])
    origin = time.monotonic() + 0.4
    agent.start(origin)
    assert time.monotonic() < origin
    events = {
        event.fields.get("state", event.event): event.time
        for event in agent.events(after)
    }
    assert time.monotonic() >= origin
    assert events["up"] == 0
    assert 0 <= events["started"] < 0.05


@pytest.mark.timed
def test_events_reach_the_reader_at_once(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_forever"))
    after = int(agent.metrics()["testbed_events_total"])
    agent.start(time.monotonic())
    late = []
    for event in agent.events(after):
        if event.event == "log":
            late.append(time.monotonic() - event.fields["at"])
            if len(late) == 40:
                break
    agent.stop()
    assert sorted(late)[len(late) // 2] < 0.003


def test_events_are_read_again_from_any_number(pair: list[LoopbackDevice]) -> None:
    run(pair[:1], "log_name")
    agent = pair[0].agent
    everything = list(agent.events())
    assert list(agent.events(len(everything) - 2)) == everything[-2:]
    assert list(agent.events(len(everything))) == []
    with pytest.raises(AgentError, match="were recorded since the boot"):
        list(agent.events(len(everything) + 1))


def test_shard_data_and_weights(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    deployed = make_deployment(pair[0], pair[:1], "expose")
    agent.deploy(
        replace_fields(
            deployed,
            facts={**json.loads(deployed)["facts"], "samples": {"a": 4, "b": 2}},
        )
    )
    agent.put_shard(
        arrays.pack(
            {"w": torch.zeros(2, 3), "kept": torch.arange(4, dtype=torch.bfloat16)}
        )
    )
    images = np.zeros((6, 1, 2, 2), np.float32)
    dataset = Dataset(
        "tiny", 2, images, np.zeros(6, np.int64), images, np.zeros(6, np.int64)
    )
    agent.put_data(pack(dataset.part(np.array([0, 2, 3, 5]), tests=False)))
    with pytest.raises(AgentError, match="no weights"):
        agent.weights()
    after = int(agent.metrics()["testbed_events_total"])
    agent.start(time.monotonic())
    stream = agent.events(after)
    assert (
        next(event for event in stream if event.event in ("weights", "log")).event
        == "weights"
    )
    log = next(event for event in stream if event.event == "log")
    assert log.fields == {
        "data": "tiny",
        "samples": 4,
        "tests": 0,
        "owned": {"a": 4, "b": 2},
    }
    assert next(event for event in stream if event.event == "compute")
    weights = safetensors.torch.load(agent.weights())
    assert weights["w"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert weights["kept"].dtype == torch.bfloat16
    assert [*safetensors.torch.load(agent.weights(part=True))] == ["w"]
    agent.stop()
    assert safetensors.torch.load(agent.weights())["w"].sum() == 6


def test_casts_are_heard_by_those_they_are_for(pair: list[LoopbackDevice]) -> None:
    third = LoopbackDevice("c", 2)
    third.boot()
    try:
        events = run([*pair, third], "cast", count=3, size=20_000)
    finally:
        third.kill()
    assert named(events["b"], "log")[0].fields["text"] == "received all casts"
    assert named(events["c"], "log")[0].fields["text"] == "end"
    casts = named(events["a"], "cast")
    assert [cast.fields["peers"] for cast in casts] == [["b"]] * 3
    assert all(cast.fields["bytes"] > 20_000 for cast in casts)
    assert [event.fields["peer"] for event in named(events["b"], "receive")] == [
        "a"
    ] * 3


# Peers that are not there


def test_a_send_that_is_given_up_while_the_peer_is_off_is_withdrawn(
    pair: list[LoopbackDevice],
) -> None:
    first, second = pair
    for device in pair:
        device.agent.deploy(make_deployment(device, pair, "withdraw"))
    before, after = (
        int(device.agent.metrics()["testbed_events_total"]) for device in pair
    )
    origin = time.monotonic()
    first.agent.start(origin)
    given_up = next(
        event for event in first.agent.events(before) if event.event == "log"
    )
    assert given_up.time >= 0.3
    second.agent.start(origin)
    assert named(list(second.agent.events(after)), "log")[0].fields["text"] == "kept"


def test_a_message_waits_for_a_program_that_starts_later(
    pair: list[LoopbackDevice],
) -> None:
    first, second = pair
    for device in pair:
        device.agent.deploy(
            make_deployment(device, pair, "stream", count=3, size=100_000)
        )
    after = int(second.agent.metrics()["testbed_events_total"])
    origin = time.monotonic()
    first.agent.start(origin)
    wait_for(lambda: first.agent.metrics().get('testbed_send_queue{peer="b"}') == 3)
    second.agent.start(origin)
    assert (
        named(list(second.agent.events(after)), "log")[0].fields["text"]
        == "received in order"
    )


def test_a_full_inbox_holds_senders_back_and_loses_nothing() -> None:
    devices = [
        LoopbackDevice("a", 3),
        LoopbackDevice("b", 4, {"TESTBED_INBOX_LIMIT": "1000000"}),
    ]
    for device in devices:
        device.boot()
    try:
        for device in devices:
            device.agent.deploy(
                make_deployment(device, devices, "slow_reader", count=60, size=100_000)
            )
            device.agent.start(time.monotonic())
        waiting: dict[str, float] = {}

        def full() -> bool:
            waiting.update(devices[1].agent.metrics())
            return waiting.get("testbed_inbox_bytes", 0) > 800_000

        wait_for(full)
        assert waiting["testbed_inbox_bytes"] <= 1_000_000
        assert waiting["testbed_inbox_messages"] <= 10
        assert waiting["testbed_resident_bytes"] < 100e6, "this program needs no torch"
        events = list(devices[1].agent.events())
        assert named(events, "log")[-1].fields["text"] == "received in order"
    finally:
        for device in devices:
            device.kill()


def test_a_restarted_receiver_takes_up_where_the_sender_is(
    pair: list[LoopbackDevice],
) -> None:
    second = pair[1]
    second.kill()
    second.boot()
    origin = time.monotonic()
    for device in pair:
        device.agent.deploy(make_deployment(device, pair, "persist", count=20))
        device.agent.start(origin)
    before: list[int] = []

    def follow() -> None:
        for event in second.agent.events():
            if event.event == "log":
                before.append(event.fields["number"])
                if event.fields["number"] == 5:
                    second.kill()

    with pytest.raises(AgentGone, match="ended before the program"):
        follow()
    second.boot()
    second.agent.deploy(make_deployment(second, pair, "persist", count=20))
    second.agent.start(origin)
    events = list(second.agent.events())
    after = [event.fields["number"] for event in named(events, "log")]
    assert before == [0, 1, 2, 3, 4, 5]
    assert after[-1] == 19
    assert after == list(range(after[0], 20))
    assert after[0] <= 6 + 1
    assert named(events, "state")[0].time > 0.2


def test_a_restarted_sender_is_heard_again(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "stream", count=50)
    assert len(named(events["b"], "receive")) == 50
    pair[0].kill()
    pair[0].boot()
    events = run(pair, "stream", count=3)
    assert len(named(events["b"], "receive")) == 3


def test_a_paused_peer_is_waited_for(pair: list[LoopbackDevice]) -> None:
    second = pair[1]
    origin = time.monotonic()
    after = int(second.agent.metrics()["testbed_events_total"])
    for device in pair:
        device.agent.deploy(make_deployment(device, pair, "persist", count=10))
    for device in pair:
        device.agent.start(origin)
    time.sleep(0.2)
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    second.process.send_signal(signal.SIGCONT)
    numbers = [
        event.fields["number"]
        for event in named(list(second.agent.events(after)), "log")
    ]
    assert numbers == list(range(10))


def test_more_peers_than_threads_are_served_at_once(pair: list[LoopbackDevice]) -> None:
    """Connections that are kept, and bodies that never end, must not keep others out."""
    peers = [
        pair[1],
        *(LoopbackDevice(f"p{number}", 20 + number) for number in range(20)),
    ]
    pair[1].agent.deploy(make_deployment(pair[1], peers, "log_forever"))
    start_and_wait(pair[1])
    with contextlib.ExitStack() as links:
        for number in range(20):
            link = links.enter_context(
                socket.create_connection((pair[1].host, 8701), timeout=2)
            )
            body = encode(Message("hello", padding=10_000), f"p{number}", 1)
            way = data_token(RUN_TOKEN, f"p{number}", "b")
            request = (
                head("POST", "/messages", f"Content-Length: {len(body)}", token=way)
                + body
            )
            link.sendall(request[:-1] if number % 2 else request)
            if number % 2 == 0:
                assert b" 204 " in link.recv(1000)
    pair[1].agent.stop()


@pytest.mark.parametrize(
    "token",
    ["", "Bearer wrong", None],
    ids=["half a head", "refused", "half a message"],
)
def test_connections_that_send_no_more_keep_no_peer_waiting(
    pair: list[LoopbackDevice], token: str | None
) -> None:
    run(pair, "log_name")
    begun = (
        head(
            "POST",
            "/messages",
            "Content-Length: 100",
            token=TO_A if token is None else token,
        )
        + b"x"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            link = stack.enter_context(socket.create_connection((pair[0].host, 8701)))
            link.sendall(begun[:40] if token == "" else begun)
        time.sleep(0.2)
        began = time.monotonic()
        assert len(named(run(pair, "ping", count=2)["a"], "receive")) == 2
        assert time.monotonic() - began < 5


def test_who_keeps_more_than_its_quota_is_ended(tmp_path: Path) -> None:
    device = LoopbackDevice(
        "a", 7, {"TESTBED_DISK": str(tmp_path), "TESTBED_DISK_LIMIT": str(1 << 20)}
    )
    device.boot()
    try:
        events = run([device], "fill_disk", size=2 << 20)["a"]
        assert named(events, "state")[-1].fields["state"] == "failed"
        assert (
            f"{tmp_path} of a holds 2MiB, above its quota of 1MiB"
            in device.agent.health()["error"]
        )
    finally:
        device.kill()


def test_a_message_too_large_for_any_device_is_refused_where_it_is_sent() -> None:
    device = LoopbackDevice("a", 6)
    device.boot()
    try:
        device.agent.deploy(
            make_deployment(
                device,
                [device, LoopbackDevice("b", 8)],
                "stream",
                memory=4e6,
                size=3_000_000,
            )
        )
        device.agent.start(time.monotonic())
        states = named(list(device.agent.events()), "state")
        assert (
            states[-1]
            .fields["error"]
            .startswith("a message of 3 MB from a to b is too large")
        )
    finally:
        device.kill()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"loss", "JSON such as"),
        (b"[]", "must be an object with the keys"),
        (
            b'{"message_loss": {"a": 0.5}, "delay": 1}',
            "must be an object with the keys",
        ),
        (b'{"message_loss": 0.5}', "must be a mapping from device to fraction"),
        (b'{"message_loss": {"z": 0.5}}', "unknown peer 'z'"),
        (b'{"message_loss": {"a": 1.5}}', "from 0 to 1"),
        (b'{"message_loss": {"a": true}}', "from 0 to 1"),
    ],
)
def test_links_that_cannot_be(
    pair: list[LoopbackDevice], body: bytes, complaint: str
) -> None:
    pair[1].agent.deploy(make_deployment(pair[1], pair, "log_name"))
    refused = ask(pair[1], "PUT", "/links", data=body)
    assert refused.status_code == 400
    assert complaint in refused.json()["error"]
    pair[1].agent.set_links({"a": 0.5}, {})


# Requests that are refused

TO_A = data_token(RUN_TOKEN, "b", "a")
"""What the messages from b to a bear."""


def ask(
    device: LoopbackDevice,
    method: str,
    path: str,
    port: int = 8700,
    token: str = TOKEN,
    **options: Any,
) -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
    return requests.request(
        method,
        f"http://{device.host}:{port}{path}",
        headers=headers,
        timeout=10,
        **options,
    )


@pytest.mark.parametrize(
    "header",
    ["", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer  " + TOKEN, "Bearer \xff"],
)
@pytest.mark.parametrize(
    ("port", "method", "path"),
    [
        (8700, "GET", "/facts"),
        (8700, "PUT", "/deployment"),
        (8700, "GET", "/nowhere"),
        (8700, "POST", "/messages"),
    ],
)
def test_without_the_token(
    pair: list[LoopbackDevice], port: int, method: str, path: str, header: str
) -> None:
    response = ask(
        pair[0],
        method,
        path,
        port,
        headers={"Authorization": header.encode("latin-1")},
        data=b"x",
    )
    assert response.status_code == 401
    assert "token" in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/deployment", 405),
        ("DELETE", "/health", 405),
        ("POST", "/start/", 404),
    ],
)
def test_unknown_requests(
    pair: list[LoopbackDevice], method: str, path: str, status: int
) -> None:
    response = ask(pair[0], method, path)
    assert (response.status_code, "error" in response.json()) == (status, True)


def test_the_data_port_takes_messages_only(pair: list[LoopbackDevice]) -> None:
    assert ask(pair[0], "GET", "/messages", 8701).status_code == 405
    assert ask(pair[0], "POST", "/other", 8701, data=b"").status_code == 404
    assert ask(pair[0], "GET", "/health", 8701).status_code == 404


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"", "JSON"), (b"{", "JSON"), (b"[]", "version"), (b"\xff\xfe", "JSON"), (b"{}", "version"),
        (b"[" * 100_000, "JSON"), (b'{"version": 1, "run": 3}', "run"),
    ],
)  # fmt: skip
def test_malformed_deployments(
    pair: list[LoopbackDevice], body: bytes, wrong: str
) -> None:
    response = ask(pair[0], "PUT", "/deployment", data=body)
    assert response.status_code == 400
    assert wrong.lower() in response.json()["error"].lower()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"run": "another"}, "this is device 'a' of run 'test-run'"),
        ({"device": "b"}, "not 'b'"),
        (
            {"peers": {"b": {"address": "nowhere:x", "sent": "s", "received": "r"}}},
            "must be an address",
        ),
        ({"peers": {"b": "10.0.0.3"}}, "peers.b"),
        ({"more": 1}, "more"),
        ({"plan": {}}, "plan"),
        ({"version": 2}, "reads version 1 of the schema, not 2"),
        ({"devices": {"elsewhere": 0}}, "device: unknown name 'a'"),
        ({"links": []}, "'b' needs links in both directions"),
        ({"links": [["a", "b", 7]]}, "a link refers to an unknown specification"),
    ],
)
def test_deployments_that_do_not_fit(
    pair: list[LoopbackDevice], change: dict[str, Any], wrong: str
) -> None:
    response = ask(
        pair[0],
        "PUT",
        "/deployment",
        data=replace_fields(make_deployment(pair[0], pair, "log_name"), **change),
    )
    assert response.status_code == 400
    assert wrong in response.json()["error"]


def test_a_deployment_whose_workload_is_wrong(pair: list[LoopbackDevice]) -> None:
    document = make_deployment(pair[0], pair, "log_name")
    for key, value, wrong in (
        ("method", {"name": "no-such-method"}, "no-such-method"),
        ("model", {"name": "no-such-model"}, "no-such-model"),
        ("steps", 0, "steps"),
        ("method", {"name": "scripted", "unknown": 1}, "unknown"),
    ):
        workload = json.loads(document)["workload"] | {key: value}
        response = ask(
            pair[0],
            "PUT",
            "/deployment",
            data=replace_fields(document, workload=workload),
        )
        assert response.status_code == 400
        assert wrong in response.json()["error"]


def test_requests_out_of_order() -> None:
    device = LoopbackDevice("a", 5)
    device.boot()
    try:
        for method, path, body in (
            ("POST", "/start", b'{"origin": 1}'), ("PUT", "/data", b"x"), ("PUT", "/shard", b"x"),
            ("POST", "/stop", b""), ("GET", "/weights", None),
        ):  # fmt: skip
            response = ask(device, method, path, data=body)
            assert (response.status_code, path) == (409, path)
        assert (
            ask(
                device, "POST", "/messages", 8701, data=encode(Message("early"), "b")
            ).status_code
            == 503
        )
        device.agent.deploy(make_deployment(device, [device], "log_forever"))
        device.agent.start(time.monotonic())
        for method, path, body in (
            ("POST", "/start", b'{"origin": 1}'), ("PUT", "/data", b"x"), ("PUT", "/shard", b"x"),
            ("PUT", "/deployment", b"x"),
        ):  # fmt: skip
            response = ask(device, method, path, data=body)
            assert (response.status_code, path) == (409, path)
            assert (
                "running" in response.json()["error"]
                or "runs" in response.json()["error"]
            )
        device.agent.stop()
        device.agent.stop()
        device.agent.deploy(make_deployment(device, [device], "log_name"))
        assert device.agent.health()["state"] == "ready"
        for wrong in (
            b"log_name",
            b"[]",
            b'{"origin": "1"}',
            b'{"origin": true}',
            b'{"origin": NaN}',
            b'{"origin": 1e400}',
        ):
            assert ask(device, "POST", "/start", data=wrong).status_code == 400
        for path in ("/data", "/shard"):
            assert ask(device, "PUT", path, data=b"no tensors").status_code == 400
        assert ask(device, "GET", "/events?after=-1").status_code == 400
        assert ask(device, "GET", "/events?after=9999").status_code == 409
        assert device.agent.health()["state"] == "ready"
    finally:
        device.kill()


def raw(device: LoopbackDevice, port: int, request: bytes) -> bytes:
    """Send bytes, say that there are no more, and return whatever comes back."""
    with socket.create_connection((device.host, port), timeout=10) as link:
        with contextlib.suppress(
            OSError
        ):  # the answer may come, and the connection go, before all is sent
            link.sendall(request)
            link.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := link.recv(65536):
                answer += piece
    return answer


def head(method: str, path: str, *headers: str, token: str = TOKEN) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: agent",
        f"Authorization: Bearer {token}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_oversized_bodies_are_refused_before_they_are_read(
    pair: list[LoopbackDevice],
) -> None:
    run(pair, "log_name")
    resident = pair[0].agent.metrics()["testbed_resident_bytes"]
    for port, method, path, size in (
        (8700, "PUT", "/deployment", 49 << 20), (8700, "PUT", "/deployment", 10**15),
        (8701, "POST", "/messages", 10**15), (8700, "POST", "/start", 5000), (8701, "POST", "/messages", 1 << 30),
    ):  # fmt: skip
        token = TO_A if port == 8701 else TOKEN
        answer = raw(
            pair[0],
            port,
            head(method, path, f"Content-Length: {size}", token=token) + b"x" * 1000,
        )
        assert b"413" in answer.split(b"\r\n")[0], (path, answer)
        assert b"error" in answer
    # Nor is what comes without the token, whatever it says of its length.
    for port, request in ((8700, b"PUT /data"), (8701, b"POST /messages")):
        answer = raw(
            pair[0],
            port,
            request
            + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000\r\n\r\nxxx",
        )
        assert b"401" in answer.split(b"\r\n")[0]
    assert pair[0].agent.metrics()["testbed_resident_bytes"] < resident + 20e6


def test_bodies_of_unknown_or_wrong_length(pair: list[LoopbackDevice]) -> None:
    run(pair, "log_name")
    for port, method, path, token in (
        (8700, "PUT", "/deployment", TOKEN),
        (8701, "POST", "/messages", TO_A),
    ):
        begin = partial(head, method, path, token=token)
        chunked = raw(
            pair[0],
            port,
            begin("Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n",
        )
        assert b"411" in chunked.split(b"\r\n")[0]
        short = raw(pair[0], port, begin("Content-Length: 100") + b"only this")
        assert b"400" in short.split(b"\r\n")[0]
        assert b"after 9 of 100" in short
        assert (
            b" 4" in raw(pair[0], port, begin("Content-Length: -5")).split(b"\r\n")[0]
        )


def test_messages_of_strangers_and_garbage(pair: list[LoopbackDevice]) -> None:
    run(
        pair, "log_name"
    )  # a program that ended well: its device still takes messages in
    post = partial(ask, pair[0], "POST", "/messages", 8701)
    assert post(TO_A, data=encode(Message("hello"), "b", 2**62)).status_code == 204
    stranger = post(TO_A, data=encode(Message("hello"), "mallory"))
    assert stranger.status_code == 403
    assert "'b' must not send as 'mallory'" in stranger.json()["error"]
    for token in (TOKEN, RUN_TOKEN, data_token(RUN_TOKEN, "a", "b"), ""):
        assert post(token, data=encode(Message("hello"), "b", 2**62)).status_code == 401
    assert post(TO_A, data=b"garbage").status_code == 400
    assert pair[0].agent.metrics()["testbed_inbox_bytes"] == 0


def test_repeated_messages_are_dropped(pair: list[LoopbackDevice]) -> None:
    after = int(pair[1].agent.metrics()["testbed_events_total"])
    pair[1].agent.deploy(make_deployment(pair[1], pair, "persist", count=1))
    start_and_wait(pair[1])
    for incarnation, sequence, number in (
        (5, 0, 7),
        (5, 0, 8),
        (4, 9, 9),
        (5, 1, 10),
        (6, 0, 11),
        (6, 0, 0),
        (7, 0, 0),
    ):
        body = encode(Message("number", {"number": number}), "a", incarnation, sequence)
        way = data_token(RUN_TOKEN, "a", "b")
        assert (
            ask(pair[1], "POST", "/messages", 8701, way, data=body).status_code == 204
        )
    numbers = [
        event.fields["number"]
        for event in named(list(pair[1].agent.events(after)), "log")
    ]
    assert numbers == [7, 10, 11, 0]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    port=st.sampled_from([8700, 8701]),
    start=st.sampled_from([
        b"", head("POST", "/messages", "Content-Length: 30"), head("PUT", "/deployment", "Content-Length: 30"),
        head("PUT", "/data", "Content-Length: 30"), head("POST", "/start", "Content-Length: 30"),
        b"GET /events?after=", b"PUT /deployment HTTP/1.1\r\n",
    ]),
    rest=st.binary(max_size=60),
)  # fmt: skip
def test_the_agent_outlives_arbitrary_bytes(
    pair: list[LoopbackDevice], port: int, start: bytes, rest: bytes
) -> None:
    answer = raw(pair[0], port, start + rest)
    # 503: a message before any program runs, where this is the first test on these devices.
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503")), answer


def test_the_agent_still_lives(pair: list[LoopbackDevice]) -> None:
    assert len(named(run(pair, "ping", count=2)["a"], "send")) == 2


# What it costs


def test_ten_thousand_messages_leave_nothing_behind(pair: list[LoopbackDevice]) -> None:
    run(pair, "ping", count=500, size=1000)
    before = [device.agent.metrics()["testbed_resident_bytes"] for device in pair]
    events = run(pair, "ping", count=5000, size=1000)
    assert len(named(events["b"], "receive")) == 5000
    for device, resident in zip(pair, before, strict=True):
        # Its events stay, compressed, for whoever asks for them again; ten thousand messages of 1 kB would be 10 MB.
        assert device.agent.metrics()["testbed_resident_bytes"] - resident < 3e6


def test_an_idle_agent_has_imported_nothing_that_it_does_not_need_yet() -> None:
    late = ["torch", "pydantic", "numpy", "requests", "flask"]
    late += [
        "email",
        "importlib.metadata",
        "zipfile",
        "asyncio",
        "ssl",
        "hashlib",
        "ctypes",
    ]
    program = f"import sys, testbed_agent.__main__; print([name for name in {late} if name in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({"TESTBED_TOKEN": ""}, "set TESTBED_TOKEN"),
        (
            {"TESTBED_DATA_ADDRESS": "here"},
            "TESTBED_DATA_ADDRESS: 'here' must be an address",
        ),
        (
            {"TESTBED_INBOX_LIMIT": "1MB"},
            "TESTBED_INBOX_LIMIT: must be a number of bytes",
        ),
    ],
)
def test_an_environment_that_cannot_be_used(
    environment: dict[str, str], wrong: str
) -> None:
    given = {
        "TESTBED_RUN": "r",
        "TESTBED_DEVICE": "d",
        "TESTBED_TOKEN": "t",
    } | environment
    result = subprocess.run(
        [sys.executable, "-m", "testbed_agent"],
        env=os.environ | given,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert wrong in result.stderr
    assert "Traceback" not in result.stderr


def test_nobody_there() -> None:
    with pytest.raises(AgentGone, match="GET /health: the agent does not respond"):
        LoopbackDevice("nobody", 9).agent.health()
