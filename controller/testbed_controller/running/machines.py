"""Carries out faults, traces and settings on containers, for a run's scripts and for commands from outside alike.

The links and speeds in force are written beside the run's state file, so that a partition which one process made can
be healed by another. A lock is held from reading them until they have been applied.
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
"""Share of its own speed at which a device that is about to be paused computes: what it has begun waits as it does."""
RETIRE_SECONDS = 60.0
"""How long a device may take to hand over what it holds."""
RETIRE_INTERVAL = 0.1
_SLOWNESS_STEP = 0.5
"""Seconds there and back: changes within a step are not sent. Time-outs have two seconds to spare, and a trace of a
radio link changes its rate many times a second."""
_STATES: Mapping[str, DeviceState] = {"running": "up", "paused": "paused"}
"""In the engine's words; in any other state a device is down."""


@dataclass
class _LinkChanges:
    """Changes of its links that a device has to know, by peer."""

    message_loss: dict[str, float] = field(default_factory=dict)
    slowness: dict[str, float] = field(default_factory=dict)


class DockerFaultTarget:
    """The devices of a lab, their links and their speeds (`testbed.faults.conditions.FaultTarget`).

    Links and speeds stay as they are for the rest of the run, also when a device restarts. ``admit`` is done to a
    device that has been switched on; it has to end in `inform`.
    """

    def __init__(self, lab: AnyLab, admit: Callable[[str], None] | None = None) -> None:
        self.run_id = lab.run_id
        self.experiment = lab.experiment
        self._lab = lab
        self._admit = admit or self._shape
        self._path = runstate.path_of(lab.run_id).with_suffix(".conditions")

    @property
    def shown(self) -> SystemState:
        """The links and speeds in force."""
        try:
            return _read(json.loads(self._path.read_text()), self.untouched)
        except FileNotFoundError:
            return self.untouched

    @property
    def untouched(self) -> SystemState:
        """The links and speeds of the scenario."""
        return SystemState.of(self.experiment.devices, self.experiment.links, self.experiment.radio)

    def links(self) -> dict[Pair, Link]:
        """Return every link as it should be right now."""
        shown = self.shown
        return {pair: shown.link(pair) for pair in shown.links}

    def states(self) -> dict[str, DeviceState]:
        """Ask the engine for the state of every device."""
        return {name: _STATES.get(state, "down") for name, state in self._lab.states().items()}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other threads and processes from changing links and speeds."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def show(self, now: SystemState, changed: StateDiff) -> None:
        """Shape the links that changed, write down what is in force, and give the agents what is theirs to do.

        What the shaper refuses is not in force. A device that is deployed meanwhile reads what was written.
        """
        before = self.shown
        if changed.links:
            self._lab.shaper.set(changed.links)
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(_written(now)))
        draft.replace(self._path)
        self._send_links(changed.links, before.link, now.link)
        self._send_speeds(changed.speeds)

    def kill(self, device: str) -> None:
        """End the container of a device at once."""
        self._lab.kill(device)

    def restart(self, device: str) -> None:
        """Boot a device with links and speed as they are in force."""
        self._lab.start(device)
        self._admit(device)

    def _shape(self, device: str) -> None:
        self._lab.admit(device, self.links())
        self.inform(device)

    def retire(self, device: str) -> None:
        """Ask a device to leave, wait until its program has returned, and switch it off.

        Raises `TestbedError` where the program goes on.
        """
        with suppress(AgentGone):
            if (agent := self._agent(device)) is not None:
                agent.leave()
                end = time.monotonic() + RETIRE_SECONDS
                while agent.health()["state"] == "running":
                    if time.monotonic() > end:
                        raise TestbedError(f"{device} was asked to leave and still runs after {RETIRE_SECONDS:g} s")
                    time.sleep(RETIRE_INTERVAL)
        self.kill(device)

    def pause(self, device: str) -> None:
        """Freeze a device; it computes nothing from then on, since while it is frozen no paced time must pass."""
        self._send_speeds({device: HALTED})
        self._lab.pause(device)

    def resume(self, device: str) -> None:
        """Let a frozen device go on, at the speed that is in force."""
        self._lab.resume(device)
        self.inform(device, fresh=False)

    def inform(self, name: str, *, fresh: bool = True) -> None:
        """Send a device what its links and its speed are like right now.

        It has just been booted or deployed (``fresh``), so that it knows nothing but its deployment, or could not be
        reached for a while.
        """
        now = self.shown
        own = [pair for pair in now.links if name in pair]
        known = now.links.__getitem__ if fresh else None
        self._send_links(own, known, now.link, [name])
        if not fresh or now.factor(name) != 1.0:
            self._send_speeds({name: now.factor(name)})

    def _send_links(
        self,
        pairs: Iterable[Pair],
        before: Callable[[Pair], Link] | None,
        now: Callable[[Pair], Link],
        receivers: Collection[str] | None = None,
    ) -> None:
        """Send devices what is theirs to do about links that differ from those ``before``; None: it is not known.

        A receiver loses casts, and both ends of a slow connection wait longer. ``receivers`` None: all devices.
        """
        changes: dict[str, _LinkChanges] = defaultdict(_LinkChanges)
        for source, destination in pairs:
            there, back = (source, destination), (destination, source)
            if before is None or now(there).message_loss != before(there).message_loss:
                changes[destination].message_loss[source] = now(there).message_loss
            if back in self.experiment.links:
                found = slowness(now(there), now(back))
                if before is None or _coarse(found) != _coarse(slowness(before(there), before(back))):
                    changes[source].slowness[destination] = found
                    changes[destination].slowness[source] = found
        for name, change in changes.items():
            if receivers is None or name in receivers:
                self._send_change(name, change)

    def _send_change(self, name: str, change: _LinkChanges) -> None:
        # A device that is dead, or whose program is not there yet, gets the links when it is deployed.
        with suppress(AgentGone):
            agent = self._agent(name)
            if agent is not None and agent.health()["state"] != "idle":
                agent.set_links(change.message_loss, change.slowness)

    def _send_speeds(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            with suppress(AgentGone):
                if (agent := self._agent(name)) is not None:
                    agent.set_speed(factor)

    def _agent(self, name: str) -> Agent | None:
        """Return a device's agent, if it runs; one that is dead or paused learns of it once it is there again."""
        if self._lab.devices[name].state != "running":
            self._lab.refresh()
        return self._lab.agent(name) if self._lab.devices[name].state == "running" else None


def _coarse(seconds: float) -> int:
    return int(seconds / _SLOWNESS_STEP)


def _written(now: SystemState) -> dict[str, Any]:
    """Return as JSON what was done to links and speeds."""
    in_force = {
        handle: ActionPart.of(action).model_dump(mode="json", by_alias=True, exclude_none=True)
        for handle, action in now.in_force.items()
    }
    return {"links": links_to_json(now.set_links), "speeds": dict(now.set_speeds), "in_force": in_force}


def _read(written: Mapping[str, Any], untouched: SystemState) -> SystemState:
    """Return the conditions that were written down."""
    return replace(
        untouched,
        set_links=links_from_json(written["links"]),
        set_speeds=written["speeds"],
        in_force={handle: ActionPart.model_validate(part).action for handle, part in written["in_force"].items()},
    )


def events_of(step: RecordedStep, changed: StateDiff, speeds: Mapping[str, float]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and fields of each event that records a step and what it changed; see `changes_of`."""
    return [*step.events(), *changes_of(changed, speeds)]


def changes_of(changed: StateDiff, speeds: Mapping[str, float]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and fields of each event that records new figures of links and devices.

    ``speeds`` are those of the scenario, in FLOP/s.
    """
    links = [("link", link_fields(*pair, link)) for pair, link in changed.links.items()]
    factors = [
        ("speed", {"target": name, "factor": factor, "speed": factor * speeds[name]})
        for name, factor in changed.speeds.items()
    ]
    return [*links, *factors]
