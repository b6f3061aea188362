"""Requests to agents on loopback addresses, without containers: invalid requests, memory and environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.wire.message import Message, encode
from testbed.wire.token import data_token
from testbed_controller.lab.clients import AgentGone
from tests.helpers.agents import (
    RUN_TOKEN,
    TOKEN,
    LoopbackDevice,
    ask,
    count_events,
    events_named,
    field_of,
    make_deployment,
    replace_fields,
    request_head,
    run_programs,
    send_raw,
    start_and_wait,
)

TO_A = data_token(RUN_TOKEN, "b", "a")
"""The token of messages from b to a."""


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


def test_oversized_bodies_are_refused_before_reading(
    pair: list[LoopbackDevice],
) -> None:
    run_programs(pair, "log_name")
    resident = pair[0].agent.metrics()["testbed_resident_bytes"]
    for port, method, path, size in (
        (8700, "PUT", "/deployment", 49 << 20), (8700, "PUT", "/deployment", 10**15),
        (8701, "POST", "/messages", 10**15), (8700, "POST", "/start", 5000), (8701, "POST", "/messages", 1 << 30),
    ):  # fmt: skip
        token = TO_A if port == 8701 else TOKEN
        request = request_head(method, path, f"Content-Length: {size}", token=token)
        response = send_raw(pair[0], port, request + b"x" * 1000)
        assert b"413" in response.split(b"\r\n")[0], (path, response)
        assert b"error" in response
    # A request without a token is refused first, also before its body is read.
    headers = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000\r\n\r\nxxx"
    for port, line in ((8700, b"PUT /data"), (8701, b"POST /messages")):
        response = send_raw(pair[0], port, line + headers)
        assert b"401" in response.split(b"\r\n")[0]
    # None of the announced gigabytes was allocated.
    assert pair[0].agent.metrics()["testbed_resident_bytes"] < resident + 20e6


def test_bodies_of_unknown_or_wrong_length_are_refused(
    pair: list[LoopbackDevice],
) -> None:
    run_programs(pair, "log_name")
    for port, method, path, token in (
        (8700, "PUT", "/deployment", TOKEN),
        (8701, "POST", "/messages", TO_A),
    ):
        begin = partial(request_head, method, path, token=token)
        chunks = b"5\r\nhello\r\n0\r\n\r\n"
        chunked = send_raw(pair[0], port, begin("Transfer-Encoding: chunked") + chunks)
        assert b"411" in chunked.split(b"\r\n")[0]
        short = send_raw(pair[0], port, begin("Content-Length: 100") + b"only this")
        assert b"400" in short.split(b"\r\n")[0]
        assert b"after 9 of 100" in short
        negative = send_raw(pair[0], port, begin("Content-Length: -5"))
        assert b" 4" in negative.split(b"\r\n")[0]


def test_messages_with_wrong_sender_token_or_content_are_refused(
    pair: list[LoopbackDevice],
) -> None:
    # After a finished program, a device still accepts messages.
    run_programs(pair, "log_name")
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
        b"", request_head("POST", "/messages", "Content-Length: 30"),
        request_head("PUT", "/deployment", "Content-Length: 30"),
        request_head("PUT", "/data", "Content-Length: 30"), request_head("POST", "/start", "Content-Length: 30"),
        b"GET /events?after=", b"PUT /deployment HTTP/1.1\r\n",
    ]),
    rest=st.binary(max_size=60),
)  # fmt: skip
def test_agent_survives_arbitrary_bytes(
    pair: list[LoopbackDevice], port: int, start: bytes, rest: bytes
) -> None:
    response = send_raw(pair[0], port, start + rest)
    # If this test runs first, no program has run yet, and messages are refused with 503.
    refusals = (b"HTTP/1.1 4", b"HTTP/1.1 503")
    assert response == b"" or response.startswith(refusals), response


def test_agent_still_runs_programs_after_arbitrary_bytes(
    pair: list[LoopbackDevice],
) -> None:
    assert len(events_named(run_programs(pair, "ping", count=2)["a"], "send")) == 2


# Costs


def test_ten_thousand_messages_do_not_grow_memory(pair: list[LoopbackDevice]) -> None:
    run_programs(pair, "ping", count=500, size=1000)
    before = [device.agent.metrics()["testbed_resident_bytes"] for device in pair]
    events = run_programs(pair, "ping", count=5000, size=1000)
    assert len(events_named(events["b"], "receive")) == 5000
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
