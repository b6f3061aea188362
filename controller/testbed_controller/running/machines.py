"""Faults, link traces and settings applied to containers, by the scenario's timed faults and by manual commands.

The active links and speeds are stored beside the run's state file, so one process can heal a network partition that
another process made. A process that makes a change holds a lock from reading the file until the change has been
applied.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from testbed.common.errors import TestbedError
from testbed.faults.conditions import DeviceState, RecordedStep, StateDiff, SystemState
from testbed.faults.device_actions import MIN_FACTOR
from testbed.faults.parts import ActionPart
from testbed.network.link import Link, Pair, links_from_json, links_to_json, slowness
from testbed.trace.events import link_fields
from testbed_controller.hosts.lab import AnyLab
from testbed_controller.lab import runstate
from testbed_controller.lab.clients import AgentGone

if TYPE_CHECKING:
    from testbed_controller.lab.clients import Agent

HALTED = MIN_FACTOR
"""Speed factor of a device that is about to be paused. Pacing uses the wall clock, so a frozen computation at full
speed would end as if it had continued."""
RETIRE_SECONDS = 60.0
"""Time for a device to hand over its state, in seconds."""
RETIRE_INTERVAL = 0.1
"""Interval of checks whether a device has handed over, in seconds."""
_SLOWNESS_STEP = 0.5
"""Minimum change of a round-trip time that is sent to devices, in seconds. Time-outs have two seconds to spare, and a
link trace of a radio changes the rate many times a second."""
_STATES: Mapping[str, DeviceState] = {"running": "up", "paused": "paused"}
"""Device states by the engine's container states; any other means down."""


@dataclass
class _LinkChanges:
    """Link changes for one device, by peer."""

    message_loss: dict[str, float] = field(default_factory=dict)
    """Share of lost broadcasts."""
    slowness: dict[str, float] = field(default_factory=dict)
    """Round-trip time of a few packets in seconds, which extends time-outs."""


class DockerFaultTarget:
    """The devices, links and speeds of a lab; implements `testbed.faults.conditions.FaultTarget`.

    Links and speeds persist for the rest of the run, even if a device restarts. ``admit`` connects a started device to
    the network and must end with a call of `inform`. The default, without a run, shapes the device's links and informs
    the device.
    """

    def __init__(self, lab: AnyLab, admit: Callable[[str], None] | None = None) -> None:
        self.run_id = lab.run_id
        self.experiment = lab.experiment
        self._lab = lab
        self._admit = admit or self._shape_links
        self._path = runstate.path_of(lab.run_id).with_suffix(".conditions")

    @property
    def current(self) -> SystemState:
        """The active links and speeds."""
        try:
            return _from_json(json.loads(self._path.read_text()), self.scenario_state)
        except FileNotFoundError:
            return self.scenario_state

    @property
    def scenario_state(self) -> SystemState:
        """The links and speeds of the scenario."""
        return SystemState.of(
            self.experiment.devices, self.experiment.links, self.experiment.radio
        )

    def links(self) -> dict[Pair, Link]:
        """Return every link in the current state."""
        state = self.current
        return {pair: state.link(pair) for pair in state.links}

    def states(self) -> dict[str, DeviceState]:
        """Return the state of every device from the engine."""
        states = self._lab.states()
        return {name: _STATES.get(state, "down") for name, state in states.items()}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Prevent other threads and processes from changing links and speeds."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def apply(self, state: SystemState, changed: StateDiff) -> None:
        """Shape the changed links, store the new state, and notify the agents.

        A device that is deployed between storing and notifying reads the stored state.
        """
        # The devices know the links of this state, so only differences are sent.
        before = self.current
        # Shape first: the shaper may refuse the change, and nothing must be stored then.
        if changed.links:
            self._lab.shaper.set(changed.links)
        # Replace the file in one step: another process may be reading it.
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(_to_json(state)))
        draft.replace(self._path)
        self._send_links(changed.links, before.link, state.link)
        self._send_speeds(changed.speeds)

    def kill(self, device: str) -> None:
        """Stop a device abruptly."""
        self._lab.kill(device)

    def restart(self, device: str) -> None:
        """Start a device with the current links and speed."""
        self._lab.start(device)
        self._admit(device)

    def _shape_links(self, device: str) -> None:
        self._lab.admit(device, self.links())
        self.inform(device)

    def retire(self, device: str) -> None:
        """Request a graceful shutdown, wait for the end of the program, and stop the device.

        Raises `TestbedError` if the program continues.
        """
        # A device that is down already has nothing to hand over.
        with suppress(AgentGone):
            agent = self._agent(device)
            if agent is not None:
                agent.leave()
                _wait_for_program(agent, device)
        self.kill(device)

    def pause(self, device: str) -> None:
        """Freeze a device after slowing down the computation, see `HALTED`."""
        self._send_speeds({device: HALTED})
        self._lab.pause(device)

    def resume(self, device: str) -> None:
        """Continue a frozen device at the current speed."""
        self._lab.resume(device)
        self.inform(device, is_newly_booted=False)

    def inform(self, name: str, *, is_newly_booted: bool = True) -> None:
        """Send a device the current speed and link properties.

        A device that was just booted or deployed (``is_newly_booted``) knows only its deployment, so only differences
        are sent. Any other device was unreachable for a while, so everything is sent.
        """
        state = self.current
        own_pairs = [pair for pair in state.links if name in pair]
        # The deployment has the links of the scenario.
        known_link = state.links.__getitem__ if is_newly_booted else None
        self._send_links(own_pairs, known_link, state.link, [name])
        if not is_newly_booted or state.speed_factor(name) != 1.0:
            self._send_speeds({name: state.speed_factor(name)})

    def _send_links(
        self,
        pairs: Iterable[Pair],
        known_link: Callable[[Pair], Link] | None,
        current_link: Callable[[Pair], Link],
        receivers: Collection[str] | None = None,
    ) -> None:
        """Notify devices of links that differ from those that they know, by ``known_link``; None sends all links.

        The share of lost broadcasts is sent to the receiver of a link, which drops them. The round-trip time is sent to
        both ends, which extend their time-outs. ``receivers`` limits the notified devices; None notifies all.
        """
        changes: dict[str, _LinkChanges] = defaultdict(_LinkChanges)
        for source, destination in pairs:
            forward = (source, destination)
            backward = (destination, source)
            message_loss = current_link(forward).message_loss
            has_same_loss = (
                known_link is not None
                and known_link(forward).message_loss == message_loss
            )
            if not has_same_loss:
                changes[destination].message_loss[source] = message_loss
            # A connection needs both directions, and its time-outs follow from the sum of both.
            if backward not in self.experiment.links:
                continue
            round_trip = slowness(current_link(forward), current_link(backward))
            known_steps = None
            if known_link is not None:
                known_round_trip = slowness(known_link(forward), known_link(backward))
                known_steps = _slowness_steps(known_round_trip)
            if known_steps != _slowness_steps(round_trip):
                changes[source].slowness[destination] = round_trip
                changes[destination].slowness[source] = round_trip
        for name, change in changes.items():
            if receivers is None or name in receivers:
                self._send_change(name, change)

    def _send_change(self, name: str, change: _LinkChanges) -> None:
        # A dead device, or one without a program, receives the links with its deployment.
        with suppress(AgentGone):
            agent = self._agent(name)
            if agent is not None and agent.health()["state"] != "idle":
                agent.set_links(change.message_loss, change.slowness)

    def _send_speeds(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            # A device that is down gets its speed after its start (see `inform`).
            with suppress(AgentGone):
                agent = self._agent(name)
                if agent is not None:
                    agent.set_speed(factor)

    def _agent(self, name: str) -> Agent | None:
        """Return the agent of a running device; None for other devices, which are informed after their start."""
        # The last queried state may be older than a restart from another terminal.
        if self._lab.devices[name].state != "running":
            self._lab.refresh()
        if self._lab.devices[name].state != "running":
            return None
        return self._lab.agent(name)


def _wait_for_program(agent: Agent, device: str) -> None:
    end = time.monotonic() + RETIRE_SECONDS
    while agent.health()["state"] == "running":
        if time.monotonic() > end:
            raise TestbedError(
                f"{device} did not finish its graceful shutdown within {RETIRE_SECONDS:g} s"
            )
        time.sleep(RETIRE_INTERVAL)


def _slowness_steps(seconds: float) -> int:
    """Return a round-trip time as a whole number of `_SLOWNESS_STEP`, ignoring smaller differences."""
    return int(seconds / _SLOWNESS_STEP)


def _to_json(state: SystemState) -> dict[str, Any]:
    """Return the part of a state differing from the scenario, as JSON values."""
    in_force = {}
    for handle, action in state.in_force.items():
        part = ActionPart.of(action)
        in_force[handle] = part.model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
    return {
        "links": links_to_json(state.set_links),
        "speeds": dict(state.set_speeds),
        "in_force": in_force,
    }


def _from_json(document: Mapping[str, Any], scenario_state: SystemState) -> SystemState:
    """Return the state stored by `_to_json`."""
    in_force = {}
    for handle, part in document["in_force"].items():
        in_force[handle] = ActionPart.model_validate(part).action
    return replace(
        scenario_state,
        set_links=links_from_json(document["links"]),
        set_speeds=document["speeds"],
        in_force=in_force,
    )


def step_events(
    step: RecordedStep, changed: StateDiff, speeds: Mapping[str, float]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and fields of the events for a step and the resulting changes; see `change_events`."""
    return [*step.events(), *change_events(changed, speeds)]


def change_events(
    changed: StateDiff, speeds: Mapping[str, float]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and fields of the events for changed links and devices.

    ``speeds`` are those of the scenario, in FLOP/s.

    >>> change_events(StateDiff(speeds={"worker1": 0.5}), {"worker1": 1e9})
    [('speed', {'target': 'worker1', 'factor': 0.5, 'speed': 500000000.0})]
    """
    events: list[tuple[str, dict[str, Any]]] = []
    for pair, link in changed.links.items():
        events.append(("link", link_fields(*pair, link)))
    for name, factor in changed.speeds.items():
        speed = factor * speeds[name]
        events.append(("speed", {"target": name, "factor": factor, "speed": speed}))
    return events
