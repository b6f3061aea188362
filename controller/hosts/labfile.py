"""The file of a lab: on which hosts runs go, where devices are, and what strikes hosts. Scenarios name no host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from testbed.common.errors import InputError, Key
from testbed.common.part import Name, Part
from testbed.common.quantities import Duration
from testbed.faults.parts import FaultPart, TriggerPart
from testbed.scenario.loading import parse, read_keys
from testbed.scenario.schema import Trial

ACTIONS = {"kill_host": "kill", "restart_host": "restart", "partition_hosts": "partition"}
"""What strikes hosts, and as what it strikes their devices."""


class HostFaultPart(Part):
    """One thing that strikes all devices of hosts, and when; see `FaultPart`."""

    kill_host: str | None = Field(None, description="all devices of the host end at once")
    restart_host: str | None = Field(None, description="all devices of the host boot again")
    partition_hosts: tuple[str, ...] | None = Field(
        None, min_length=1, description="hosts whose devices reach neither each other's nor any other"
    )
    at: Duration | None = Field(None, description="time since the start of the workload")
    when: TriggerPart | None = Field(None, description="a moment of the training")
    after: Duration | None = Field(None, description="time since the fault before it in the file struck")
    for_: Duration | None = Field(None, alias="for", description="undone after this time")

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if sum(getattr(self, name) is not None for name in ACTIONS) != 1:
            raise ValueError("a fault of hosts has exactly one of " + ", ".join(ACTIONS))
        return self

    def of_devices(self, placed: Mapping[str, str]) -> list[FaultPart]:
        """Return what a scenario would say of it where devices are ``placed`` so, by name.

        Raises InputError for a host without devices, and for what a scenario could not say either.
        """
        action = next(name for name in ACTIONS if getattr(self, name) is not None)
        named = getattr(self, action)
        groups = [[name for name, host in placed.items() if host == each] for each in _several(named)]
        for host, devices in zip(_several(named), groups, strict=True):
            if not devices:
                raise InputError(f"{action}: no device is on '{host}': {', '.join(sorted({*placed.values()}))}")
        moment = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={*ACTIONS})
        if action == "partition_hosts":
            return [parse(FaultPart, {"partition": groups, **moment})]
        # Those after the first strike with it.
        others = {**moment, "after": 0} if "after" in moment else moment
        return [
            parse(FaultPart, {ACTIONS[action]: device, **(others if number else moment)})
            for number, device in enumerate(groups[0])
        ]


class LabPart(Part):
    """Where runs go; without hosts to this machine's engine."""

    hosts: tuple[str, ...] = Field((), description="docker contexts, of engines in one swarm")
    place: dict[Name, str] = Field({}, description="the host of each device that is to be on a certain one")
    faults: tuple[HostFaultPart, ...] = Field((), description="what strikes hosts, and when")

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        if not self.hosts and (self.place or self.faults):
            raise ValueError("'place' and 'faults' need 'hosts'")
        if self.faults and self.faults[0].after is not None:
            raise ValueError("there is no fault of hosts before the first one: use 'at' or 'when'")
        return self

    @property
    def places(self) -> dict[str, Any]:
        """The options ``hosts`` and ``place`` of a run on containers."""
        return {"hosts": self.hosts, "place": self.place}

    def struck(self, trial: Trial, placed: Mapping[str, str]) -> Trial:
        """Return a trial with the faults of the hosts among its own, as those of the devices ``placed`` there.

        So they are checked, recorded and undone as all others. Raises InputError as `HostFaultPart.of_devices`.
        """
        faults, places = [*trial.scenario.faults], dict[Key, str]()
        for number, fault in enumerate(self.faults):
            try:
                found = fault.of_devices(placed)
            except InputError as error:
                raise InputError(f"--lab: faults.{number}: {error}") from None
            places |= {("faults", len(faults) + index): f"--lab: faults.{number}" for index in range(len(found))}
            faults += found
        source = trial.scenario.source.override(places)
        scenario = trial.scenario.model_copy(update={"faults": tuple(faults)}).located(source)
        return replace(trial, scenario=scenario, experiment=replace(trial.experiment, faults=tuple(faults)))


def read(file: Path | None, hosts: tuple[str, ...] = (), place: Mapping[str, str] | None = None) -> LabPart:
    """Return what a file says, and what was given beside it, which counts more; raises `InputError`."""
    keys: dict[str, Any] = {} if file is None else dict(read_keys(file))
    if hosts:
        keys["hosts"] = [*hosts]
    if place:
        keys["place"] = {**(keys.get("place") or {}), **place}
    try:
        return parse(LabPart, keys)
    except InputError as error:
        raise InputError(f"{file or '--hosts'}: {error}") from None


def _several(named: str | tuple[str, ...]) -> tuple[str, ...]:
    return (named,) if isinstance(named, str) else named
