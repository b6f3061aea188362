"""A fake lab that stands for containers: its engine, shaper and agents only record calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from testbed.common.errors import HostError
from testbed.network.link import Link, Pair
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed_controller.lab.clients import AgentGone


class RecordingAgent:
    def __init__(self) -> None:
        self.factors: list[float] = []
        self.losses: list[Mapping[str, float]] = []
        self.slowness: list[Mapping[str, float]] = []
        self.unreachable = False
        self.leaving = False

    def health(self) -> dict[str, Any]:
        return {"state": "finished" if self.leaving else "running"}

    def leave(self) -> None:
        self.leaving = True

    def set_speed(self, factor: float) -> None:
        # A paused container does not respond.
        if self.unreachable:
            raise AgentGone("paused")
        self.factors.append(factor)

    def set_links(
        self, message_loss: Mapping[str, float], slowness: Mapping[str, float]
    ) -> None:
        if message_loss:
            self.losses.append(message_loss)
        if slowness:
            self.slowness.append(slowness)


class RecordingLab:
    """Records the calls that would reach containers, the shaper and agents."""

    def __init__(self) -> None:
        scenario = {
            "name": "conditions",
            "devices": {
                "a": {"speed": "1gflops"},
                "b": {"speed": "1gflops"},
                "c": {"speed": "1gflops"},
            },
            "network": {"link": {"rate": "10mbit", "delay": "5ms"}},
            "workload": {
                "task": "infer",
                "model": {"name": "mlp"},
                "method": {"name": "exchange"},
            },
        }
        self.run_id = "run-1"
        self.experiment = trials(Scenario.model_validate(scenario))[0].experiment
        self.agents = {name: RecordingAgent() for name in "abc"}
        self.devices = {name: SimpleNamespace(state="running") for name in "abc"}
        self.shaped: dict[Pair, Link] = dict(self.experiment.links)
        # The lab is its own shaper, whose method `set` changes links.
        self.shaper = self
        self.booted_with: dict[Pair, Link] = {}
        self.refuses_links = False
        self.actions: list[str] = []

    def states(self) -> dict[str, str]:
        return {name: device.state for name, device in self.devices.items()}

    def set(self, links: Mapping[Pair, Link]) -> None:
        if self.refuses_links:
            raise HostError("the rule did not take")
        self.shaped.update(links)

    def agent(self, name: str) -> RecordingAgent:
        return self.agents[name]

    def refresh(self) -> None:
        pass

    def kill(self, name: str) -> None:
        self.actions.append(f"kill {name}")
        self.devices[name].state = "exited"

    def start(self, name: str) -> None:
        self.actions.append(f"start {name}")
        self.devices[name].state = "running"

    def admit(self, name: str, links: Mapping[Pair, Link]) -> None:
        self.booted_with = dict(links)

    def pause(self, name: str) -> None:
        self.devices[name].state = "paused"
        self.agents[name].unreachable = True

    def resume(self, name: str) -> None:
        self.devices[name].state = "running"
        self.agents[name].unreachable = False
