"""Processes beside the shaper's server: what they are asked, what they answer, and that they end."""

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
    LARGEST_REQUEST,
    DelayLine,
    Gate,
    Helper,
    QueueImpairment,
    serve_request,
)
from testbed_controller.shaping.plan import Access


def answered(data: bytes, carry_out: Any, descriptors: int = 0) -> tuple[bool, bytes]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.send(data) if data else near.shutdown(socket.SHUT_WR)
        goes_on = serve_request(far, carry_out, descriptors)
        return goes_on, near.recv(LARGEST_REQUEST) if goes_on else b""


def test_a_request_is_answered_and_what_the_kernel_refuses_is_an_error() -> None:
    def refused(_request: dict[str, Any], _received: list[int]) -> None:
        raise OSError(1, "not permitted")

    assert answered(b'{"do": "it"}', lambda request, _: {"did": request["do"]}) == (
        True,
        b'{"did": "it"}',
    )
    assert answered(b"{}", lambda *_: None) == (True, b"{}")
    assert answered(b"{}", refused) == (True, b'{"error": "[Errno 1] not permitted"}')
    assert answered(b"", refused) == (False, b"")


def test_end_of_a_helper_process_is_reported_with_its_status() -> None:
    with pytest.raises(HostError, match="the thing has ended with status 1"):
        Helper("no.such.module", "thing")


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed_controller.shaping.helper._END_SECONDS", 0.1)
    made = Helper("testbed_controller.shaping.engine", "delay line")
    os.kill(made._process.pid, signal.SIGSTOP)
    made.stop()
    assert made._process.returncode == -signal.SIGKILL


class Asked(DelayLine, Gate):
    """Remembers what it would ask its process."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def ask(
        self, request: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        self.requests.append(request)
        return {}


def test_many_queues_are_set_in_several_requests_and_none_in_one() -> None:
    line = Asked()
    queues = [
        QueueImpairment(number, 10, Link(delay=0.01), "seed") for number in range(130)
    ]
    line.set("a", queues, Access(1000, 5))
    assert [len(each["impairments"]) for each in line.requests] == [64, 64, 2]
    assert {each["downlink"] for each in line.requests} == {(1000, 5)}
    assert [
        one["queue"] for each in line.requests for one in each["impairments"]
    ] == list(range(130))
    line.requests.clear()
    line.set("a", [], None)
    assert line.requests == [
        {"do": "set", "device": "a", "impairments": [], "downlink": None}
    ]
