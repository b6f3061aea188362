"""Logs in the results folder of a run on containers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from testbed.common.errors import InputError
from testbed_controller.hosts.lab import AnyLab, HostsLab
from testbed_controller.running import logs


def fake_lab(containers: dict[str, Iterator[bytes]]) -> AnyLab:
    """Return a lab with the given chunks of logs, by container."""
    lab: Any = SimpleNamespace(container_logs=lambda: containers)
    return cast(AnyLab, lab)


def log_of_a_removed_container() -> Iterator[bytes]:
    yield b"line\n"
    raise InputError("there is no container")


def fail_with_a_log_message() -> None:
    logging.getLogger("testbed_controller.some.module").info("devices are up")
    raise InputError("the reason")


def test_missing_container_does_not_prevent_the_other_logs(
    tmp_path: Path,
) -> None:
    containers = {
        "worker1": log_of_a_removed_container(),
        "source": iter([b"one\n", b"two\n"]),
        "shaper": iter([b""]),
    }
    logs.save_container_logs(fake_lab(containers), tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert files == {"source.log": b"one\ntwo\n", "shaper.log": b""}


def test_large_log_keeps_last_complete_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last 20 bytes also contain the end of the second line.
    monkeypatch.setattr(logs, "LOG_BYTES", 20)
    chunks = [b"first line\nsecond ", b"line\nthird line\n"]
    logs.save_container_logs(fake_lab({"source": iter(chunks)}), tmp_path)
    assert (tmp_path / "logs" / "source.log").read_bytes() == b"third line\n"


def test_controller_log_contains_the_traceback_of_a_fatal_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "testbed_controller")
    logger = logging.getLogger("testbed_controller")
    # A handler that remains would add messages of later runs to the log of this run.
    handlers_before = list(logger.handlers)
    with pytest.raises(InputError), logs.controller_log(tmp_path):
        fail_with_a_log_message()
    text = (tmp_path / "controller.log").read_text()
    assert "INFO testbed_controller.some.module: devices are up" in text
    assert "InputError: the reason" in text
    assert "Traceback" in text
    assert logger.handlers == handlers_before


def fake_host(*containers: str) -> Any:
    """Return the part of a lab on one host, with empty logs."""
    return SimpleNamespace(
        container_logs=lambda: {name: iter([b""]) for name in containers}
    )


def test_each_reachable_host_has_shaper_log() -> None:
    # The container of the shaper has the same name on each host; node3 does not respond.
    hosts = {
        "node1": fake_host("source", "shaper"),
        "node2": fake_host("worker1", "shaper"),
        "node3": fake_host("worker2", "shaper"),
    }
    lab: Any = SimpleNamespace(parts=hosts, lost={"node3"})
    assert set(HostsLab.container_logs(lab)) == {
        "source",
        "worker1",
        "shaper.node1",
        "shaper.node2",
    }
