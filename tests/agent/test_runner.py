"""The life cycle of a device's program, and the requests refused in each state."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import methods
from testbed.ml import learning
from testbed.wire.token import data_token
from testbed_agent import runner as runners
from testbed_agent.http import Refused
from testbed_agent.receiving import DataServer
from testbed_agent.runner import Runner
from testbed_agent.settings import Settings
from tests.helpers.agent_programs import Scripted
from tests.helpers.agents import RUN_TOKEN, LoopbackDevice, make_deployment


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runner]:
    """The runner of a device "a", with a disk of 1 MiB."""
    monkeypatch.setitem(
        methods._CLASSES, "scripted", "tests.helpers.agent_programs:Scripted"
    )
    monkeypatch.setenv("TESTBED_DISK", str(tmp_path))
    settings = Settings(
        "test-run",
        "a",
        "t",
        data=("127.0.0.1", 0),
        cast=("127.0.0.1", 0),
        disk=str(tmp_path),
        disk_limit=1 << 20,
    )
    runner = Runner(settings, DataServer(settings))
    yield runner
    if runner.state == "running":
        runner.stop()


def deploy(runner: Runner, program: str, **options: Any) -> None:
    """Deploy a program of `agent_programs`, with an unreachable peer "b"."""
    devices = [LoopbackDevice("a", 0), LoopbackDevice("b", 1)]
    deployment = make_deployment(devices[0], devices, program, **options)
    runner.deploy(bytearray(deployment))


def deploy_and_start(runner: Runner, program: str, **options: Any) -> None:
    deploy(runner, program, **options)
    runner.start(time.monotonic())


def wait_for_end(runner: Runner) -> None:
    deadline = time.monotonic() + 20
    while runner.state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal(request: Any, *arguments: Any) -> tuple[int, str]:
    """Return the status and the reason with which a request is refused."""
    with pytest.raises(Refused) as refused:
        request(*arguments)
    return refused.value.status, str(refused.value)


def test_requests_without_a_deployment_are_refused(runner: Runner) -> None:
    idle = "is accepted only between deployment and start; this device is idle"
    assert refusal(runner.start, 0.0) == (409, f"a start {idle}")
    assert refusal(runner.stop) == (409, "no program is running: this device is idle")
    assert refusal(runner.weights) == (409, "this device's program exposes no weights")
    links_refusal = (409, "links can be set only after a deployment")
    links = bytearray(b'{"message_loss": {}}')
    assert refusal(runner.set_links, links) == links_refusal
    invalid_body = bytearray(b"garbage")
    assert refusal(runner.put_data, invalid_body) == (409, f"data {idle}")
    assert refusal(runner.put_shard, invalid_body)[0] == 400
    # No program needs to know that the device leaves.
    runner.leave()
    assert refusal(runner.deploy, bytearray(b"{}"))[0] == 400
    assert runner.state == "idle"


def test_message_before_the_program_is_refused_for_a_retry(runner: Runner) -> None:
    def count_program_threads() -> int:
        names = [thread.name for thread in threading.enumerate()]
        return names.count("program")

    count_before = count_program_threads()
    with socket.create_connection(runner._data.address, timeout=10) as peer:
        peer.sendall(b"POST /messages HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")
        assert peer.recv(1000).startswith(b"HTTP/1.1 503 ")
    # The first connection starts the event loop that a program will use.
    assert count_program_threads() == count_before + 1


def test_garbage_collections_exclude_torch(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A collection through the objects of torch would interrupt the program for 70 ms.
    monkeypatch.setattr(Scripted, "needs_torch", True)
    learning.import_torch.cache_clear()
    count_before = gc.get_freeze_count()
    deploy(runner, "log_name")
    assert gc.get_freeze_count() > count_before


def test_each_deployment_runs_once(runner: Runner) -> None:
    for _ in range(2):
        deploy(runner, "log_name")
        assert runner.state == "ready"
        runner.start(time.monotonic())
        wait_for_end(runner)
        assert runner.state == "finished"
        assert runner.error is None
        _, reason = refusal(runner.start, 0.0)
        assert reason.endswith("this device is finished")


def test_end_of_program_is_last_event(runner: Runner) -> None:
    deploy_and_start(runner, "compute_last")
    wait_for_end(runner)
    lines = b"".join(runner.log.follow(0)).split(b"\n")
    # Heartbeats are empty lines.
    events = [json.loads(line) for line in lines if line]
    last = events[-1]
    assert (last["event"], last["state"]) == ("state", "finished")
    # A result has an instant slightly ahead of the clock.
    assert last["time"] == max(event["time"] for event in events)


@pytest.mark.parametrize("program", ["fail", "exit_process"])
def test_failure_is_reported_until_the_next_deployment(
    runner: Runner, program: str
) -> None:
    deploy_and_start(runner, program)
    wait_for_end(runner)
    assert runner.state == "failed"
    assert runner.error is not None
    assert "Traceback" in runner.error
    deploy_and_start(runner, "log_name")
    wait_for_end(runner)
    assert runner.state == "finished"
    assert runner.error is None


@pytest.mark.parametrize(
    ("program", "level"), [("fail", "ERROR"), ("log_name", "INFO")]
)
def test_end_of_a_program_is_logged_with_the_traceback_of_a_failure(
    runner: Runner, program: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "testbed_agent.runner")
    deploy_and_start(runner, program)
    wait_for_end(runner)
    last = caplog.records[-1]
    assert last.levelname == level
    assert last.getMessage() == f"the program is {runner.state}"
    assert bool(last.exc_info) == (runner.state == "failed")


def test_deployment_is_refused_until_the_program_is_stopped(runner: Runner) -> None:
    deploy_and_start(runner, "log_forever")
    assert refusal(deploy, runner, "log_name") == (
        409,
        "cannot deploy while a program is running: stop the program first",
    )
    runner.stop()
    assert runner.state == "stopped"


def test_program_can_be_stopped_before_start(runner: Runner) -> None:
    deploy(runner, "log_name")
    runner.start(time.monotonic() + 30)
    runner.stop()
    assert runner.state == "stopped"


def test_program_above_the_disk_quota_is_cancelled_with_the_reason(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "DISK_SECONDS", 0.1)
    deploy_and_start(runner, "fill_disk", size=2 << 20)
    wait_for_end(runner)
    assert runner.state == "failed"
    disk = runner.settings.disk
    assert runner.error == f"{disk} of a contains 2MiB, above its quota of 1MiB"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"nonsense", "the body must be JSON such as"),
        (b"[" * 100_000, "the body must be JSON such as"),
        (b'{"message_loss": 1}', "'message_loss' must be a mapping"),
        (
            b'{"message_loss": {}, "more": 1}',
            "the body must be an object with the keys message_loss, slowness",
        ),
        (b'{"slowness": {"b": -1}}', "the slowness of 'b' must be a number of seconds"),
        (b'{"message_loss": {"c": 0.1}}', "unknown peer 'c'"),
        (b'{"message_loss": {"b": true}}', "must be a fraction from 0 to 1"),
        (b'{"message_loss": {"b": 1.1}}', "must be a fraction from 0 to 1"),
    ],
    ids=[
        "no JSON",
        "deep JSON",
        "no mapping",
        "unknown key",
        "negative time",
        "unknown peer",
        "boolean",
        "above one",
    ],
)
def test_invalid_links_are_refused(runner: Runner, body: bytes, error: str) -> None:
    deploy(runner, "log_name")
    status, reason = refusal(runner.set_links, bytearray(body))
    assert status == 400
    assert error in reason


def test_messages_are_accepted_from_the_start_of_a_program(runner: Runner) -> None:
    data_server = runner._data
    deploy(runner, "log_name")
    assert data_server.inbox is None
    runner.start(time.monotonic())
    wait_for_end(runner)
    # A finished device still acknowledges messages of slower peers.
    assert data_server.inbox is not None
    token = data_token(RUN_TOKEN, "b", "a")
    assert data_server.inbox.authenticate(f"Bearer {token}") == "b"


def test_messages_are_refused_after_a_failure(runner: Runner) -> None:
    deploy_and_start(runner, "fail")
    wait_for_end(runner)
    assert runner._data.inbox is None
