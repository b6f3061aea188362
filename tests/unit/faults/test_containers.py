"""What is in force on a lab, in front of a shaper and agents that only remember."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.lab.agents import AgentGone
from controller.lab.lab import Lab
from controller.running.faults import HALTED, Changed, Conditions, flapping, inflict, undo
from testbed.errors import HostError, InputError
from testbed.faults.parts import FaultPart, ThrottlePart
from testbed.faults.replay import Change
from testbed.network.link import Link, Pair
from testbed.network.parts import LinkPart
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario


class RememberedAgent:
    def __init__(self) -> None:
        self.factors: list[float] = []
        self.losses: list[Mapping[str, float]] = []
        self.gone = False

    def health(self) -> dict[str, Any]:
        return {"state": "running"}

    def set_speed(self, factor: float) -> None:
        if self.gone:
            raise AgentGone("paused")
        self.factors.append(factor)

    def set_message_loss(self, fractions: Mapping[str, float]) -> None:
        self.losses.append(fractions)


class RememberedLab:
    """Stands for the containers, at the edge."""

    def __init__(self) -> None:
        scenario = {
            "name": "conditions",
            "devices": {"a": {"speed": "1gflops"}, "b": {"speed": "1gflops"}, "c": {"speed": "1gflops"}},
            "network": {"link": {"rate": "10mbit", "delay": "5ms"}},
            "workload": {"task": "infer", "model": {"name": "mlp"}, "method": {"name": "exchange"}},
        }
        self.run_id = "run-1"
        self.experiment = trials(Scenario.model_validate(scenario))[0].experiment
        self.agents = {name: RememberedAgent() for name in "abc"}
        self.devices = {name: SimpleNamespace(state="running") for name in "abc"}
        self.shaped: dict[Pair, Link] = dict(self.experiment.links)
        self.shaper = self
        self.booted_with: dict[Pair, Link] = {}
        self.refuses = False

    def set(self, links: Mapping[Pair, Link]) -> None:
        if self.refuses:
            raise HostError("the rule did not take")
        self.shaped.update(links)

    def agent(self, name: str) -> RememberedAgent:
        return self.agents[name]

    def refresh(self) -> None:
        pass

    def kill(self, name: str) -> None:
        self.devices[name].state = "exited"

    def start(self, name: str, links: Mapping[Pair, Link]) -> None:
        self.devices[name].state = "running"
        self.booted_with = dict(links)

    def pause(self, name: str) -> None:
        self.agents[name].gone = True

    def resume(self, name: str) -> None:
        self.agents[name].gone = False


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RememberedLab:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RememberedLab()


def do(lab: RememberedLab, handle: str = "it", **part: Any) -> Changed:
    return inflict(cast(Lab, lab), FaultPart.model_validate({**part, "at": 0}), handle)


def take_back(lab: RememberedLab, handle: str = "it", **part: Any) -> Changed:
    return undo(cast(Lab, lab), FaultPart.model_validate({**part, "at": 0}), handle)


def test_a_throttle_tells_the_agent_and_is_taken_back(lab: RememberedLab) -> None:
    part: dict[str, Any] = {"throttle": {"device": "b", "speed": "250mflops"}}
    assert do(lab, **part) == Changed(speeds={"b": 0.25})
    assert do(lab, handle="more", throttle={"device": "b", "slowdown": 2}).speeds == {"b": 0.125}
    assert take_back(lab, handle="more", **part).speeds == {"b": 0.25}
    assert do(lab, unthrottle="b").speeds == {"b": 1.0}
    assert lab.agents["b"].factors == [0.25, 0.125, 0.25, 1.0]
    assert lab.agents["a"].factors == []
    assert Conditions(cast(Lab, lab)).handles() == []


def test_a_device_that_boots_or_goes_on_is_told_what_is_in_force(lab: RememberedLab) -> None:
    do(lab, kill="b")
    assert do(lab, throttle={"device": "b", "slowdown": 2}).speeds == {"b": 0.5}
    assert lab.agents["b"].factors == []
    do(lab, handle="worse", degrade={"device": "b", "delay": "50ms"})
    do(lab, restart="b")
    assert lab.agents["b"].factors == [0.5]
    assert lab.booted_with["a", "b"].delay == 0.05
    do(lab, pause="b")
    do(lab, unthrottle="b")
    assert lab.agents["b"].factors == [0.5, HALTED]


def test_one_that_was_paused_meanwhile_has_its_own_speed_back(lab: RememberedLab) -> None:
    do(lab, throttle={"device": "b", "slowdown": 2})
    do(lab, pause="b")
    do(lab, unthrottle="b")
    do(lab, resume="b")
    assert lab.agents["b"].factors == [0.5, HALTED, 1.0]


def test_a_flap_takes_links_down_and_up(lab: RememberedLab) -> None:
    part: dict[str, Any] = {"flap": {"between": ["a", "b"], "down": "100ms", "up": "1s"}}
    assert set(do(lab, **part).links) == {("a", "b"), ("b", "a")}
    assert not lab.shaped["a", "b"].up
    assert lab.shaped["a", "c"].up
    take_back(lab, **part)
    assert lab.shaped == lab.experiment.links


def flap(**keys: Any) -> FaultPart:
    flap = {"between": ["a", "b"], "down": "20ms", "up": "30ms", **keys}
    return FaultPart.model_validate({"flap": flap, "at": 0})


def test_flapping_ends_with_the_links_up(lab: RememberedLab) -> None:
    up = [lab.shaped["a", "b"].up for _ in flapping(cast(Lab, lab), flap(times=2), "it")]
    assert up == [False, True, False, True]
    turns = list(flapping(cast(Lab, lab), flap(times=3), "it"))
    assert [number for number, _ in turns] == [1, 1, 2, 2, 3, 3]
    assert turns[-1][1] < 0.5


def test_flapping_that_is_broken_off_leaves_the_links_up(lab: RememberedLab) -> None:
    endless = flapping(cast(Lab, lab), flap(), "it")
    assert next(endless)[0] == 1
    assert not lab.shaped["a", "b"].up
    cast(Generator[Any, None, None], endless).close()
    assert lab.shaped == lab.experiment.links
    assert Conditions(cast(Lab, lab)).handles() == []


def test_a_trace_lies_under_the_faults(lab: RememberedLab) -> None:
    conditions = Conditions(cast(Lab, lab))
    do(lab, partition=[["a"], ["b", "c"]])
    changes = [
        Change(1.0, "link a->b rate", "1mbit", (("a", "b"),), LinkPart.model_validate({"rate": "1mbit"})),
        Change(1.0, "link a->b delay", "8ms", (("a", "b"),), LinkPart.model_validate({"delay": "8ms"})),
        Change(1.0, "device c slowdown", "4", speed=ThrottlePart(device="c", slowdown=4)),
    ]
    assert conditions.replay(changes) == Changed({("a", "b"): Link(1e6, 0.008, up=False)}, {"c": 0.25})
    do(lab, handle="hot", throttle={"device": "c", "slowdown": 2})
    assert lab.agents["c"].factors == [0.25, 0.125]
    conditions.heal()
    assert lab.shaped["a", "b"] == Link(1e6, 0.008)
    assert conditions.handles() == ["hot"], "healing is of links"
    do(lab, unthrottle="c")
    assert lab.agents["c"].factors[-1] == 0.25


def test_receivers_are_told_which_casts_they_lose(lab: RememberedLab) -> None:
    do(lab, degrade={"from": "a", "to": "b", "message_loss": "20%"})
    assert lab.agents["b"].losses == [{"a": 0.2}]
    assert lab.agents["c"].losses == []


def test_what_the_shaper_refuses_is_not_in_force(lab: RememberedLab) -> None:
    lab.refuses = True
    with pytest.raises(HostError):
        do(lab, degrade={"device": "a", "loss": "5%"})
    assert Conditions(cast(Lab, lab)).handles() == []


def test_a_handle_serves_once(lab: RememberedLab) -> None:
    do(lab, throttle={"device": "b", "slowdown": 2})
    with pytest.raises(InputError, match="'it' is in force already"):
        do(lab, throttle={"device": "c", "slowdown": 2})
