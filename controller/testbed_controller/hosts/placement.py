"""Which device runs on which host: by what the hosts have, or by the file of a lab. Scenarios name no host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import Field, model_validator

from testbed.common.errors import InputError, Key
from testbed.common.formats import size
from testbed.common.part import ConfigModel, Name
from testbed.common.plugins import Registry
from testbed.common.quantities import Duration
from testbed.faults.parts import FaultPart, TriggerPart
from testbed.hardware import DeviceSpec
from testbed.network.checks import MAX_RATE
from testbed.network.link import Link, Pair
from testbed.scenario.loading import parse, read_keys
from testbed.scenario.schema import Trial
from testbed_controller.lab.memory import RESERVED, device_memory

CORE_SPEED = 2e9
"""FLOP/s that a core is taken to give, where nobody has measured it."""
ACTIONS = {"kill_host": "kill", "restart_host": "restart", "partition_hosts": "partition"}
"""What strikes hosts, and as what it strikes their devices."""


@dataclass(frozen=True)
class Capacity:
    """What a host has for devices."""

    cores: int
    memory: float
    """Bytes."""
    speed: float = CORE_SPEED
    """FLOP/s of each core."""


@dataclass(frozen=True)
class Load:
    """What a placement asks of a host."""

    devices: tuple[str, ...]
    cores: float
    """Cores that are busy while all of its devices compute."""
    memory: float
    """Bytes that its devices take at least."""


class Placement(Protocol):
    """A function that chooses the host of each device, by name.

    ``given`` are the places that the user has chosen; the devices of a group of ``together`` share a radio cell and
    have to be on one host. `place` checks both, and the memory of the hosts.
    """

    def __call__(
        self,
        devices: Sequence[DeviceSpec],
        links: Mapping[Pair, Link],
        hosts: Mapping[str, Capacity],
        given: Mapping[str, str],
        together: Sequence[Sequence[str]],
    ) -> dict[str, str]:
        """Return device -> host."""


def _callable(found: Any) -> Placement:
    if not callable(found):
        raise TypeError(f"{found!r} must be a function")
    checked: Placement = found
    return checked


PLACEMENTS = Registry(
    "testbed.placements",
    {"by-load": "testbed_controller.hosts.placement:by_load"},
    "placement",
    _callable,
)


def place(
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
    given: Mapping[str, str],
    together: Sequence[Sequence[str]] = (),
    placement: str = "by-load",
) -> dict[str, str]:
    """Return the host of each device, as the placement of this name chooses it.

    Raises InputError for unknown names, a placement that breaks a rule of `Placement`, and a lack of memory.
    """
    names = [device.name for device in devices]
    for name, host in given.items():
        if name not in names:
            raise InputError(f"place: there is no device '{name}': {', '.join(names)}")
        if host not in hosts:
            raise InputError(f"place: {name} is to be on '{host}', which is not among the hosts {', '.join(hosts)}")
    chosen = PLACEMENTS.find(placement, ("placement",))(devices, links, hosts, given, together)
    for name in names:
        if chosen.get(name) not in hosts or chosen[name] != given.get(name, chosen[name]):
            raise InputError(f"the placement '{placement}' puts '{name}' on {chosen.get(name)!r}", ("placement",))
    for group in together:
        if len({chosen[name] for name in group}) > 1:
            raise InputError(f"place: {' and '.join(group)} share a medium, and have to be on one host")
    _check_memory(chosen, {device.name: device for device in devices}, hosts)
    return {name: chosen[name] for name in names}


def by_load(
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
    given: Mapping[str, str],
    together: Sequence[Sequence[str]] = (),
) -> dict[str, str]:
    """Place each device on the host that is least loaded for its cores.

    Of equally loaded hosts, the one with which it has the fastest links. Devices that the user has placed come first,
    then the fastest ones; the devices of a group count as one.
    """
    names = [device.name for device in devices]
    specs = {device.name: device for device in devices}
    groups = {name: tuple(group) for group in together for name in group}
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name not in given, -specs[name].speed, names.index(name))):
        if name in found:
            continue
        group = groups.get(name, (name,))
        choice = given.get(name) or min(hosts, key=lambda host: _cost(group, host, found, specs, links, hosts))
        found |= {each: given.get(each, choice) for each in group}
    return found


def _cost(
    group: Sequence[str],
    host: str,
    found: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> tuple[float, float, float]:
    """Return what a host costs a group, least first: memory that is not there, load, links that would leave it."""
    after = {**found, **dict.fromkeys(group, host)}
    load = loads(after, specs, hosts)[host]
    lacking = max(0.0, load.memory + RESERVED - hosts[host].memory)
    leaving = sum(
        link.rate or MAX_RATE
        for (a, b), link in links.items()
        if (a in group) != (b in group) and after.get(a, host) != after.get(b, host)
    )
    return lacking, round(load.cores / hosts[host].cores, 2), leaving


def loads(placed: Mapping[str, str], specs: Mapping[str, DeviceSpec], hosts: Mapping[str, Capacity]) -> dict[str, Load]:
    """Return what each host has to do."""
    found = {}
    for host, capacity in hosts.items():
        here = tuple(name for name, where in placed.items() if where == host)
        cores = sum(specs[name].speed * specs[name].processors for name in here) / capacity.speed
        found[host] = Load(here, cores, sum(device_memory(specs[name]) for name in here))
    return found


def _check_memory(placed: Mapping[str, str], specs: Mapping[str, DeviceSpec], hosts: Mapping[str, Capacity]) -> None:
    for host, load in loads(placed, specs, hosts).items():
        if load.memory > hosts[host].memory - RESERVED:
            raise InputError(
                f"{host} has {size(hosts[host].memory)} of memory, its {len(load.devices)} devices take at "
                f"least {size(load.memory)}, and {size(RESERVED)} is kept for its engine: place some "
                "elsewhere, or add a host"
            )


def described(
    placed: Mapping[str, str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> list[dict[str, Any]]:
    """Return of each host its devices, how many of its cores and bytes they ask for, and how many links leave it."""
    found = loads(placed, {device.name: device for device in devices}, hosts)
    return [
        {
            "host": host,
            "devices": list(load.devices),
            "busy": load.cores,
            "cores": hosts[host].cores,
            "memory": load.memory,
            "of": hosts[host].memory,
            "leaving": sum(placed[a] == host != placed[b] for a, b in links),
        }
        for host, load in found.items()
    ]


class HostFaultPart(ConfigModel):
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


class LabPart(ConfigModel):
    """Where runs go; without hosts to this machine's engine."""

    hosts: tuple[str, ...] = Field((), description="docker contexts, of engines in one swarm")
    place: dict[Name, str] = Field({}, description="the host of each device that is to be on a certain one")
    placement: str = Field("by-load", description="how the other devices are placed")
    faults: tuple[HostFaultPart, ...] = Field((), description="what strikes hosts, and when")

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        if not self.hosts and (self.place or self.faults):
            raise ValueError("'place' and 'faults' need 'hosts'")
        if self.faults and self.faults[0].after is not None:
            raise ValueError("there is no fault of hosts before the first one: use 'at' or 'when'")
        return self

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


def read_lab(file: Path | None, hosts: tuple[str, ...] = (), place: Mapping[str, str] | None = None) -> LabPart:
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
