"""The logs in the results folder of a run on containers."""

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


def lab(containers: dict[str, Iterator[bytes]]) -> AnyLab:
    stand_in: Any = SimpleNamespace(container_logs=lambda: containers)
    return cast(AnyLab, stand_in)


def vanished() -> Iterator[bytes]:
    yield b"line\n"
    raise InputError("there is no container")


def fail() -> None:
    logging.getLogger("testbed_controller.some.module").info("devices are up")
    raise InputError("the reason")


def test_missing_container_does_not_prevent_the_other_logs(
    tmp_path: Path,
) -> None:
    containers = {
        "worker1": vanished(),
        "source": iter([b"one\n", b"two\n"]),
        "shaper": iter([b""]),
    }
    logs.save_container_logs(lab(containers), tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert files == {"source.log": b"one\ntwo\n", "shaper.log": b""}


def test_a_large_log_keeps_its_last_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LARGEST_LOG", 20)
    logs.save_container_logs(
        lab({"source": iter([b"first line\nsecond ", b"line\nthird line\n"])}), tmp_path
    )
    assert (tmp_path / "logs" / "source.log").read_bytes() == b"third line\n"


def test_the_controllers_log_has_the_traceback_of_the_error_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "testbed_controller")
    logger = logging.getLogger("testbed_controller")
    before = list(logger.handlers)
    with pytest.raises(InputError), logs.controller_log(tmp_path):
        fail()
    text = (tmp_path / "controller.log").read_text()
    assert "INFO testbed_controller.some.module: devices are up" in text
    assert "InputError: the reason" in text
    assert "Traceback" in text
    assert logger.handlers == before


def test_of_several_hosts_each_has_a_shapers_log_and_a_lost_one_has_none() -> None:
    def part(*names: str) -> Any:
        return SimpleNamespace(
            container_logs=lambda: {name: iter([b""]) for name in (*names, "shaper")}
        )

    parts = {
        "node1": part("source"),
        "node2": part("worker1"),
        "node3": part("worker2"),
    }
    stand_in: Any = SimpleNamespace(parts=parts, lost={"node3"})
    assert set(HostsLab.container_logs(stand_in)) == {
        "source",
        "worker1",
        "shaper.node1",
        "shaper.node2",
    }
