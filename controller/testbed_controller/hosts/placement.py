"""Assignment of devices to hosts, by load or by a lab file. Scenarios never name hosts."""

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
"""Assumed speed of a core in FLOP/s; it compares devices with hosts of unknown speed."""
DEVICE_ACTIONS = {
    "kill_host": "kill",
    "restart_host": "restart",
    "partition_hosts": "partition",
}
"""For each fault of a host, the corresponding fault of its devices."""


@dataclass(frozen=True)
class Capacity:
    """The capacity of a host for devices."""

    cores: int
    memory: float
    """Bytes."""
    speed: float = CORE_SPEED
    """FLOP/s of each core."""


@dataclass(frozen=True)
class Load:
    """The load of a host in a placement."""

    devices: tuple[str, ...]
    cores: float
    """Number of busy cores while all devices compute."""
    memory: float
    """Minimum memory of the devices in bytes."""


class Placement(Protocol):
    """A function that chooses the host of each device, by name.

    ``given`` are the user's choices; the devices of each group in ``together`` share a radio cell and need a common
    host. `place` verifies both, and the memory of the hosts.
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


def _check_callable(function: Any) -> Placement:
    if not callable(function):
        raise TypeError(f"{function!r} must be a function")
    checked: Placement = function
    return checked


PLACEMENTS = Registry(
    "testbed.placements",
    {"by-load": "testbed_controller.hosts.placement:by_load"},
    "placement",
    _check_callable,
)


def place(
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
    given: Mapping[str, str],
    together: Sequence[Sequence[str]] = (),
    placement: str = "by-load",
) -> dict[str, str]:
    """Return the host of each device, chosen by the named placement.

    Raises InputError for unknown names, a placement that breaks a rule of `Placement`, and insufficient memory.
    """
    specs = {device.name: device for device in devices}
    names = list(specs)
    _check_given(names, hosts, given)
    choose = PLACEMENTS.find(placement, ("placement",))
    chosen = choose(devices, links, hosts, given, together)
    # A placement may come from a package, so its result is checked.
    for name in names:
        host = chosen.get(name)
        if host not in hosts:
            raise InputError(
                f"the placement '{placement}' puts '{name}' on {host!r}; the hosts are {', '.join(hosts)}",
                ("placement",),
            )
        if host != given.get(name, host):
            raise InputError(
                f"the placement '{placement}' puts '{name}' on {host!r} instead of {given[name]!r}",
                ("placement",),
            )
    for group in together:
        if len({chosen[name] for name in group}) > 1:
            raise InputError(
                f"place: {' and '.join(group)} share a medium and must be on the same host"
            )
    _check_memory(chosen, specs, hosts)
    # The result has the order of the scenario, and no other names that a placement may have added.
    return {name: chosen[name] for name in names}


def _check_given(
    names: Sequence[str], hosts: Mapping[str, Capacity], given: Mapping[str, str]
) -> None:
    for name, host in given.items():
        if name not in names:
            raise InputError(
                f"place: unknown device '{name}'; the devices are {', '.join(names)}"
            )
        if host not in hosts:
            raise InputError(
                f"place: unknown host '{host}' of {name}; the hosts are {', '.join(hosts)}"
            )


def by_load(
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
    given: Mapping[str, str],
    together: Sequence[Sequence[str]] = (),
) -> dict[str, str]:
    """Place each device on the host with the least load per core.

    Hosts with equal loads are compared by the total rate of the device's links to other hosts, and the smallest wins.
    Devices with a host in ``given`` are placed first, then the fastest. The devices of a group are placed as one.

    >>> devices = [DeviceSpec("fast", 4e9, memory=1e9), DeviceSpec("slow", 1e9, memory=1e9)]
    >>> hosts = {"node1": Capacity(4, 16e9), "node2": Capacity(4, 16e9)}
    >>> by_load(devices, {}, hosts, given={"fast": "node2"})
    {'fast': 'node2', 'slow': 'node1'}
    """
    specs = {device.name: device for device in devices}
    groups: dict[str, tuple[str, ...]] = {}
    for members in together:
        groups |= dict.fromkeys(members, tuple(members))
    placed: dict[str, str] = {}
    # `sorted` is stable: equally fast devices keep the order of the scenario.
    order = sorted(specs, key=lambda name: (name not in given, -specs[name].speed))
    for name in order:
        # The device was placed with another one of its group.
        if name in placed:
            continue
        group = groups.get(name, (name,))
        choice = given.get(name)
        if choice is None:
            costs = {}
            for host in hosts:
                costs[host] = _cost(group, host, placed, specs, links, hosts)
            choice = min(hosts, key=costs.__getitem__)
        for member in group:
            placed[member] = given.get(member, choice)
    return placed


def _cost(
    group: Sequence[str],
    host: str,
    placed: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> tuple[float, float, float]:
    """Return the cost of a host for a group, to be minimised: lacking memory, load, rate of links between hosts."""
    # The placement if the group were on this host.
    after = {**placed, **dict.fromkeys(group, host)}
    load = loads(after, specs, hosts)[host]
    lacking = max(0.0, load.memory + RESERVED - hosts[host].memory)
    leaving = 0.0
    for (a, b), link in links.items():
        # Exactly one end is in the group, since links within the group cannot lead to another host.
        touches_group = (a in group) != (b in group)
        # Devices that are not placed yet count as being on this host.
        if touches_group and after.get(a, host) != after.get(b, host):
            leaving += link.rate or MAX_RATE
    # The load is rounded, so that the links decide between hosts with nearly equal loads.
    return lacking, round(load.cores / hosts[host].cores, 2), leaving


def loads(
    placed: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    hosts: Mapping[str, Capacity],
) -> dict[str, Load]:
    """Return the load of each host.

    >>> specs = {"worker1": DeviceSpec("worker1", 1e9, memory=1e9)}
    >>> loads({"worker1": "node1"}, specs, {"node1": Capacity(4, 16e9)})["node1"].cores
    0.5
    """
    by_host = {}
    for host, capacity in hosts.items():
        names = tuple(name for name, place in placed.items() if place == host)
        host_specs = [specs[name] for name in names]
        speed = sum(device.speed * device.processors for device in host_specs)
        memory = sum(map(device_memory, host_specs))
        by_host[host] = Load(names, speed / capacity.speed, memory)
    return by_host


def _check_memory(
    placed: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    hosts: Mapping[str, Capacity],
) -> None:
    for host, load in loads(placed, specs, hosts).items():
        if load.memory > hosts[host].memory - RESERVED:
            raise InputError(
                f"{host} has {size(hosts[host].memory)} of memory, its {len(load.devices)} devices take at "
                f"least {size(load.memory)}, and {size(RESERVED)} is reserved for its engine: move some "
                "devices, or add a host"
            )


def describe_placement(
    placed: Mapping[str, str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> list[dict[str, Any]]:
    """Return the devices, busy cores, memory in bytes, and outgoing links of each host."""
    by_host = loads(placed, {device.name: device for device in devices}, hosts)
    rows = []
    for host, load in by_host.items():
        leaving = []
        for source, destination in links:
            if placed[source] == host and placed[destination] != host:
                leaving.append((source, destination))
        rows.append(
            {
                "host": host,
                "devices": list(load.devices),
                "busy": load.cores,
                "cores": hosts[host].cores,
                "memory": load.memory,
                "of": hosts[host].memory,
                "leaving": len(leaving),
            }
        )
    return rows


class HostFaultPart(ConfigModel):
    """A fault of all devices on hosts, with its time; see `FaultPart`."""

    kill_host: str | None = Field(None, description="kill all devices of the host")
    restart_host: str | None = Field(
        None, description="restart all devices of the host"
    )
    partition_hosts: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="hosts whose devices are cut off from each other and from all others",
    )
    at: Duration | None = Field(
        None, description="time since the start of the workload"
    )
    when: TriggerPart | None = Field(None, description="a moment of the training")
    after: Duration | None = Field(
        None, description="time since the previous fault in the file"
    )
    for_: Duration | None = Field(
        None, alias="for", description="duration of the fault"
    )

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        if len(self._set_actions()) != 1:
            raise ValueError(
                "a host fault must have exactly one of " + ", ".join(DEVICE_ACTIONS)
            )
        return self

    def _set_actions(self) -> list[str]:
        return [name for name in DEVICE_ACTIONS if getattr(self, name) is not None]

    def to_device_faults(self, placed: Mapping[str, str]) -> list[FaultPart]:
        """Return the corresponding faults of the devices ``placed`` on the hosts.

        Raises InputError for a host without devices, and for faults that are invalid in a scenario.
        """
        [action] = self._set_actions()
        hosts = _as_tuple(getattr(self, action))
        groups = [_devices_on(host, placed, action) for host in hosts]
        moment = self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={*DEVICE_ACTIONS}
        )
        if action == "partition_hosts":
            return [parse(FaultPart, {"partition": groups, **moment})]
        faults = []
        for device in groups[0]:
            faults.append(parse(FaultPart, {DEVICE_ACTIONS[action]: device, **moment}))
            # ``after`` counts from the previous fault, which is that of the first device for all others: they fail at
            # the same time.
            if "after" in moment:
                moment["after"] = 0
        return faults


class LabPart(ConfigModel):
    """The location of runs: several hosts, or by default this machine's engine."""

    hosts: tuple[str, ...] = Field(
        (), description="docker contexts of engines in one swarm"
    )
    place: dict[Name, str] = Field(
        {}, description="host of each device with a fixed place"
    )
    placement: str = Field("by-load", description="placement of the other devices")
    faults: tuple[HostFaultPart, ...] = Field((), description="faults of hosts")

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        if not self.hosts and (self.place or self.faults):
            raise ValueError("'place' and 'faults' need 'hosts'")
        if self.faults and self.faults[0].after is not None:
            raise ValueError(
                "the first host fault cannot have 'after': use 'at' or 'when'"
            )
        return self

    def add_faults(self, trial: Trial, placed: Mapping[str, str]) -> Trial:
        """Return a trial extended by the host faults, as faults of the devices ``placed`` on the hosts.

        Host faults are therefore checked, recorded and reverted like all others. Raises InputError as
        `HostFaultPart.to_device_faults` does.
        """
        faults = [*trial.scenario.faults]
        # Errors about these faults must name the lab file instead of a line of the scenario.
        places: dict[Key, str] = {}
        for number, fault in enumerate(self.faults):
            location = f"--lab: faults.{number}"
            try:
                device_faults = fault.to_device_faults(placed)
            except InputError as error:
                raise InputError(f"{location}: {error}") from None
            for device_fault in device_faults:
                places["faults", len(faults)] = location
                faults.append(device_fault)
        source = trial.scenario.source.override(places)
        extended = trial.scenario.model_copy(update={"faults": tuple(faults)})
        experiment = replace(trial.experiment, faults=tuple(faults))
        return replace(
            trial, scenario=extended.with_source(source), experiment=experiment
        )


def read_lab(
    file: Path | None,
    hosts: tuple[str, ...] = (),
    place: Mapping[str, str] | None = None,
) -> LabPart:
    """Return a lab file with overrides from the command line; raises `InputError`."""
    if file is None and place and not hosts:
        raise InputError("--place: name the hosts with --hosts")
    keys: dict[str, Any] = {} if file is None else dict(read_keys(file))
    if hosts:
        keys["hosts"] = [*hosts]
    in_file = keys.get("place") or {}
    # If the file has another type than a mapping, `parse` refuses it.
    if place and isinstance(in_file, Mapping):
        keys["place"] = {**in_file, **place}
    try:
        return parse(LabPart, keys)
    except InputError as error:
        raise InputError(f"{file or '--hosts'}: {error}") from None


def _as_tuple(named: str | tuple[str, ...]) -> tuple[str, ...]:
    return (named,) if isinstance(named, str) else named


def _devices_on(wanted: str, placed: Mapping[str, str], action: str) -> list[str]:
    devices = [name for name, host in placed.items() if host == wanted]
    if not devices:
        known = ", ".join(sorted({*placed.values()}))
        raise InputError(
            f"{action}: no device is on '{wanted}'; hosts with devices: {known}"
        )
    return devices
