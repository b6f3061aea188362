"""Breaks and mends a lab, for a scenario's script and for `testbed fault` alike.

What is wrong with the network at a moment is written beside the run's state file, so that a partition which one
process made can be healed by another. Whoever changes it holds a lock from reading it to having it applied.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from controller import runstate
from controller.agents import AgentGone
from controller.lab import Lab
from testbed.errors import InputError
from testbed.faults import UNDOING
from testbed.network.link import Link, Pair, link_from
from testbed.network.state import NetworkState
from testbed.scenario.schema import FaultPart

SETTING = "set "
"""Handles that begin so are new figures for a link, not faults: they lie under the faults, and `heal` leaves them."""


class Conditions:
    """The faults and settings in force on a lab's links, and the way to change them."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._path = runstate.path_of(lab.run_id).with_suffix(".conditions")

    def links(self) -> dict[Pair, Link]:
        """Return every link as it should be right now."""
        state = self._state(_read(self._path))
        return {pair: state.effective(pair) for pair in state.links}

    def handles(self) -> list[str]:
        """Return the faults in force, by the handles that undo them."""
        return [handle for handle in _read(self._path) if not handle.startswith(SETTING)]

    def add(self, part: FaultPart, handle: str) -> dict[Pair, Link]:
        """Put a partition or degradation in force; return the links that changed. Raises what the shaper raises."""
        with self._changing() as conditions:
            if handle in conditions:
                raise InputError(f"'{handle}' is in force already: undo it first")
            return self._apply(conditions, {**conditions, handle: _written(part)})

    def set(self, pairs: Iterable[Pair], change: Callable[[Pair, Link], Link]) -> dict[Pair, Link]:
        """Let links have new figures, under whatever faults are in force on them; return the links that changed.

        ``change`` is given each link without its faults. What it returns holds for the rest of the run: what faults
        do later, and the restart of a device, starts from it.
        """
        with self._changing() as conditions:
            links = self._settled(conditions)
            settings = {
                f"{SETTING}{source} {destination}": dataclasses.asdict(
                    change((source, destination), links[source, destination])
                )
                for source, destination in pairs
            }
            return self._apply(conditions, {**conditions, **settings})

    def undo(self, handle: str) -> dict[Pair, Link]:
        """Take one back; one that has been healed meanwhile is no error."""
        with self._changing() as conditions:
            return self._apply(conditions, {key: value for key, value in conditions.items() if key != handle})

    def heal(self) -> dict[Pair, Link]:
        """Take back every fault of the network."""
        with self._changing() as conditions:
            kept = {key: value for key, value in conditions.items() if key.startswith(SETTING)}
            return self._apply(conditions, kept)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield _read(self._path)

    def _apply(self, before: dict[str, Any], after: dict[str, Any]) -> dict[Pair, Link]:
        then, now = self._state(before), self._state(after)
        changed = {pair: link for pair in now.links if (link := now.effective(pair)) != then.effective(pair)}
        if changed:
            self._lab.shaper.set(changed)
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(after))
        draft.replace(self._path)
        luck = {pair: link for pair, link in changed.items() if link.message_loss != then.effective(pair).message_loss}
        self._tell(luck)
        return changed

    def tell(self, name: str) -> None:
        """Tell a device what its links are like right now: it was just deployed as the scenario says, or was paused."""
        asked = self._lab.experiment.links
        incoming = {pair: link for pair, link in self.links().items() if pair[1] == name}
        if any(link.message_loss or asked[pair].message_loss for pair, link in incoming.items()):
            self._tell(incoming)

    def _tell(self, links: Mapping[Pair, Link]) -> None:
        """Tell the receivers which fraction of casts they lose whole: the one thing of a link that agents do."""
        by_receiver: dict[str, dict[str, float]] = {}
        for (source, destination), link in links.items():
            by_receiver.setdefault(destination, {})[source] = link.message_loss
        for name, fractions in by_receiver.items():
            agent = self._lab.agent(name)
            # One that is dead, or whose program is not there yet, is told when it is deployed.
            with suppress(AgentGone):
                if agent.health()["state"] != "idle":
                    agent.set_message_loss(fractions)

    def _settled(self, conditions: dict[str, Any]) -> dict[Pair, Link]:
        """Return the links as the scenario and the settings made since have them, without faults."""
        links = dict(self._lab.experiment.links)
        for handle, written in conditions.items():
            if handle.startswith(SETTING):
                source, destination = handle.removeprefix(SETTING).split(" ")
                links[source, destination] = link_from(written)
        return links

    def _state(self, conditions: dict[str, Any]) -> NetworkState:
        state = NetworkState(self._settled(conditions), first=self._lab.experiment.devices[0].name)
        for handle, written in conditions.items():
            if handle.startswith(SETTING):
                continue
            part = FaultPart.model_validate(written)
            if part.partition is not None:
                state = state.partition(part.partition, handle)
            elif part.degrade is not None:
                state = state.degrade(part.degrade, handle)
        return state


def _written(part: FaultPart) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        conditions = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    assert isinstance(conditions, dict)
    return conditions


def inflict(lab: Lab, part: FaultPart, handle: str) -> dict[Pair, Link]:
    """Do what a fault says, now; return the links that it changed.

    Restarting a device boots it with the links in force; starting its program again is up to whoever runs one.
    """
    match part.action:
        case "kill":
            lab.kill(str(part.kill))
        case "restart":
            lab.start(str(part.restart), Conditions(lab).links())
        case "pause":
            lab.pause(str(part.pause))
        case "resume":
            lab.resume(str(part.resume))
            Conditions(lab).tell(str(part.resume))
        case "heal":
            return Conditions(lab).heal()
        case _:
            return Conditions(lab).add(part, handle)
    return {}


def undo(lab: Lab, part: FaultPart, handle: str) -> dict[Pair, Link]:
    """Take back what `inflict` did."""
    if part.action in UNDOING:
        mending = UNDOING[part.action]
        return inflict(lab, FaultPart.model_validate({mending: getattr(part, part.action), "at": 0}), handle)
    return Conditions(lab).undo(handle)
