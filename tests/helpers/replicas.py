"""What devices hold of one state of a model after each kind of replication, and who fetches what after a failure."""

from collections.abc import Collection, Mapping

from testbed.ml.partition.redistribution import HeldUnits, Need, StagePartition, needs


def own_units(partition: StagePartition) -> dict[str, set[int]]:
    """Nothing replicated: each stage has its own units."""
    return {device: set(partition.of(device)) for device in partition.devices}


def chain_replicas(partition: StagePartition) -> dict[str, set[int]]:
    """Each stage's units at the next one too, the last one's at the central node."""
    held = own_units(partition)
    for device in partition.devices:
        held[partition.successor(device)] |= set(partition.of(device))
    return held


def gathered_units(partition: StagePartition) -> dict[str, set[int]]:
    """Everything at the central node too."""
    return own_units(partition) | {partition.coordinator: set(range(partition.units))}


def without_devices(held: HeldUnits, lost: Collection[str]) -> dict[str, set[int]]:
    """Some devices have lost what they had, gone or come back empty."""
    return {device: set(units) for device, units in held.items() if device not in lost}


def redistribution(
    old: StagePartition,
    new: StagePartition,
    lost: Collection[str] = (),
    global_replication: bool = True,
) -> dict[str, Need]:
    """Return the units that each device fetches after chain replication, and global replication if set.

    Without a lost device, no replication is assumed.
    """
    held = chain_replicas(old) if lost else own_units(old)
    if lost and global_replication:
        held[old.coordinator] |= set(range(old.units))
    return needs(old, new, without_devices(held, lost))


def moved_units(plan: Mapping[str, Need]) -> list[tuple[str, str, int]]:
    """Every (source, target, unit) that a plan sends over a link."""
    return [
        (source, target, unit)
        for target, need in plan.items()
        for source, got in need.fetch.items()
        for unit in got
    ]
