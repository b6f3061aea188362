"""Units that devices hold after each kind of replication, and the units that they fetch after a failure."""

from collections.abc import Collection, Mapping

from testbed.ml.partition.redistribution import HeldUnits, Need, StagePartition, needs


def own_units(partition: StagePartition) -> dict[str, set[int]]:
    """Return the units of each stage without any replica."""
    return {device: set(partition.of(device)) for device in partition.devices}


def chain_replicas(partition: StagePartition) -> dict[str, set[int]]:
    """Return the held units after chain replication.

    Each stage's units are also at the next stage, and the last stage's at the coordinator.
    """
    # The successor of the last stage is the coordinator.
    replicas = own_units(partition)
    for device in partition.devices:
        replicas[partition.successor(device)] |= set(partition.of(device))
    return replicas


def gathered_units(partition: StagePartition) -> dict[str, set[int]]:
    """Return the held units after global replication: the coordinator holds all units."""
    return own_units(partition) | {partition.coordinator: set(range(partition.units))}


def without_devices(replicas: HeldUnits, lost: Collection[str]) -> dict[str, set[int]]:
    """Return the units on the remaining devices; a lost device has left or restarted empty."""
    return {
        device: set(units) for device, units in replicas.items() if device not in lost
    }


def redistribution(
    old: StagePartition,
    new: StagePartition,
    lost: Collection[str] = (),
    global_replication: bool = True,
) -> dict[str, Need]:
    """Return the units that each device fetches for a new partition.

    Replicas exist only if a device is lost: those of chain replication, and of global replication if set.
    """
    replicas = chain_replicas(old) if lost else own_units(old)
    if lost and global_replication:
        replicas[old.coordinator] |= set(range(old.units))
    return needs(old, new, without_devices(replicas, lost))


def moved_units(plan: Mapping[str, Need]) -> list[tuple[str, str, int]]:
    """Return every (sender, receiver, unit) that a plan sends over a link."""
    moves = []
    for receiver, need in plan.items():
        for sender, units in need.fetch.items():
            moves += [(sender, receiver, unit) for unit in units]
    return moves
