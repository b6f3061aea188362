"""Helper processes of the shaper's server: requests, responses and termination."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from testbed.common.errors import HostError
from testbed.network.link import Link
from testbed_controller.shaping.helper import (
    MAX_REQUEST_BYTES,
    DelayLine,
    Gate,
    Helper,
    QueueImpairment,
    serve_request,
)
from testbed_controller.shaping.plan import Access


def send_request(data: bytes, execute: Any) -> tuple[bool, bytes]:
    """Return whether the helper continues, and the response; no data represents a disconnected server."""
    server_end, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server_end, helper_end:
        if data:
            server_end.send(data)
        else:
            server_end.shutdown(socket.SHUT_WR)
        continues = serve_request(helper_end, execute, 0)
        response = server_end.recv(MAX_REQUEST_BYTES) if continues else b""
        return continues, response


def test_error_of_the_kernel_is_sent_as_response() -> None:
    def fail(_request: dict[str, Any], _received: list[int]) -> None:
        raise OSError(1, "not permitted")

    def echo(request: dict[str, Any], _received: list[int]) -> dict[str, Any]:
        return {"did": request["do"]}

    assert send_request(b'{"do": "it"}', echo) == (True, b'{"did": "it"}')
    assert send_request(b"{}", lambda *_: None) == (True, b"{}")
    assert send_request(b"{}", fail) == (True, b'{"error": "[Errno 1] not permitted"}')
    assert send_request(b"", fail) == (False, b"")


def test_end_of_helper_process_is_reported_with_status() -> None:
    with pytest.raises(HostError, match="the thing has ended with status 1"):
        Helper("no.such.module", "thing")


def test_unresponsive_helper_process_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("testbed_controller.shaping.helper._END_SECONDS", 0.1)
    helper = Helper("testbed_controller.shaping.engine", "delay line")
    # A stopped process does not notice that its socket was closed.
    os.kill(helper._process.pid, signal.SIGSTOP)
    helper.stop()
    assert helper._process.returncode == -signal.SIGKILL


class RecordingHelper(DelayLine, Gate):
    """A helper without a process, which records requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def ask(
        self, request: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        self.requests.append(request)
        return {}


def test_many_queues_are_set_in_several_requests() -> None:
    helper = RecordingHelper()
    queues = [
        QueueImpairment(number, 10, Link(delay=0.01), "seed") for number in range(130)
    ]
    helper.set("a", queues, Access(1000, 5))
    # At most 64 impairments fit into one request: 130 = 64 + 64 + 2.
    sizes = [len(request["impairments"]) for request in helper.requests]
    assert sizes == [64, 64, 2]
    numbers: list[int] = []
    for request in helper.requests:
        assert request["downlink"] == (1000, 5)
        numbers += [impairment["queue"] for impairment in request["impairments"]]
    assert numbers == list(range(130))


def test_absence_of_queues_is_set_in_one_request() -> None:
    helper = RecordingHelper()
    helper.set("a", [], None)
    assert helper.requests == [
        {"do": "set", "device": "a", "impairments": [], "downlink": None}
    ]
