"""One run as plain facts: devices, links, faults and changes, independent of the scenario file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from testbed.hardware import DeviceSpec, Machine
from testbed.network.link import Cell, Link, Pair, cell_of, least_rate
from testbed.network.radio import Radio
from testbed.work import WorkloadPart

if TYPE_CHECKING:
    from testbed.faults.parts import FaultPart
    from testbed.faults.script import Change


@dataclass(frozen=True)
class Experiment:
    """The facts of one run, the input of a runtime."""

    name: str
    seed: int
    """Seed of all random choices."""
    workload: WorkloadPart
    devices: tuple[DeviceSpec, ...]
    """Devices in the order of the scenario."""
    links: dict[Pair, Link]
    """Links by (source, destination). Pairs without a link cannot communicate."""
    time_limit: float
    """Seconds after which the run has failed."""
    faults: tuple[FaultPart, ...] = ()
    """Faults in the order of the scenario."""
    cells: tuple[Cell, ...] = ()
    """Radio cells; a pair of devices is in at most one cell."""
    changes: tuple[Change, ...] = ()
    """Changes of links and speeds from the scenario's link trace, in the order of time."""
    radio: Radio | None = None
    """Positions and propagation model of devices on radio; None without radio. Reception ratios are stored in the
    links."""
    machines: tuple[Machine, ...] = ()
    """Computers shared by several devices; each device is on at most one computer."""

    def sharing_devices(self) -> tuple[DeviceSpec, ...]:
        """Return the devices with the speed of each while all devices on the same machine compute."""
        processors = {device.name: device.processors for device in self.devices}
        shares: dict[str, float] = {}
        for machine in self.machines:
            computations = sum(processors[name] for name in machine.devices)
            share = min(1.0, machine.cores / computations)
            shares |= dict.fromkeys(machine.devices, share)
        devices = []
        for device in self.devices:
            share = shares.get(device.name, 1.0)
            # At full speed, the device stays the same object, and its speeds are not rounded.
            devices.append(device.with_share(share) if share < 1 else device)
        return tuple(devices)

    def bounded_links(self) -> dict[Pair, Link]:
        """Return the links with their rates limited by the access rates of both ends and by the cell."""
        uplinks = {device.name: device.uplink for device in self.devices}
        downlinks = {device.name: device.downlink for device in self.devices}
        limits = {*uplinks.values(), *downlinks.values()} - {None}
        if not limits and not self.cells:
            # Without a copy: a mesh of 1,000 devices has a million links.
            return self.links
        bounded = {}
        for pair, link in self.links.items():
            sender, receiver = pair
            cell = cell_of(pair, self.cells)
            cell_rate = None if cell is None else cell.rate
            access_rates = (uplinks[sender], downlinks[receiver])
            rate = least_rate(link.rate, *access_rates, cell_rate)
            bounded[pair] = replace(link, rate=rate)
        return bounded
