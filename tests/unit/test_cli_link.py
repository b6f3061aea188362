"""`testbed link` in front of a shaper that only remembers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controller.cli import link as command
from testbed.errors import InputError, TestbedError
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement


class Memory:
    """Stands for the shaper's client, at the edge."""

    def __init__(self) -> None:
        self.links: dict[Pair, Link] = {("a", "b"): Link(rate=50e6, delay=0.005), ("b", "a"): Link(loss=0.01)}
        self.differences: list[str] = []
        self.problem: str | None = None

    def show(self) -> dict[str, Any]:
        rows = [{"source": pair[0], "destination": pair[1], **asdict(link)} for pair, link in self.links.items()]
        devices = {name: {"differences": self.differences} for name in "ab"}
        return {"backend": "userspace", "links": rows, "devices": devices}

    def set(self, links: Mapping[Pair, Link]) -> None:
        self.links.update(links)

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        return [LinkMeasurement(*pair, self.links[pair], 5e7, 0.00512, 0.0, 30, self.problem) for pair in pairs]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()

    class OneLab:
        shaper = made

        @classmethod
        def open(cls, run: str) -> type[OneLab]:
            assert run == "run-1"
            return cls

    monkeypatch.setattr(command, "Lab", OneLab)
    monkeypatch.setattr(command.runstate, "choose", lambda run: run or "run-1")
    return made


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.link, arguments)


def test_show(memory: Memory) -> None:
    assert call("show").output.splitlines() == [
        "backend userspace",
        "source  destination  rate       delay  loss  state",
        "a       b            50mbit     5ms    0     up",
        "b       a            unlimited  0      1%    up",
    ]
    [only] = json.loads(call("show", "b", "--json").output)["links"]
    assert only == {"source": "b", "destination": "a", "rate": None, "delay": 0.0, "loss": 0.01, "up": True}


def test_show_fails_where_the_kernel_holds_something_else(memory: Memory) -> None:
    memory.differences = ["class 1:11 has a rate of 3"]
    assert isinstance(call("show").exception, TestbedError)


def test_set_changes_what_is_given(memory: Memory) -> None:
    answer = call("set", "a", "b", "--delay", "20ms", "--both")
    assert answer.output.splitlines() == [
        "a -> b: rate 50mbit, delay 20ms, loss 0",
        "b -> a: rate unlimited, delay 20ms, loss 1%",
    ]
    call("set", "a", "b", "--rate", "0", "--down")
    assert memory.links["a", "b"] == Link(delay=0.02, up=False)


def test_set_refuses_what_it_cannot_use(memory: Memory) -> None:
    assert "write 'mbit'" in call("set", "a", "b", "--rate", "100Mbps").output
    assert isinstance(call("set", "a", "b").exception, InputError)
    missing = call("set", "a", "c", "--delay", "1ms").exception
    assert isinstance(missing, InputError)
    assert "from a to c; the devices are a, b" in str(missing)


def test_probe(memory: Memory) -> None:
    answer = call("probe", "a", "b")
    assert answer.exit_code == 0
    assert answer.output.splitlines()[1].split() == ["a", "b", "50mbit", "50mbit", "5ms", "5.120ms", "0", "0%", "30"]
    assert json.loads(call("probe", "--json").output)[0]["delay"] == 0.00512
    memory.problem = "carries too little"
    failed = call("probe")
    assert isinstance(failed.exception, TestbedError)
    assert "carries too little" in failed.output
