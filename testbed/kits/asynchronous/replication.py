"""When weights are replicated, and which batch training resumes from.

Batches are counted from 0; "after n batches" is the state that batch n - 1's update made, in which batch n comes next.
A state is whole only where every unit of it is somewhere. So each stage keeps, beside what it replicates for others,
its own units as they were at that point: what is resumed from is one state of the model, never a mixture of a replica
with weights that went on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from testbed.partition.redistribution import missing

StepInventory = Mapping[str, Mapping[int, Collection[int]]]
"""Device -> number of batches done -> the units it has of that state, complete ones only."""


@dataclass(frozen=True)
class Replication:
    """After how many batches what is replicated; 0 is never."""

    chain_every: int = 50
    """Each stage's units to the next stage's device, the last stage's to the coordinator."""
    global_every: int = 100
    """All units to the coordinator."""
    copies: int = 1
    """How many of the next stages' devices have each stage's units."""

    def keepers(self, stage: int, stages: int) -> list[int]:
        """Return the stages that a stage's chain replica goes to; where fewer follow, the coordinator's is one."""
        following = list(range(stage + 1, min(stages, stage + 1 + self.copies)))
        return following if len(following) == self.copies or stage == 0 else [*following, 0]

    def chain(self, done: int) -> bool:
        """Say whether a chain replication is due after ``done`` batches."""
        return _due(done, self.chain_every)

    def everything(self, done: int) -> bool:
        """Say whether a global replication is due after ``done`` batches."""
        return _due(done, self.global_every)


def resume_point(inventory: StepInventory, units: int) -> int | None:
    """Return the newest state of which every unit is somewhere, as its number of batches done; None if there is none.

    It is also the number of the batch to go on with: batches from there on have been undone, wherever they were done.
    Leave devices out that are lost. The state of 0 batches is the one the run began with; a device that
    can make it (from the seed or the coordinator's disk) says so by an entry.
    """
    states = {done for held in inventory.values() for done in held}
    for done in sorted(states, reverse=True):
        if not missing({device: held.get(done, ()) for device, held in inventory.items()}, units):
            return done
    return None


def held_at(inventory: StepInventory, done: int) -> dict[str, Collection[int]]:
    """Return who has which units of one state, for `testbed.partition.redistribution.needs`."""
    return {device: held[done] for device, held in inventory.items() if done in held}


def _due(done: int, every: int) -> bool:
    return bool(every) and done > 0 and done % every == 0
