"""Assignment of devices to hosts, and faults of hosts.

A lab file, or options of the command line, name the hosts of a run and the hosts of some devices. A placement, by
default `by_load`, chooses the hosts of the other devices. Scenarios never name hosts.
"""

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
"""Assumed speed of a core in FLOP/s, since the speed of hosts is unknown."""
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
    """A function choosing the host of each device, by name.

    ``fixed_hosts`` are the user's choices. ``groups`` are devices that share a radio cell and need a common host.
    `place` verifies that the result agrees with both, and that the memory of each host suffices.
    """

    def __call__(
        self,
        devices: Sequence[DeviceSpec],
        links: Mapping[Pair, Link],
        hosts: Mapping[str, Capacity],
        fixed_hosts: Mapping[str, str],
        groups: Sequence[Sequence[str]],
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
    fixed_hosts: Mapping[str, str],
    groups: Sequence[Sequence[str]] = (),
    placement: str = "by-load",
) -> dict[str, str]:
    """Return the host of each device, chosen by the named placement.

    Raises InputError for unknown names, a placement that breaks a rule of `Placement`, and insufficient memory.
    """
    specs = {device.name: device for device in devices}
    names = list(specs)
    _check_fixed_hosts(names, hosts, fixed_hosts)
    choose = PLACEMENTS.find(placement, ("placement",))
    chosen = choose(devices, links, hosts, fixed_hosts, groups)
    # A placement may come from a package, so its result is checked.
    for name in names:
        host = chosen.get(name)
        if host not in hosts:
            raise InputError(
                f"the placement '{placement}' puts '{name}' on {host!r}; the hosts are {', '.join(hosts)}",
                ("placement",),
            )
        if host != fixed_hosts.get(name, host):
            raise InputError(
                f"the placement '{placement}' puts '{name}' on {host!r} instead of {fixed_hosts[name]!r}",
                ("placement",),
            )
    for group in groups:
        if len({chosen[name] for name in group}) > 1:
            raise InputError(
                f"place: {' and '.join(group)} share a medium and must be on the same host"
            )
    _check_memory(chosen, specs, hosts)
    # The result has the order of the scenario, and no other names that a placement may have added.
    return {name: chosen[name] for name in names}


def _check_fixed_hosts(
    names: Sequence[str], hosts: Mapping[str, Capacity], fixed_hosts: Mapping[str, str]
) -> None:
    for name, host in fixed_hosts.items():
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
    fixed_hosts: Mapping[str, str],
    groups: Sequence[Sequence[str]] = (),
) -> dict[str, str]:
    """Place each device on the host with the least load per core.

    Hosts with equal loads are compared by the total rate of the device's links to other hosts, and the smallest wins.
    Devices with a host in ``fixed_hosts`` are placed first, then the fastest. The devices of a group are placed as one.

    >>> devices = [DeviceSpec("fast", 4e9, memory=1e9), DeviceSpec("slow", 1e9, memory=1e9)]
    >>> hosts = {"node1": Capacity(4, 16e9), "node2": Capacity(4, 16e9)}
    >>> by_load(devices, {}, hosts, fixed_hosts={"fast": "node2"})
    {'fast': 'node2', 'slow': 'node1'}
    """
    specs = {device.name: device for device in devices}
    group_by_device: dict[str, tuple[str, ...]] = {}
    for members in groups:
        group_by_device |= dict.fromkeys(members, tuple(members))
    host_by_device: dict[str, str] = {}
    # Devices with a fixed host first, then the fastest; equally fast devices keep the order of the scenario.
    order = sorted(
        specs, key=lambda name: (name not in fixed_hosts, -specs[name].speed)
    )
    for name in order:
        # The device was placed together with another one of its group.
        if name in host_by_device:
            continue
        group = group_by_device.get(name, (name,))
        choice = fixed_hosts.get(name)
        if choice is None:
            costs = {}
            for host in hosts:
                costs[host] = _cost(group, host, host_by_device, specs, links, hosts)
            choice = min(hosts, key=costs.__getitem__)
        for member in group:
            host_by_device[member] = fixed_hosts.get(member, choice)
    return host_by_device


def _cost(
    group: Sequence[str],
    host: str,
    host_by_device: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> tuple[float, float, float]:
    """Return the cost of a host for a group, to be minimised in lexicographic order.

    The values are the lacking memory in bytes, the load per core, and the total rate of the group's links to other
    hosts in bit/s.
    """
    candidate = {**host_by_device, **dict.fromkeys(group, host)}
    load = loads(candidate, specs, hosts)[host]
    lacking_memory = max(0.0, load.memory + RESERVED - hosts[host].memory)
    outgoing_rate = 0.0
    for (source, destination), link in links.items():
        # Links within the group cannot lead to another host.
        has_one_end_in_group = (source in group) != (destination in group)
        # Devices without a host yet count as being on this host.
        source_host = candidate.get(source, host)
        destination_host = candidate.get(destination, host)
        if has_one_end_in_group and source_host != destination_host:
            outgoing_rate += link.rate or MAX_RATE
    # The load is rounded, so that the links decide between hosts with nearly equal loads.
    return lacking_memory, round(load.cores / hosts[host].cores, 2), outgoing_rate


def loads(
    host_by_device: Mapping[str, str],
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
        names = tuple(_devices_of(host, host_by_device))
        host_specs = [specs[name] for name in names]
        speed = sum(device.speed * device.processors for device in host_specs)
        memory = sum(map(device_memory, host_specs))
        by_host[host] = Load(names, speed / capacity.speed, memory)
    return by_host


def _check_memory(
    host_by_device: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    hosts: Mapping[str, Capacity],
) -> None:
    for host, load in loads(host_by_device, specs, hosts).items():
        if load.memory > hosts[host].memory - RESERVED:
            raise InputError(
                f"{host} has {size(hosts[host].memory)} of memory, its {len(load.devices)} devices take at "
                f"least {size(load.memory)}, and {size(RESERVED)} is reserved for its engine: move some "
                "devices, or add a host"
            )


def describe_placement(
    host_by_device: Mapping[str, str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> list[dict[str, Any]]:
    """Return a row for each host, with plain JSON values.

    Besides ``host`` and ``devices``, its keys are ``busy`` and ``cores``, the numbers of busy and of all cores;
    ``memory`` and ``of``, the minimum memory of the devices and the memory of the host in bytes; and ``leaving``, the
    number of links to other hosts.
    """
    specs = {device.name: device for device in devices}
    rows = []
    for host, load in loads(host_by_device, specs, hosts).items():
        outgoing_links = 0
        for source, destination in links:
            if host_by_device[source] == host and host_by_device[destination] != host:
                outgoing_links += 1
        rows.append(
            {
                "host": host,
                "devices": list(load.devices),
                "busy": load.cores,
                "cores": hosts[host].cores,
                "memory": load.memory,
                "of": hosts[host].memory,
                "leaving": outgoing_links,
            }
        )
    return rows


class HostFaultPart(ConfigModel):
    """A timed fault of all devices on one or several hosts; see `FaultPart`."""

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

    def to_device_faults(self, host_by_device: Mapping[str, str]) -> list[FaultPart]:
        """Return the corresponding faults of the devices on the hosts.

        Raises InputError for a host without devices, and for faults that are invalid in a scenario.
        """
        [action] = self._set_actions()
        hosts = _as_tuple(getattr(self, action))
        groups = [_require_devices(host, host_by_device, action) for host in hosts]
        moment = self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={*DEVICE_ACTIONS}
        )
        if action == "partition_hosts":
            return [parse(FaultPart, {"partition": groups, **moment})]
        faults = []
        for device in groups[0]:
            faults.append(parse(FaultPart, {DEVICE_ACTIONS[action]: device, **moment}))
            # ``after`` counts from the previous fault. All devices fail at the same time, so each further fault follows
            # that of the first device at once.
            if "after" in moment:
                moment["after"] = 0
        return faults


class LabPart(ConfigModel):
    """The location of runs: several hosts, or by default the local engine."""

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

    def add_faults(self, trial: Trial, host_by_device: Mapping[str, str]) -> Trial:
        """Return a trial extended by the host faults, as faults of the devices on the hosts.

        Host faults are therefore checked, recorded and reverted like all others. Raises InputError as
        `HostFaultPart.to_device_faults` does.
        """
        faults = [*trial.scenario.faults]
        # Errors about these faults must name the lab file instead of a line of the scenario.
        locations: dict[Key, str] = {}
        for number, fault in enumerate(self.faults):
            location = f"--lab: faults.{number}"
            try:
                device_faults = fault.to_device_faults(host_by_device)
            except InputError as error:
                raise InputError(f"{location}: {error}") from None
            for device_fault in device_faults:
                locations["faults", len(faults)] = location
                faults.append(device_fault)
        source = trial.scenario.source.override(locations)
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
    """Return the lab of a file, with the overrides of the command line; raises `InputError`."""
    if file is None and place and not hosts:
        raise InputError("--place: name the hosts with --hosts")
    keys: dict[str, Any] = {} if file is None else dict(read_keys(file))
    if hosts:
        keys["hosts"] = [*hosts]
    file_place = keys.get("place") or {}
    # `parse` refuses a value that is not a mapping.
    if place and isinstance(file_place, Mapping):
        keys["place"] = {**file_place, **place}
    try:
        return parse(LabPart, keys)
    except InputError as error:
        raise InputError(f"{file or '--hosts'}: {error}") from None


def _as_tuple(hosts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (hosts,) if isinstance(hosts, str) else hosts


def _devices_of(host: str, host_by_device: Mapping[str, str]) -> list[str]:
    return [device for device, other in host_by_device.items() if other == host]


def _require_devices(
    host: str, host_by_device: Mapping[str, str], action: str
) -> list[str]:
    """Return the devices of a host; raises InputError for a host without devices."""
    devices = _devices_of(host, host_by_device)
    if not devices:
        known = ", ".join(sorted({*host_by_device.values()}))
        raise InputError(
            f"{action}: no device is on '{host}'; hosts with devices: {known}"
        )
    return devices
