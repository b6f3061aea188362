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
    """Radio cells; a pair of devices is in one at most."""
    changes: tuple[Change, ...] = ()
    """Changes of links and speeds from the scenario's link trace, in the order of time."""
    radio: Radio | None = None
    """Positions and propagation model of devices on radio; None without radio. Reception ratios are stored in the
    links."""
    machines: tuple[Machine, ...] = ()
    """Computers shared by several devices; each device is on at most one."""

    def sharing_devices(self) -> tuple[DeviceSpec, ...]:
        """Return the devices with the speed left to each while all devices on its machine compute."""
        shares: dict[str, float] = {}
        for machine in self.machines:
            wanted = sum(
                device.processors
                for device in self.devices
                if device.name in machine.devices
            )
            shares |= dict.fromkeys(machine.devices, min(1.0, machine.cores / wanted))
        return tuple(
            device.with_share(shares[device.name])
            if shares.get(device.name, 1) < 1
            else device
            for device in self.devices
        )

    def bounded_links(self) -> dict[Pair, Link]:
        """Return the links with their rates limited by the access rates of both ends and by the cell."""
        uplinks = {
            device.name: device.uplink
            for device in self.devices
            if device.uplink is not None
        }
        downlinks = {
            device.name: device.downlink
            for device in self.devices
            if device.downlink is not None
        }
        if not (uplinks or downlinks or self.cells):
            return self.links
        found = {}
        for pair, link in self.links.items():
            cell = cell_of(pair, self.cells)
            shared = None if cell is None else cell.rate
            found[pair] = replace(
                link,
                rate=least_rate(
                    link.rate, uplinks.get(pair[0]), downlinks.get(pair[1]), shared
                ),
            )
        return found
