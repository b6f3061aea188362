"""`testbed link` in front of a shaper that only remembers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from testbed.common.errors import InputError, TestbedError
from testbed.faults.conditions import apply_step
from testbed.faults.parts import ActionPart
from testbed.faults.script import FaultOperation
from testbed.network.link import GilbertElliott, Link, Pair, links_to_json
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.cli import changes as command
from testbed_controller.lab import runstate
from testbed_controller.lab.lab import Lab
from testbed_controller.running.machines import DockerFaultTarget


class Memory:
    """Stands for the shaper's client, at the edge."""

    def __init__(self) -> None:
        self.links: dict[Pair, Link] = {
            ("a", "b"): Link(rate=50e6, delay=0.005),
            ("b", "a"): Link(loss=0.01),
        }
        self.differences: list[str] = []
        self.running = "ab"
        self.problem: str | None = None
        self.containers: DockerFaultTarget

    def show(self) -> dict[str, Any]:
        rows = links_to_json(self.links)
        devices = {name: {"differences": self.differences} for name in self.running}
        return {"backend": "userspace", "links": rows, "devices": devices}

    def set(self, links: Mapping[Pair, Link]) -> None:
        self.links.update(links)

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        return [
            LinkMeasurement(
                *pair, self.links[pair], 5e7, 0.00512, 0.0, 30, self.problem
            )
            for pair in pairs
        ]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Memory:
    made = Memory()
    lab = SimpleNamespace(
        run_id="run-1",
        shaper=made,
        devices={name: SimpleNamespace(state="exited") for name in "ab"},
        refresh=lambda: None,
        experiment=SimpleNamespace(
            links=dict(made.links),
            devices=[SimpleNamespace(name="a", speed=1e9)],
            radio=None,
        ),
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runstate.path_of("run-1")  # makes the folder
    monkeypatch.setattr(Lab, "open", lambda run: lab)
    monkeypatch.setattr(command.runstate, "choose", lambda run: run or "run-1")
    made.containers = DockerFaultTarget(cast(Lab, lab))
    return made


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.link, arguments)


def test_show(memory: Memory) -> None:
    assert call("show").output.splitlines() == [
        "backend userspace",
        "source  destination  properties",
        "a       b            50 mbit, 5 ms",
        "b       a            unlimited, 0 s, 1% loss",
    ]
    [only] = json.loads(call("show", "b", "--json").output)["links"]
    assert only == {"source": "b", "destination": "a", **asdict(Link(loss=0.01))}


def test_show_fails_where_the_kernel_holds_something_else(memory: Memory) -> None:
    memory.differences = ["class 1:11 has a rate of 3"]
    assert isinstance(call("show").exception, TestbedError)


def test_set_changes_what_is_given(memory: Memory) -> None:
    answer = call("set", "a", "b", "--delay", "20ms", "--both")
    assert answer.output.splitlines() == [
        "a -> b: 50 mbit, 20 ms",
        "b -> a: unlimited, 20 ms, 1% loss",
    ]
    call("set", "a", "b", "--unlimited", "--down")
    assert memory.links["a", "b"] == Link(delay=0.02, up=False)


def test_set_takes_every_figure(memory: Memory) -> None:
    answer = call(
        *(
            "set",
            "b",
            "a",
            "--rate",
            "1mbit",
            "--delay",
            "20ms",
            "--jitter",
            "2ms",
            "--distribution",
            "pareto",
        ),
        *(
            "--jitter-correlation",
            "25%",
            "--bursts",
            "p=1%,r=20%,bad-loss=90%",
            "--message-loss",
            "10%",
        ),
        *("--duplicate", "1%", "--reorder", "2%", "--corrupt", "0.1%", "--limit", "50"),
    )
    assert memory.links["b", "a"] == Link(
        rate=1e6,
        delay=0.02,
        jitter=0.002,
        distribution="pareto",
        jitter_correlation=0.25,
        bursts=GilbertElliott(0.01, 0.2, 0.9),
        message_loss=0.1,
        duplicate=0.01,
        reorder=0.02,
        corrupt=0.001,
        limit=50,
    )
    assert answer.output.strip() == (
        "b -> a: 1 mbit, 20 ms ± 2 ms pareto correlated 25%, bursts of loss p 1% r 20%, 10% of casts lost, "
        "1% duplicated, 2% reordered, 0.1% corrupted, queue of 50"
    )


def test_a_setting_outlives_faults(memory: Memory) -> None:
    worse = ActionPart.model_validate(
        {"degrade": {"device": "b", "delay": "300ms"}}
    ).action
    apply_step(FaultOperation(worse, "worse"), memory.containers)
    assert "300 ms" in call("set", "a", "b", "--delay", "20ms", "--loss", "2%").output
    assert memory.links["a", "b"] == Link(rate=50e6, delay=0.3, loss=0.02)
    assert list(memory.containers.current.in_force) == ["worse"]
    apply_step(FaultOperation(ActionPart(heal="all").action, "heal"), memory.containers)
    assert memory.links["a", "b"] == Link(rate=50e6, delay=0.02, loss=0.02)
    assert memory.containers.links()["a", "b"] == memory.links["a", "b"]


def test_set_refuses_what_it_cannot_use(memory: Memory) -> None:
    assert "write 'mbit'" in str(call("set", "a", "b", "--rate", "100Mbps").exception)
    assert isinstance(call("set", "a", "b").exception, InputError)
    assert "must be a list such as" in str(
        call("set", "a", "b", "--bursts", "lots").exception
    )
    assert "unknown preset 'telegraph'" in str(
        call("set", "a", "b", "--preset", "telegraph").exception
    )
    jittery = call("set", "a", "b", "--jitter", "10ms").exception
    assert isinstance(jittery, InputError)
    assert "a -> b: a jitter of 10ms is above the delay of 5ms" in str(jittery)
    missing = call("set", "a", "c", "--delay", "1ms").exception
    assert isinstance(missing, InputError)
    assert "from a to c; the devices are a, b" in str(missing)
    assert memory.links["a", "b"] == Link(rate=50e6, delay=0.005)


def test_probe(memory: Memory) -> None:
    answer = call("measure", "a", "b")
    assert answer.exit_code == 0
    assert re.split("  +", answer.output.splitlines()[1]) == [
        "a", "b", "50 mbit, 5 ms", "50 mbit", "5.12 ms", "0.0%", "30"
    ]  # fmt: skip
    assert json.loads(call("measure", "--json").output)[0]["delay"] == 0.00512
    memory.problem = "carries too little"
    failed = call("measure")
    assert isinstance(failed.exception, TestbedError)
    assert "carries too little" in failed.output


def test_unlimited_with_a_rate_is_refused(memory: Memory) -> None:
    outcome = call("set", "a", "b", "--unlimited", "--rate", "1mbit")
    assert "--unlimited cannot be combined with --rate" in str(outcome.exception)


def test_links_of_devices_that_are_down_cannot_be_measured(memory: Memory) -> None:
    memory.running = "a"
    error = call("measure").exception
    assert isinstance(error, TestbedError)
    assert "no link can be measured" in str(error)
    assert "running: a; ends of the links: a, b" in str(error)
