"""Sources of units after a change of a pipeline's partition: FTPipeHD's Algorithm 1, for any failures.

After the loss of a device or a repartition, the stages have other units than before. `needs` decides from which device
each stage fetches the weights of each unit that it lacks.

The possible sources are the devices of the old partition and replicas, which are copies of weights. After a chain
replication each stage also has the units of the previous stage, and the coordinator those of the last stage. After a
global replication the coordinator has all units. The coordinator is the device of the first stage.

All functions refer to one state of the model, such as the state after batch 200; the caller ensures that all replicas
belong to this state (`testbed.ml.pipeline.placement`). Devices are identified by name. So the paper's correction of
stage numbers after a failure is not needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from testbed.ml.partition.cuts import Cuts

HeldUnits = Mapping[str, Collection[int]]
"""Device -> the units whose weights the device has, own ones and replicas, of one state of the model."""


@dataclass(frozen=True)
class StagePartition:
    """Assignment of units to devices: device ``devices[i]`` has units ``cuts[i]`` to ``cuts[i + 1]`` (exclusive).

    >>> partition = StagePartition(("a", "b"), (0, 2, 5))
    >>> partition.coordinator, partition.units, partition.holder(3)
    ('a', 5, 'b')
    >>> partition.successor("b")
    'a'
    """

    devices: tuple[str, ...]
    """Devices in the order of the stages; the first is the coordinator."""
    cuts: Cuts

    def __post_init__(self) -> None:
        stages = len(self.devices)
        if stages == 0 or len(set(self.devices)) < stages:
            raise ValueError(
                f"a partition needs one or more different devices, not {self.devices}"
            )
        are_ascending = all(first < last for first, last in pairwise(self.cuts))
        cuts_fit = len(self.cuts) == stages + 1 and self.cuts[0] == 0
        if not cuts_fit or not are_ascending:
            raise ValueError(
                f"the cuts of {stages} devices must be {stages + 1} ascending numbers from 0, not {self.cuts}"
            )

    @property
    def coordinator(self) -> str:
        """The device of the first stage."""
        return self.devices[0]

    @property
    def units(self) -> int:
        """Total number of units."""
        return self.cuts[-1]

    def of(self, device: str) -> range:
        """Return the units of a device; empty for a device without a stage.

        >>> StagePartition(("a", "b"), (0, 2, 5)).of("b")
        range(2, 5)
        """
        if device not in self.devices:
            return range(0)
        stage = self.devices.index(device)
        return range(self.cuts[stage], self.cuts[stage + 1])

    def holder(self, unit: int) -> str:
        """Return the device of a unit's stage; raises IndexError for a unit beyond the model."""
        stage = bisect_right(self.cuts, unit) - 1
        return self.devices[stage]

    def successor(self, device: str) -> str:
        """Return the device with the chain replica of a stage.

        This is the device of the next stage, or the coordinator for the last stage.
        """
        following = self.devices.index(device) + 1
        return self.devices[following % len(self.devices)]


@dataclass(frozen=True)
class Need:
    """The sources of the units in a device's new stage; all tuples of units are in ascending order."""

    local: tuple[int, ...]
    """Units that the device has already: L_local of Algorithm 1."""
    fetch: Mapping[str, tuple[int, ...]]
    """Source device -> the units to fetch from it: M_need of Algorithm 1. Sources are in the order of their first
    units."""


class UnitsLostError(Exception):
    """Raised if no device holds some units of a state, so that training cannot resume from the state."""

    def __init__(self, units: Collection[int]) -> None:
        names = ", ".join(str(unit) for unit in sorted(units))
        super().__init__(f"no device has the units {names} of this state")
        self.units = frozenset(units)


def missing_units(held: HeldUnits, units: int) -> set[int]:
    """Return the units of a model held by no device.

    >>> missing_units({"a": [0, 1], "b": [3]}, units=4)
    {2}
    """
    return set(range(units)).difference(*held.values())


def needs(
    old: StagePartition,
    new: StagePartition,
    held: HeldUnits,
    *,
    local_first: bool = False,
) -> dict[str, Need]:
    """Return the sources of units for each device of the new partition.

    ``old`` is the partition under which the state was replicated, and ``held`` has the units of all present devices.

    By Algorithm 1, a unit comes from its device in the old partition. If this device lacks the unit, because it is lost
    or was restarted, the unit comes from the device's successor, which has the chain replica; if this device lacks it
    too, from the coordinator; otherwise from any device that has the unit. With ``local_first`` a device fetches no
    unit of which it has a replica.

    Raises `UnitsLostError` for units that no device has.

    >>> old, new = StagePartition(("a", "b"), (0, 2, 4)), StagePartition(("a",), (0, 4))
    >>> held = {"a": range(0, 4)}
    >>> needs(old, new, held)["a"]
    Need(local=(0, 1, 2, 3), fetch={})
    """
    lost_units = missing_units(held, new.units)
    if lost_units:
        raise UnitsLostError(lost_units)
    needs_by_device = {}
    for device in new.devices:
        local: list[int] = []
        fetch: dict[str, list[int]] = {}
        for unit in new.of(device):
            first_choice = device if local_first else None
            source = _source_of(unit, old, held, first_choice)
            if source == device:
                local.append(unit)
            else:
                fetch.setdefault(source, []).append(unit)
        units_by_source = {source: tuple(units) for source, units in fetch.items()}
        needs_by_device[device] = Need(tuple(local), units_by_source)
    return needs_by_device


def _source_of(
    unit: int,
    old: StagePartition,
    held: HeldUnits,
    first_choice: str | None,
) -> str:
    """Return the best device that has a unit; ``first_choice`` comes before the devices of Algorithm 1."""
    holder = old.holder(unit)
    # Sorted names: the choice among the other devices is the same in every run.
    best_first = [holder, old.successor(holder), old.coordinator, *sorted(held)]
    if first_choice is not None:
        best_first.insert(0, first_choice)
    # `needs` has checked that some device has the unit.
    return next(device for device in best_first if unit in held.get(device, ()))
