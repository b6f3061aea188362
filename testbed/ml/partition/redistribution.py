"""Who fetches which units from whom, when a pipeline's partition changes: FTPipeHD's Algorithm 1, for any failures.

Devices go by their names, so nothing has to be renumbered: the paper's correction of an index by the failed ones is
what taking names out of a list does. Everything here speaks of one state of the model, such as that after batch 200:
the caller has made sure that all that is held belongs to it (`testbed.ml.pipeline.placement`).

Held are, after a chain replication, each stage's own units and those of the stage before it; the last stage's are at
the coordinator. After a global replication all units are at the coordinator too. The coordinator is the first
stage's device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from testbed.ml.partition.cuts import Cuts

HeldUnits = Mapping[str, Collection[int]]
"""Device -> the units it has, of one state of the model."""


@dataclass(frozen=True)
class StagePartition:
    """Who holds which units: device ``devices[i]`` units ``cuts[i]`` up to but without ``cuts[i + 1]``."""

    devices: tuple[str, ...]
    """Devices in the order of the stages; the first is the coordinator."""
    cuts: Cuts

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a partition is over one or more different devices, not {self.devices}")
        if len(self.cuts) != len(self.devices) + 1 or self.cuts[0] != 0 or any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError(f"{self.cuts} does not cut a chain over {len(self.devices)} devices")

    @property
    def coordinator(self) -> str:
        """The device of the first stage."""
        return self.devices[0]

    @property
    def units(self) -> int:
        """How many units there are in all."""
        return self.cuts[-1]

    def of(self, device: str) -> range:
        """Return the units of a device; none for one that is not a stage."""
        if device not in self.devices:
            return range(0)
        stage = self.devices.index(device)
        return range(self.cuts[stage], self.cuts[stage + 1])

    def holder(self, unit: int) -> str:
        """Return the device that has a unit."""
        return next(device for device in self.devices if unit in self.of(device))

    def successor(self, device: str) -> str:
        """Return who keeps a stage's chain replica: the next stage's device, for the last one the coordinator."""
        return self.devices[(self.devices.index(device) + 1) % len(self.devices)]


@dataclass(frozen=True)
class Need:
    """Where one device finds the units of its new stage, each in rising order."""

    local: tuple[int, ...]
    fetch: Mapping[str, tuple[int, ...]]
    """Device -> the units to ask it for; in the order of their first units."""


class UnitsLostError(Exception):
    """Units that no device has any more in this state."""

    def __init__(self, units: Collection[int]) -> None:
        super().__init__(f"no device has the units {', '.join(map(str, sorted(units)))} of this state")
        self.units = frozenset(units)


def missing(held: HeldUnits, units: int) -> set[int]:
    """Return the units, of all of a model, that no device has."""
    return set(range(units)).difference(*held.values())


def needs(old: StagePartition, new: StagePartition, held: HeldUnits) -> dict[str, Need]:
    """Return for each device of the new partition where it finds its units.

    ``old`` is the partition under which the state was replicated.

    What a device has itself it does not fetch. Anything else comes from the unit's device in the old partition; from
    that one's successor, which has the chain replica, if it has it no more; from the coordinator if both have not;
    and else from any that has it. Raises `UnitsLostError` where none has.
    """
    lost = missing(held, new.units)
    if lost:
        raise UnitsLostError(lost)
    return {device: _need(device, old, new, held) for device in new.devices}


def _need(device: str, old: StagePartition, new: StagePartition, held: HeldUnits) -> Need:
    local: list[int] = []
    fetch: dict[str, list[int]] = {}
    for unit in new.of(device):
        if unit in held.get(device, ()):
            local.append(unit)
            continue
        holder = old.holder(unit)
        best_first = (holder, old.successor(holder), old.coordinator, *sorted(held))
        source = next(candidate for candidate in best_first if unit in held.get(candidate, ()))
        fetch.setdefault(source, []).append(unit)
    return Need(tuple(local), {source: tuple(units) for source, units in fetch.items()})
