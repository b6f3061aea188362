"""The agent in processes on loopback addresses, without containers: requests, programs, messages and failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
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
    """Two agents without a running program, which a test may kill."""
    yield booted
    for device in booted:
        if device.process is None or device.process.poll() is not None:
            device.boot()
        elif device.agent.health()["state"] == "running":
            device.agent.stop()


def count_events(device: LoopbackDevice) -> int:
    """Return the number of events since the boot, after which a reader sees only new ones."""
    return int(device.agent.metrics()["testbed_events_total"])


def run(
    devices: list[LoopbackDevice], program: str, **options: Any
) -> dict[str, list[Event]]:
    """Run a program of `agent_programs` on all devices, and return the events of each device."""

    def deploy(device: LoopbackDevice) -> None:
        device.agent.deploy(make_deployment(device, devices, program, **options))

    def read_events(device: LoopbackDevice) -> list[Event]:
        return list(device.agent.events(earlier[device.name]))

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(deploy, devices))
        earlier = {device.name: count_events(device) for device in devices}
        # All programs start at one instant, a little ahead of the requests.
        origin = time.monotonic() + 0.05
        for device in devices:
            device.agent.start(origin)
        events = pool.map(read_events, devices)
        return dict(zip(earlier, events, strict=True))


def start_and_wait(device: LoopbackDevice) -> None:
    """Start the deployed program and wait until messages can be received."""
    earlier = count_events(device)
    device.agent.start(time.monotonic())
    for event in device.agent.events(earlier):
        if event.fields.get("state") == "started":
            return


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.event == name]


def field_of(events: list[Event], name: str, field: str) -> list[Any]:
    """Return one field of all events with a name."""
    return [event.fields[field] for event in named(events, name)]


def test_programs_exchange_tensors(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "ping", count=5, size=1 << 20)
    assert field_of(events["a"], "state", "state") == ["up", "started", "finished"]
    assert field_of(events["a"], "log", "number") == [0, 1, 2, 3, 4]
    sends = named(events["a"], "send")
    assert len(sends) == 5
    for send in sends:
        assert send.fields["peer"] == "b"
        assert send.fields["bytes"] > 1 << 20
    receives = named(events["b"], "receive")
    assert [event.fields["message"] for event in receives] == ["ping"] * 5


# Programs


def test_many_messages_arrive_once_and_in_order(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "stream", count=500, size=2000)
    assert named(events["b"], "log")[0].fields["text"] == "received in order"
    assert len(named(events["b"], "receive")) == 500
    sent = [event.fields for event in named(events["a"], "send")]
    left = [fields["start"] + fields["queued"] for fields in sent]
    # The last message waits for all earlier ones.
    assert left[-1] > left[0]
    assert sent[-1]["queued"] > 0


@pytest.mark.timed
def test_computation_is_paced_and_reports_deficit_of_slow_host(
    pair: list[LoopbackDevice],
) -> None:
    events = run(pair[:1], "compute")["a"]
    works: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in named(events, "compute"):
        works[event.fields["span"]].append(dict(event.fields))
    (quick,), (late,), queued = works["quick"], works["late"], works["queued"]
    # Charged for 5 ms at a speed of 1 GFLOP/s.
    assert quick["flops"] == pytest.approx(0.005e9)
    assert quick["duration"] == pytest.approx(0.005) or quick["duration"] > 0.005
    assert quick["deficit"] == 0
    assert late["busy"] >= 0.03
    # A computation may start up to LEAD_SECONDS before the one before it is due to end.
    assert late["duration"] >= late["busy"] - LEAD_SECONDS
    assert late["deficit"] == pytest.approx(late["busy"] - 0.01)
    assert late["batch"] == 3
    assert len(queued) == 20
    assert field_of(events, "begin", "span").count("queued") == 20
    durations = sorted(work["duration"] for work in queued)
    assert durations[10] == pytest.approx(0.01, rel=0.1)
    # Delays of single wake-ups do not accumulate: 20 computations of 10 ms end after 200 ms, or later by the delay of
    # the last wake-up on a busy host.
    end = queued[-1]["start"] + queued[-1]["duration"]
    assert 0.2 - 1e-6 <= end - queued[0]["start"] < 0.22
    assert field_of(events, "log", "text") == ["caught"]
    assert "failing" not in works


def test_failed_program_reports_its_error(pair: list[LoopbackDevice]) -> None:
    events = run(pair[:1], "fail")["a"]
    assert field_of(events, "state", "state").count("failed") == 1
    failure = next(
        event for event in named(events, "state") if event.fields["state"] == "failed"
    )
    assert "RuntimeError: this program is broken" in failure.fields["error"]
    health = pair[0].agent.health()
    assert health["state"] == "failed"
    error = health["error"]
    assert "this program is broken" in error
    # The traceback names a frame of the event loop or of the program.
    assert "run_until_complete" in error or "agent_programs" in error


def test_running_program_is_stopped(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_forever"))
    after = count_events(pair[0])
    agent.start(time.monotonic())
    stream = agent.events(after)
    assert next(event for event in stream if event.event == "log").fields["number"] == 0
    agent.stop()
    assert [event.fields.get("state") for event in stream][-1] == "stopped"
    assert agent.health()["state"] == "stopped"
    assert agent.metrics()['testbed_state{state="stopped"}'] == 1


@pytest.mark.timed
def test_program_starts_at_origin(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_name"))
    after = count_events(pair[0])
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
def test_events_reach_reader_without_delay(pair: list[LoopbackDevice]) -> None:
    agent = pair[0].agent
    agent.deploy(make_deployment(pair[0], pair[:1], "log_forever"))
    after = count_events(pair[0])
    agent.start(time.monotonic())
    delays: list[float] = []
    for event in agent.events(after):
        if event.event == "log":
            delays.append(time.monotonic() - event.fields["at"])
            if len(delays) == 40:
                break
    agent.stop()
    assert sorted(delays)[len(delays) // 2] < 0.003


def test_events_can_be_read_again_from_any_number(pair: list[LoopbackDevice]) -> None:
    run(pair[:1], "log_name")
    agent = pair[0].agent
    everything = list(agent.events())
    assert list(agent.events(len(everything) - 2)) == everything[-2:]
    assert list(agent.events(len(everything))) == []
    with pytest.raises(AgentError, match="were recorded since the boot"):
        list(agent.events(len(everything) + 1))


def test_program_receives_shard_and_data_and_exposes_weights(
    pair: list[LoopbackDevice],
) -> None:
    agent = pair[0].agent
    body = make_deployment(pair[0], pair[:1], "expose")
    facts = {**json.loads(body)["facts"], "samples": {"a": 4, "b": 2}}
    agent.deploy(replace_fields(body, facts=facts))
    unchanged = torch.arange(4, dtype=torch.bfloat16)
    agent.put_shard(arrays.pack({"w": torch.zeros(2, 3), "kept": unchanged}))
    images, labels = np.zeros((6, 1, 2, 2), np.float32), np.zeros(6, np.int64)
    dataset = Dataset("tiny", 2, images, labels, images, labels)
    agent.put_data(pack(dataset.part(np.array([0, 2, 3, 5]), tests=False)))
    with pytest.raises(AgentError, match="no weights"):
        agent.weights()
    after = count_events(pair[0])
    agent.start(time.monotonic())
    stream = agent.events(after)
    first = next(event for event in stream if event.event in ("weights", "log"))
    assert first.event == "weights"
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


def test_casts_reach_only_their_receivers(pair: list[LoopbackDevice]) -> None:
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
    assert field_of(events["b"], "receive", "peer") == ["a"] * 3


# Absent peers


def test_cancelled_message_to_absent_peer_is_withdrawn(
    pair: list[LoopbackDevice],
) -> None:
    first, second = pair
    for device in pair:
        device.agent.deploy(make_deployment(device, pair, "withdraw"))
    earlier_first, earlier_second = count_events(first), count_events(second)
    origin = time.monotonic()
    first.agent.start(origin)
    stream = first.agent.events(earlier_first)
    cancellation = next(event for event in stream if event.event == "log")
    # The program cancels the message after 0.3 s.
    assert cancellation.time >= 0.3
    second.agent.start(origin)
    events = list(second.agent.events(earlier_second))
    assert field_of(events, "log", "text")[0] == "kept"


def test_messages_wait_for_program_that_starts_later(
    pair: list[LoopbackDevice],
) -> None:
    first, second = pair
    for device in pair:
        device.agent.deploy(
            make_deployment(device, pair, "stream", count=3, size=100_000)
        )
    after = count_events(second)
    origin = time.monotonic()
    first.agent.start(origin)
    wait_for(lambda: first.agent.metrics().get('testbed_send_queue{peer="b"}') == 3)
    second.agent.start(origin)
    events = list(second.agent.events(after))
    assert field_of(events, "log", "text")[0] == "received in order"


def test_full_inbox_delays_senders_without_loss() -> None:
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
        metrics: dict[str, float] = {}

        def inbox_is_full() -> bool:
            metrics.update(devices[1].agent.metrics())
            return metrics.get("testbed_inbox_bytes", 0) > 800_000

        wait_for(inbox_is_full)
        # The limit of 1 MB admits 10 messages of 100 kB.
        assert metrics["testbed_inbox_bytes"] <= 1_000_000
        assert metrics["testbed_inbox_messages"] <= 10
        assert metrics["testbed_resident_bytes"] < 100e6, "torch has been imported"
        events = list(devices[1].agent.events())
        assert named(events, "log")[-1].fields["text"] == "received in order"
    finally:
        for device in devices:
            device.kill()


def test_restarted_receiver_continues_with_current_message(
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

    def read_until_killed() -> None:
        for event in second.agent.events():
            if event.event == "log":
                before.append(event.fields["number"])
                if event.fields["number"] == 5:
                    second.kill()

    with pytest.raises(AgentGone, match="ended before the program"):
        read_until_killed()
    second.boot()
    second.agent.deploy(make_deployment(second, pair, "persist", count=20))
    second.agent.start(origin)
    events = list(second.agent.events())
    after = [event.fields["number"] for event in named(events, "log")]
    assert before == [0, 1, 2, 3, 4, 5]
    assert after[-1] == 19
    # Without a gap; only message 6, under way during the kill, may be lost.
    assert after == list(range(after[0], 20))
    assert after[0] <= 6 + 1
    assert named(events, "state")[0].time > 0.2


def test_messages_of_restarted_sender_are_received(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "stream", count=50)
    assert len(named(events["b"], "receive")) == 50
    pair[0].kill()
    pair[0].boot()
    events = run(pair, "stream", count=3)
    assert len(named(events["b"], "receive")) == 3


def test_messages_to_paused_peer_arrive_after_it_resumes(
    pair: list[LoopbackDevice],
) -> None:
    second = pair[1]
    origin = time.monotonic()
    after = count_events(second)
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


def test_more_peers_than_threads_are_served_concurrently(
    pair: list[LoopbackDevice],
) -> None:
    peers = [pair[1]]
    peers += [LoopbackDevice(f"p{number}", 20 + number) for number in range(20)]
    pair[1].agent.deploy(make_deployment(pair[1], peers, "log_forever"))
    start_and_wait(pair[1])
    with contextlib.ExitStack() as links:
        for number in range(20):
            connection = socket.create_connection((pair[1].host, 8701), timeout=2)
            link = links.enter_context(connection)
            body = encode(Message("hello", padding=10_000), f"p{number}", 1)
            token = data_token(RUN_TOKEN, f"p{number}", "b")
            length = f"Content-Length: {len(body)}"
            request = head("POST", "/messages", length, token=token) + body
            # Every second body stays incomplete, and every second connection stays open without a request.
            is_incomplete = number % 2 == 1
            link.sendall(request[:-1] if is_incomplete else request)
            if not is_incomplete:
                assert b" 204 " in link.recv(1000)
    pair[1].agent.stop()


@pytest.mark.parametrize(
    "token",
    ["", "Bearer wrong", None],
    ids=["half a head", "refused", "half a message"],
)
def test_stalled_connections_do_not_delay_peers(
    pair: list[LoopbackDevice], token: str | None
) -> None:
    run(pair, "log_name")
    if token is None:
        token = TO_A
    # One byte of 100, so the agent waits for the others.
    request = head("POST", "/messages", "Content-Length: 100", token=token) + b"x"
    if token == "":
        request = request[:40]
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            connection = socket.create_connection((pair[0].host, 8701))
            stack.enter_context(connection).sendall(request)
        time.sleep(0.2)
        start = time.monotonic()
        assert len(named(run(pair, "ping", count=2)["a"], "receive")) == 2
        assert time.monotonic() - start < 5


def test_program_above_disk_quota_fails(tmp_path: Path) -> None:
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


def test_message_too_large_for_receiver_fails_at_sender() -> None:
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
        error = states[-1].fields["error"]
        assert error.startswith("a message of 3 MB from a to b is too large")
    finally:
        device.kill()


@pytest.mark.parametrize(
    ("body", "error"),
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
def test_invalid_link_settings_are_refused(
    pair: list[LoopbackDevice], body: bytes, error: str
) -> None:
    pair[1].agent.deploy(make_deployment(pair[1], pair, "log_name"))
    response = ask(pair[1], "PUT", "/links", data=body)
    assert response.status_code == 400
    assert error in response.json()["error"]
    # Valid settings are still accepted.
    pair[1].agent.set_links({"a": 0.5}, {})


# Refused requests

TO_A = data_token(RUN_TOKEN, "b", "a")
"""The token of messages from b to a."""


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
    [
        "",
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer  " + TOKEN,
        "Bearer \xff",
    ],
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
def test_requests_without_valid_token_are_refused(
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
def test_unknown_paths_and_methods_are_refused(
    pair: list[LoopbackDevice], method: str, path: str, status: int
) -> None:
    response = ask(pair[0], method, path)
    assert (response.status_code, "error" in response.json()) == (status, True)


def test_data_port_accepts_only_messages(pair: list[LoopbackDevice]) -> None:
    assert ask(pair[0], "GET", "/messages", 8701).status_code == 405
    assert ask(pair[0], "POST", "/other", 8701, data=b"").status_code == 404
    assert ask(pair[0], "GET", "/health", 8701).status_code == 404


@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        (b"", "JSON"), (b"{", "JSON"), (b"[]", "version"), (b"\xff\xfe", "JSON"), (b"{}", "version"),
        (b"[" * 100_000, "JSON"), (b'{"version": 1, "run": 3}', "run"),
    ],
)  # fmt: skip
def test_malformed_deployments_are_refused(
    pair: list[LoopbackDevice], body: bytes, expected_error: str
) -> None:
    response = ask(pair[0], "PUT", "/deployment", data=body)
    assert response.status_code == 400
    assert expected_error.lower() in response.json()["error"].lower()


@pytest.mark.parametrize(
    ("change", "expected_error"),
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
def test_inconsistent_deployments_are_refused(
    pair: list[LoopbackDevice], change: dict[str, Any], expected_error: str
) -> None:
    response = ask(
        pair[0],
        "PUT",
        "/deployment",
        data=replace_fields(make_deployment(pair[0], pair, "log_name"), **change),
    )
    assert response.status_code == 400
    assert expected_error in response.json()["error"]


def test_deployment_with_invalid_workload_is_refused(
    pair: list[LoopbackDevice],
) -> None:
    document = make_deployment(pair[0], pair, "log_name")
    for key, value, expected_error in (
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
        assert expected_error in response.json()["error"]


def test_requests_out_of_order_are_refused() -> None:
    device = LoopbackDevice("a", 5)
    device.boot()
    try:
        for method, path, body in (
            ("POST", "/start", b'{"origin": 1}'), ("PUT", "/data", b"x"), ("PUT", "/shard", b"x"),
            ("POST", "/stop", b""), ("GET", "/weights", None),
        ):  # fmt: skip
            response = ask(device, method, path, data=body)
            assert (response.status_code, path) == (409, path)
        early = encode(Message("early"), "b")
        response = ask(device, "POST", "/messages", 8701, data=early)
        assert response.status_code == 503
        device.agent.deploy(make_deployment(device, [device], "log_forever"))
        device.agent.start(time.monotonic())
        for method, path, body in (
            ("POST", "/start", b'{"origin": 1}'), ("PUT", "/data", b"x"), ("PUT", "/shard", b"x"),
            ("PUT", "/deployment", b"x"),
        ):  # fmt: skip
            response = ask(device, method, path, data=body)
            assert (response.status_code, path) == (409, path)
            error = response.json()["error"]
            assert "running" in error or "runs" in error
        # A repeated stop has no effect.
        device.agent.stop()
        device.agent.stop()
        device.agent.deploy(make_deployment(device, [device], "log_name"))
        assert device.agent.health()["state"] == "ready"
        for invalid in (
            b"nothing",
            b"[]",
            b'{"origin": "1"}',
            b'{"origin": true}',
            b'{"origin": NaN}',
            b'{"origin": 1e400}',
        ):
            assert ask(device, "POST", "/start", data=invalid).status_code == 400
        for path in ("/data", "/shard"):
            assert ask(device, "PUT", path, data=b"no tensors").status_code == 400
        assert ask(device, "GET", "/events?after=-1").status_code == 400
        assert ask(device, "GET", "/events?after=9999").status_code == 409
        assert device.agent.health()["state"] == "ready"
    finally:
        device.kill()


def raw(device: LoopbackDevice, port: int, request: bytes) -> bytes:
    """Send bytes and the end of the stream, and return the response."""
    with socket.create_connection((device.host, port), timeout=10) as link:
        # The agent may respond and close the connection before it has read all.
        with contextlib.suppress(OSError):
            link.sendall(request)
            link.shutdown(socket.SHUT_WR)
        response = b""
        with contextlib.suppress(ConnectionResetError):
            while received := link.recv(65536):
                response += received
    return response


def head(method: str, path: str, *headers: str, token: str = TOKEN) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: agent",
        f"Authorization: Bearer {token}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_oversized_bodies_are_refused_before_reading(
    pair: list[LoopbackDevice],
) -> None:
    run(pair, "log_name")
    resident = pair[0].agent.metrics()["testbed_resident_bytes"]
    for port, method, path, size in (
        (8700, "PUT", "/deployment", 49 << 20), (8700, "PUT", "/deployment", 10**15),
        (8701, "POST", "/messages", 10**15), (8700, "POST", "/start", 5000), (8701, "POST", "/messages", 1 << 30),
    ):  # fmt: skip
        token = TO_A if port == 8701 else TOKEN
        request = head(method, path, f"Content-Length: {size}", token=token)
        response = raw(pair[0], port, request + b"x" * 1000)
        assert b"413" in response.split(b"\r\n")[0], (path, response)
        assert b"error" in response
    # A request without a token is refused first, also before its body is read.
    headers = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000\r\n\r\nxxx"
    for port, line in ((8700, b"PUT /data"), (8701, b"POST /messages")):
        response = raw(pair[0], port, line + headers)
        assert b"401" in response.split(b"\r\n")[0]
    # None of the announced gigabytes was allocated.
    assert pair[0].agent.metrics()["testbed_resident_bytes"] < resident + 20e6


def test_bodies_of_unknown_or_wrong_length_are_refused(
    pair: list[LoopbackDevice],
) -> None:
    run(pair, "log_name")
    for port, method, path, token in (
        (8700, "PUT", "/deployment", TOKEN),
        (8701, "POST", "/messages", TO_A),
    ):
        begin = partial(head, method, path, token=token)
        chunks = b"5\r\nhello\r\n0\r\n\r\n"
        chunked = raw(pair[0], port, begin("Transfer-Encoding: chunked") + chunks)
        assert b"411" in chunked.split(b"\r\n")[0]
        short = raw(pair[0], port, begin("Content-Length: 100") + b"only this")
        assert b"400" in short.split(b"\r\n")[0]
        assert b"after 9 of 100" in short
        negative = raw(pair[0], port, begin("Content-Length: -5"))
        assert b" 4" in negative.split(b"\r\n")[0]


def test_messages_with_wrong_sender_token_or_content_are_refused(
    pair: list[LoopbackDevice],
) -> None:
    # After a finished program, a device still accepts messages.
    run(pair, "log_name")
    post = partial(ask, pair[0], "POST", "/messages", 8701)
    assert post(TO_A, data=encode(Message("hello"), "b", 2**62)).status_code == 204
    stranger = post(TO_A, data=encode(Message("hello"), "mallory"))
    assert stranger.status_code == 403
    assert "'b' must not send as 'mallory'" in stranger.json()["error"]
    for token in (TOKEN, RUN_TOKEN, data_token(RUN_TOKEN, "a", "b"), ""):
        assert post(token, data=encode(Message("hello"), "b", 2**62)).status_code == 401
    assert post(TO_A, data=b"garbage").status_code == 400
    assert pair[0].agent.metrics()["testbed_inbox_bytes"] == 0


def test_repeated_and_outdated_messages_are_dropped(pair: list[LoopbackDevice]) -> None:
    after = count_events(pair[1])
    pair[1].agent.deploy(make_deployment(pair[1], pair, "persist", count=1))
    start_and_wait(pair[1])
    # Accepted are only higher sequence numbers of the current incarnation, and higher incarnations.
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
        token = data_token(RUN_TOKEN, "a", "b")
        response = ask(pair[1], "POST", "/messages", 8701, token, data=body)
        assert response.status_code == 204
    events = list(pair[1].agent.events(after))
    assert field_of(events, "log", "number") == [7, 10, 11, 0]


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
def test_agent_survives_arbitrary_bytes(
    pair: list[LoopbackDevice], port: int, start: bytes, rest: bytes
) -> None:
    response = raw(pair[0], port, start + rest)
    # If this test runs first, no program has run yet, and messages are refused with 503.
    refusals = (b"HTTP/1.1 4", b"HTTP/1.1 503")
    assert response == b"" or response.startswith(refusals), response


def test_agent_still_runs_programs_after_arbitrary_bytes(
    pair: list[LoopbackDevice],
) -> None:
    assert len(named(run(pair, "ping", count=2)["a"], "send")) == 2


# Costs


def test_ten_thousand_messages_do_not_grow_memory(pair: list[LoopbackDevice]) -> None:
    run(pair, "ping", count=500, size=1000)
    before = [device.agent.metrics()["testbed_resident_bytes"] for device in pair]
    events = run(pair, "ping", count=5000, size=1000)
    assert len(named(events["b"], "receive")) == 5000
    for device, resident in zip(pair, before, strict=True):
        # Only compressed events stay in memory. The 10,000 messages of 1 kB would take 10 MB.
        assert device.agent.metrics()["testbed_resident_bytes"] - resident < 3e6


def test_idle_agent_has_not_imported_heavy_modules() -> None:
    # Each module delays the boot of every device.
    heavy = ["torch", "pydantic", "numpy", "requests", "flask", "email"]
    heavy += ["importlib.metadata", "zipfile", "asyncio", "ssl", "hashlib", "ctypes"]
    program = f"import sys, testbed_agent.__main__; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("environment", "expected_error"),
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
def test_invalid_environment_ends_agent_with_message(
    environment: dict[str, str], expected_error: str
) -> None:
    valid = {"TESTBED_RUN": "r", "TESTBED_DEVICE": "d", "TESTBED_TOKEN": "t"}
    result = subprocess.run(
        [sys.executable, "-m", "testbed_agent"],
        env=os.environ | valid | environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert expected_error in result.stderr
    assert "Traceback" not in result.stderr


def test_absent_agent_raises_agent_gone() -> None:
    with pytest.raises(AgentGone, match="GET /health: the agent does not respond"):
        LoopbackDevice("nobody", 9).agent.health()
