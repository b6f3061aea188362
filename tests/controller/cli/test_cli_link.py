"""The command `testbed link`, with a shaper that records links instead of shaping them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
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


class RecordingShaper:
    """A replacement of the shaper's client."""

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
def shaper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordingShaper:
    recording = RecordingShaper()
    lab = SimpleNamespace(
        run_id="run-1",
        shaper=recording,
        devices={name: SimpleNamespace(state="exited") for name in "ab"},
        refresh=lambda: None,
        experiment=SimpleNamespace(
            links=dict(recording.links),
            devices=[SimpleNamespace(name="a", speed=1e9)],
            radio=None,
        ),
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # Creates the folder of run states, where the commands write.
    runstate.path_of("run-1")
    monkeypatch.setattr(Lab, "open", lambda run: lab)
    monkeypatch.setattr(command.runstate, "choose", lambda run: run or "run-1")
    recording.containers = DockerFaultTarget(cast(Lab, lab))
    return recording


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.link, arguments)


def test_show_lists_links_as_text_and_json(shaper: RecordingShaper) -> None:
    assert call("show").output.splitlines() == [
        "backend userspace",
        "source  destination  properties",
        "a       b            50 mbit, 5 ms",
        "b       a            unlimited, 0 s, 1% loss",
    ]
    # With a device, only its outgoing links.
    [link] = json.loads(call("show", "b", "--json").output)["links"]
    assert link == {"source": "b", "destination": "a", **asdict(Link(loss=0.01))}


def test_show_fails_if_kernel_settings_differ(shaper: RecordingShaper) -> None:
    shaper.differences = ["class 1:11 has a rate of 3"]
    assert isinstance(call("show").exception, TestbedError)


def test_set_changes_only_given_properties(shaper: RecordingShaper) -> None:
    result = call("set", "a", "b", "--delay", "20ms", "--both")
    assert result.output.splitlines() == [
        "a -> b: 50 mbit, 20 ms",
        "b -> a: unlimited, 20 ms, 1% loss",
    ]
    call("set", "a", "b", "--unlimited", "--down")
    assert shaper.links["a", "b"] == Link(delay=0.02, up=False)


def test_set_changes_every_property_of_link(shaper: RecordingShaper) -> None:
    options = {
        "--rate": "1mbit",
        "--delay": "20ms",
        "--jitter": "2ms",
        "--distribution": "pareto",
        "--jitter-correlation": "25%",
        "--bursts": "p=1%,r=20%,bad-loss=90%",
        "--message-loss": "10%",
        "--duplicate": "1%",
        "--reorder": "2%",
        "--corrupt": "0.1%",
        "--limit": "50",
    }
    result = call("set", "b", "a", *chain.from_iterable(options.items()))
    assert shaper.links["b", "a"] == Link(
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
    # The bursts replace the independent loss of 1 %.
    assert result.output.strip() == (
        "b -> a: 1 mbit, 20 ms ± 2 ms pareto correlated 25%, bursts of loss p 1% r 20%, 10% of casts lost, "
        "1% duplicated, 2% reordered, 0.1% corrupted, queue of 50"
    )


def test_link_setting_remains_after_fault(shaper: RecordingShaper) -> None:
    degrade = {"degrade": {"device": "b", "delay": "300ms"}}
    fault = ActionPart.model_validate(degrade).action
    apply_step(FaultOperation(fault, "slow"), shaper.containers)
    # The fault overrides the delay, but not the loss.
    assert "300 ms" in call("set", "a", "b", "--delay", "20ms", "--loss", "2%").output
    assert shaper.links["a", "b"] == Link(rate=50e6, delay=0.3, loss=0.02)
    assert list(shaper.containers.current.in_force) == ["slow"]
    heal = ActionPart(heal="all").action
    apply_step(FaultOperation(heal, "heal"), shaper.containers)
    assert shaper.links["a", "b"] == Link(rate=50e6, delay=0.02, loss=0.02)
    assert shaper.containers.links()["a", "b"] == shaper.links["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b", "--rate", "100Mbps"), "write 'mbit'"),
        (("a", "b", "--bursts", "lots"), "must be a list such as"),
        (("a", "b", "--preset", "telegraph"), "unknown preset 'telegraph'"),
        (
            ("a", "b", "--jitter", "10ms"),
            "a -> b: a jitter of 10ms is above the delay of 5ms",
        ),
        (("a", "c", "--delay", "1ms"), "from a to c; the devices are a, b"),
        # At least one property is required.
        (("a", "b"), ""),
    ],
)
def test_set_refuses_invalid_arguments(
    arguments: tuple[str, ...], message: str, shaper: RecordingShaper
) -> None:
    error = call("set", *arguments).exception
    assert isinstance(error, InputError)
    assert message in str(error)
    # Unchanged.
    assert shaper.links["a", "b"] == Link(rate=50e6, delay=0.005)


def test_measure_prints_measured_links_and_fails_with_problem(
    shaper: RecordingShaper,
) -> None:
    result = call("measure", "a", "b")
    assert result.exit_code == 0
    # Columns are separated by at least two spaces.
    assert re.split("  +", result.output.splitlines()[1]) == [
        "a", "b", "50 mbit, 5 ms", "50 mbit", "5.12 ms", "0.0%", "30"
    ]  # fmt: skip
    assert json.loads(call("measure", "--json").output)[0]["delay"] == 0.00512
    shaper.problem = "carries too little"
    result = call("measure")
    assert isinstance(result.exception, TestbedError)
    assert "carries too little" in result.output


def test_unlimited_with_rate_is_refused(shaper: RecordingShaper) -> None:
    error = call("set", "a", "b", "--unlimited", "--rate", "1mbit").exception
    assert "--unlimited cannot be combined with --rate" in str(error)


def test_links_of_stopped_devices_cannot_be_measured(shaper: RecordingShaper) -> None:
    shaper.running = "a"
    error = call("measure").exception
    assert isinstance(error, TestbedError)
    assert "no link can be measured" in str(error)
    assert "running: a; ends of the links: a, b" in str(error)
