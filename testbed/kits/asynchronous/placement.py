"""Which state training goes on from, and who fetches what of it: decided from what all devices say they have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from testbed.kits.asynchronous.replicas import Lineage, Point
from testbed.kits.asynchronous.replication import held_at, resume_point
from testbed.kits.messaging.membership import Held
from testbed.partition.redistribution import Need, StagePartition, needs


@dataclass(frozen=True)
class RestorePlan:
    """Where a configuration goes on from, and how its stages come by their units."""

    point: Point
    needs: Mapping[str, Need]
    """By device; empty where all units come from the seed."""

    def need(self, device: str) -> Need | None:
        """Return where a device finds its units; None where they come from the seed."""
        return self.needs.get(device)


def place(
    lineage: Lineage, inventory: Mapping[str, Held], old: StagePartition, new: StagePartition, seeded: bool, steps: int
) -> RestorePlan:
    """Choose the newest state of which every unit is somewhere, and for each device of the new partition its sources.

    ``inventory`` is of the devices that are there, the coordinator among them; with ``seeded`` the state that the run
    began with comes from no device. After the last of all ``steps`` the coordinator needs every unit: the
    trained model is what it is there for.
    """
    held = lineage.held(inventory)
    if seeded:
        held.setdefault(old.coordinator, {})[0] = list(range(old.units))
    step = resume_point(held, old.units)
    if step is None:
        raise ValueError("no device has what the run began with")
    if seeded and step == 0:
        return RestorePlan(lineage.point(0), {})
    having = held_at(held, step)
    found = needs(old, new, having)
    if step == steps:
        found = {**found, old.coordinator: _everything(old, having)}
    return RestorePlan(lineage.point(step), found)


def _everything(old: StagePartition, having: Mapping[str, Collection[int]]) -> Need:
    whole = StagePartition((old.coordinator,), (0, old.units))
    return needs(old, whole, having)[old.coordinator]
