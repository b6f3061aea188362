"""Breaks and mends a lab, for a scenario's script and for `testbed fault` alike.

What is wrong with the network at a moment is written beside the run's state file, so that a partition which one
process made can be healed by another. Whoever changes it holds a lock from reading it to having it applied.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from controller.lab import runstate
from controller.lab.agents import AgentGone
from controller.lab.lab import Lab
from testbed.errors import InputError
from testbed.faults.network_state import NetworkState
from testbed.faults.parts import FaultPart
from testbed.faults.script import UNDOING, FaultScript
from testbed.faults.speeds import MIN_FACTOR, Speeds
from testbed.network.link import Link, Pair, link_from

if TYPE_CHECKING:
    from controller.lab.agents import Agent
    from testbed.experiment import Experiment
    from testbed.faults.replay import Change


HALTED = MIN_FACTOR
"""Share of its own speed at which a device that is about to be paused computes: what it has begun waits as it does."""


@dataclass(frozen=True)
class Changed:
    """What became different for the devices."""

    links: dict[Pair, Link] = field(default_factory=dict)
    """The links that changed, as they are now."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Device -> share of its own speed, of those whose speed changed."""


@dataclass(frozen=True)
class _Situation:
    """Links and speeds, with everything that was done to them."""

    network: NetworkState
    speeds: Speeds
    faults: Mapping[str, FaultPart] = field(default_factory=dict)
    """What is in force, by its handle."""

    @staticmethod
    def of(experiment: Experiment) -> _Situation:
        """Return links and speeds that nothing has happened to."""
        network = NetworkState(experiment.links, first=experiment.devices[0].name)
        return _Situation(network, Speeds.of(experiment.devices))

    def strike(self, part: FaultPart, handle: str) -> _Situation:
        """Put a fault in force; raises ValueError where the handle is taken."""
        if handle in self.faults:
            raise ValueError(f"'{handle}' is in force already: undo it first, or choose another handle")
        network, speeds = self.network, self.speeds
        if part.partition is not None:
            network = network.partition(part.partition, handle)
        elif part.degrade is not None:
            network = network.degrade(part.degrade, handle)
        elif part.flap is not None:
            network = network.cut(part.flap, handle)
        elif part.throttle is not None:
            speeds = speeds.throttle(part.throttle, handle)
        return _Situation(network, speeds, {**self.faults, handle: part})

    def without(self, handles: Collection[str]) -> _Situation:
        """Take faults back."""
        network, speeds = self.network, self.speeds
        for handle in handles:
            network, speeds = network.undo(handle), speeds.undo(handle)
        return _Situation(network, speeds, {key: part for key, part in self.faults.items() if key not in handles})

    def changed(self, since: _Situation) -> Changed:
        """Return what is different now; `since` must be what this was made from."""
        return Changed(self.network.changed(since.network), self.speeds.changed(since.speeds))

    def to_json(self) -> dict[str, Any]:
        """Return everything that was done."""
        links = [
            {"source": source, "destination": destination, "link": dataclasses.asdict(link)}
            for (source, destination), link in self.network.traced.items()
        ]
        faults = {
            handle: part.model_dump(mode="json", by_alias=True, exclude_none=True)
            for handle, part in self.faults.items()
        }
        return {"links": links, "speeds": dict(self.speeds.traced), "faults": faults}

    def from_json(self, written: Mapping[str, Any]) -> _Situation:
        """Do again what was written down."""
        traced = {(each["source"], each["destination"]): link_from(each["link"]) for each in written["links"]}
        now = _Situation(replace(self.network, traced=traced), replace(self.speeds, traced=written["speeds"]))
        for handle, part in written["faults"].items():
            now = now.strike(FaultPart.model_validate(part), handle)
        return now


class Conditions:
    """The faults and settings in force on a lab's links and speeds, and the way to change them.

    Settings, as a trace or `testbed link set` make them, lie under the faults: healing a link brings back what was set
    last. All of them hold for the rest of the run, also when a device restarts.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._path = runstate.path_of(lab.run_id).with_suffix(".conditions")

    def links(self) -> dict[Pair, Link]:
        """Return every link as it should be right now."""
        network = self._situation().network
        return {pair: network.effective(pair) for pair in network.links}

    def handles(self) -> list[str]:
        """Return the faults in force, by the handles that undo them."""
        return list(self._situation().faults)

    def add(self, part: FaultPart, handle: str) -> Changed:
        """Put a partition, degradation, outage or throttle in force. Raises what the shaper raises."""

        def put(now: _Situation) -> _Situation:
            try:
                return now.strike(part, handle)
            except ValueError as error:
                raise InputError(str(error)) from None

        return self._change(put)

    def set(self, pairs: Iterable[Pair], change: Callable[[Pair, Link], Link]) -> Changed:
        """Let links have new figures of their own; ``change`` is given each link without its faults."""
        chosen = list(pairs)

        def put(now: _Situation) -> _Situation:
            network = now.network
            settled = {pair: change(pair, network.traced.get(pair) or network.links[pair]) for pair in chosen}
            return replace(now, network=replace(network, traced={**network.traced, **settled}))

        return self._change(put)

    def replay(self, changes: Sequence[Change]) -> Changed:
        """Make changes of a trace."""

        def put(now: _Situation) -> _Situation:
            for change in changes:
                now = replace(now, network=change.on_links(now.network), speeds=change.on_speeds(now.speeds))
            return now

        return self._change(put)

    def undo(self, handle: str) -> Changed:
        """Take one fault back; one that has been healed meanwhile is no error."""
        return self._change(lambda now: now.without([handle]))

    def heal(self) -> Changed:
        """Take back every fault of the network."""
        return self._change(lambda now: now.without([key for key, part in now.faults.items() if not part.throttle]))

    def unthrottle(self, device: str) -> Changed:
        """Take back every throttle of a device."""

        def his(part: FaultPart) -> bool:
            return part.throttle is not None and part.throttle.device == device

        return self._change(lambda now: now.without([key for key, part in now.faults.items() if his(part)]))

    def tell(self, name: str, *, fresh: bool = True) -> None:
        """Tell a device what its links and its speed are like right now.

        It has just been booted or deployed (``fresh``), so that it knows the scenario only, or could not be told for a
        while.
        """
        now = self._situation()
        asked = self._lab.experiment.links
        incoming = {pair: now.network.effective(pair) for pair in asked if pair[1] == name}
        if any(link.message_loss or asked[pair].message_loss for pair, link in incoming.items()):
            self._tell_links(incoming)
        if not fresh or now.speeds.factor(name) != 1.0:
            self._tell_speeds({name: now.speeds.factor(name)})

    def halt(self, name: str) -> None:
        """Let a device compute nothing until it is told otherwise: while it is frozen no paced time must pass."""
        self._tell_speeds({name: HALTED})

    def _change(self, change: Callable[[_Situation], _Situation]) -> Changed:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._situation()
            after = change(before)
            changed = after.changed(before)
            if changed.links:
                self._lab.shaper.set(changed.links)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(after.to_json()))
            draft.replace(self._path)
            was = before.network
            luck = {
                pair: link
                for pair, link in changed.links.items()
                if link.message_loss != was.effective(pair).message_loss
            }
            self._tell_links(luck)
            self._tell_speeds(changed.speeds)
        return changed

    def _tell_links(self, links: Mapping[Pair, Link]) -> None:
        """Tell the receivers which fraction of casts they lose whole: the one thing of a link that agents do."""
        by_receiver: dict[str, dict[str, float]] = {}
        for (source, destination), link in links.items():
            by_receiver.setdefault(destination, {})[source] = link.message_loss
        for name, fractions in by_receiver.items():
            # One that is dead, or whose program is not there yet, is told when it is deployed.
            with suppress(AgentGone):
                agent = self._agent(name)
                if agent is not None and agent.health()["state"] != "idle":
                    agent.set_message_loss(fractions)

    def _tell_speeds(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            with suppress(AgentGone):
                if (agent := self._agent(name)) is not None:
                    agent.set_speed(factor)

    def _agent(self, name: str) -> Agent | None:
        """Return a device's agent, if it runs; one that is dead or paused is told (`tell`) once it is there again."""
        if self._lab.devices[name].state != "running":
            self._lab.refresh()
        return self._lab.agent(name) if self._lab.devices[name].state == "running" else None

    def _situation(self) -> _Situation:
        untouched = _Situation.of(self._lab.experiment)
        try:
            return untouched.from_json(json.loads(self._path.read_text()))
        except FileNotFoundError:
            return untouched


def inflict(lab: Lab, part: FaultPart, handle: str) -> Changed:
    """Do what a fault says, now; return what changed for the devices.

    A flap is one turn of it: its links go down. Restarting a device boots it with links and speed as they are in
    force; starting its program again is up to whoever runs one.
    """
    conditions = Conditions(lab)
    match part.action:
        case "kill":
            lab.kill(str(part.kill))
        case "restart":
            lab.start(str(part.restart), conditions.links())
            conditions.tell(str(part.restart))
        case "pause":
            conditions.halt(str(part.pause))
            lab.pause(str(part.pause))
        case "resume":
            lab.resume(str(part.resume))
            conditions.tell(str(part.resume), fresh=False)
        case "heal":
            return conditions.heal()
        case "unthrottle":
            return conditions.unthrottle(str(part.unthrottle))
        case _:
            return conditions.add(part, handle)
    return Changed()


def flapping(lab: Lab, part: FaultPart, handle: str) -> Iterator[tuple[int, float]]:
    """Take a flap's links down and up until it is over, from now on; they are up when this ends, however it ends.

    Yields after each change how often they went down so far, and by how many seconds the latest of the changes was
    late.
    """
    script, began = FaultScript([part]), time.monotonic()
    turns, late = 0, 0.0
    try:
        while (deadline := script.next_deadline()) is not None:
            time.sleep(max(0.0, began + deadline - time.monotonic()))
            for strike in script.due(deadline):
                (inflict if strike.phase == "strike" else undo)(lab, part, handle)
                actual = time.monotonic() - began
                script.done(strike, actual)
                turns, late = turns + (strike.phase == "strike"), max(late, actual - deadline)
                yield turns, late
    finally:
        Conditions(lab).undo(handle)


def undo(lab: Lab, part: FaultPart, handle: str) -> Changed:
    """Take back what `inflict` did."""
    if part.action in UNDOING:
        mending = UNDOING[part.action]
        return inflict(lab, FaultPart.model_validate({mending: getattr(part, part.action), "at": 0}), handle)
    return Conditions(lab).undo(handle)
