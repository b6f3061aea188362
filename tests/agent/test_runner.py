"""The life of a device's program, and what is refused when."""

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
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runner]:
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


def deployed(runner: Runner, do: str, **options: Any) -> Runner:
    """Hand out one of the scripted programs to a device that has a peer, which is not there."""
    devices = [LoopbackDevice("a", 0), LoopbackDevice("b", 1)]
    runner.deploy(bytearray(make_deployment(devices[0], devices, do, **options)))
    return runner


def ended(runner: Runner) -> Runner:
    deadline = time.monotonic() + 20
    while runner.state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return runner


def refusal(act: Any, *arguments: Any) -> tuple[int, str]:
    with pytest.raises(Refused) as refused:
        act(*arguments)
    return refused.value.status, str(refused.value)


def test_device_without_deployment_refuses_data_and_start(made: Runner) -> None:
    idle = "is accepted only between deployment and start; this device is idle"
    assert refusal(made.start, 0.0) == (409, f"a start {idle}")
    assert refusal(made.stop) == (409, "no program is running: this device is idle")
    assert refusal(made.weights) == (409, "this device's program exposes no weights")
    text = "links can be set only after a deployment"
    assert refusal(made.set_links, bytearray(b'{"message_loss": {}}')) == (409, text)
    assert refusal(made.put_data, bytearray(b"garbage")) == (409, f"data {idle}")
    assert refusal(made.put_shard, bytearray(b"garbage"))[0] == 400
    made.leave()  # nobody to say it to
    assert refusal(made.deploy, bytearray(b"{}"))[0] == 400
    assert made.state == "idle"


def test_message_before_the_program_is_refused_for_a_retry(made: Runner) -> None:
    """By the loop, which begins with the first that comes."""
    names = [thread.name for thread in threading.enumerate()]
    with socket.create_connection(made._data.address, timeout=10) as peer:
        peer.sendall(b"POST /messages HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")
        assert peer.recv(1000).startswith(b"HTTP/1.1 503 ")
    assert [thread.name for thread in threading.enumerate()].count(
        "program"
    ) == names.count("program") + 1


def test_no_collection_of_garbage_looks_through_torch(
    made: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would keep the program waiting for 70 ms."""
    monkeypatch.setattr(Scripted, "needs_torch", True)
    learning.import_torch.cache_clear()
    before = gc.get_freeze_count()
    deployed(made, "log_name")
    assert gc.get_freeze_count() > before


def test_a_program_runs_once_and_after_another_deployment_again(made: Runner) -> None:
    for _ in range(2):
        deployed(made, "log_name")
        assert made.state == "ready"
        made.start(time.monotonic())
        assert (ended(made).state, made.error) == ("finished", None)
        assert refusal(made.start, 0.0)[1].endswith("this device is finished")


def test_nothing_happens_after_the_end_of_a_program(made: Runner) -> None:
    deployed(made, "compute_last").start(time.monotonic())
    events = [
        json.loads(line)
        for line in b"".join(ended(made).log.follow(0)).split(b"\n")
        if line
    ]
    assert (events[-1]["event"], events[-1]["state"]) == ("state", "finished")
    assert events[-1]["time"] == max(event["time"] for event in events)


@pytest.mark.parametrize("do", ["fail", "exit_process"])
def test_failure_is_kept_until_the_next_deployment(made: Runner, do: str) -> None:
    deployed(made, do).start(time.monotonic())
    assert ended(made).state == "failed"
    assert made.error is not None
    assert "Traceback" in made.error
    deployed(made, "log_name").start(time.monotonic())
    assert (ended(made).state, made.error) == ("finished", None)


@pytest.mark.parametrize(("do", "level"), [("fail", "ERROR"), ("log_name", "INFO")])
def test_the_end_of_a_program_is_logged_with_the_traceback_of_its_failure(
    made: Runner, do: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "testbed_agent.runner")
    deployed(made, do).start(time.monotonic())
    ended(made)
    last = caplog.records[-1]
    assert (last.levelname, last.getMessage()) == (
        level,
        f"the program is {made.state}",
    )
    assert bool(last.exc_info) == (made.state == "failed")


def test_waiting_program_is_stopped_and_blocks_deployments(
    made: Runner,
) -> None:
    deployed(made, "log_forever").start(time.monotonic())
    assert refusal(deployed, made, "log_name") == (
        409,
        "cannot deploy while a program is running: stop the program first",
    )
    made.stop()
    assert made.state == "stopped"


def test_a_program_is_stopped_before_it_begins(made: Runner) -> None:
    deployed(made, "log_name").start(time.monotonic() + 30)
    made.stop()
    assert made.state == "stopped"


def test_program_that_fills_its_disk_is_cancelled_with_the_reason(
    made: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "DISK_SECONDS", 0.1)
    deployed(made, "fill_disk", size=2 << 20).start(time.monotonic())
    assert ended(made).state == "failed"
    assert (
        made.error == f"{made.settings.disk} of a holds 2MiB, above its quota of 1MiB"
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
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
)
def test_invalid_losses_are_refused(made: Runner, body: bytes, complaint: str) -> None:
    status, text = refusal(deployed(made, "log_name").set_links, bytearray(body))
    assert status == 400
    assert complaint in text


def test_messages_are_taken_while_a_program_runs_and_after_it_ended_well(
    made: Runner,
) -> None:
    data = made._data
    deployed(made, "log_name")
    assert data.inbox is None
    made.start(time.monotonic())
    ended(made)
    assert data.inbox is not None
    token = data_token(RUN_TOKEN, "b", "a")
    assert data.inbox.authenticate(f"Bearer {token}") == "b"
    deployed(made, "fail").start(time.monotonic())
    ended(made)
    assert data.inbox is None
