"""When weights are replicated, and which batch training resumes from.

Batches are counted from 0; "after n batches" is the state that batch n - 1's update made, in which batch n comes next.
A state is whole only where every unit of it is somewhere. So each stage keeps, beside what it replicates for others,
its own units as they were at that point: what is resumed from is one state of the model, never a mixture of a replica
with weights that went on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from testbed.methods.parts import costs
from testbed.models.chain import Unit
from testbed.partition.asynchronous import Extra
from testbed.partition.redistribution import missing
from testbed.scenario.schema import OptimizerPart

Inventory = Mapping[str, Mapping[int, Collection[int]]]
"""Device -> number of batches done -> the units it has of that state, complete ones only."""


@dataclass(frozen=True)
class Replication:
    """Replicates after every so many batches; 0 is never."""

    chain_every: int = 50
    """Each stage's units to the next stage's device, the last stage's to the central node."""
    global_every: int = 100
    """All units to the central node."""

    def chain(self, done: int) -> bool:
        """Say whether a chain replication is due after ``done`` batches."""
        return _due(done, self.chain_every)

    def everything(self, done: int) -> bool:
        """Say whether a global replication is due after ``done`` batches."""
        return _due(done, self.global_every)

    def last(self, done: int) -> int:
        """Return the newest state, of those due up to ``done`` batches, that was replicated either way; 0 at first."""
        return max((done // every * every for every in (self.chain_every, self.global_every) if every), default=0)

    def last_global(self, done: int) -> int:
        """Return the newest state that the central node should have as a whole; 0 at first."""
        return done // self.global_every * self.global_every if self.global_every else 0


def resume_point(inventory: Inventory, units: int) -> int | None:
    """Return the newest state of which every unit is somewhere, as its number of batches done; None if there is none.

    It is also the number of the batch to go on with: batches from there on have been undone, wherever they were done.
    Leave devices out that are lost. The state of 0 batches is the one the run began with; who can make it anew
    (from the seed or the central node's disk) says so by an entry.
    """
    states = {done for held in inventory.values() for done in held}
    for done in sorted(states, reverse=True):
        if not missing({device: held.get(done, ()) for device, held in inventory.items()}, units):
            return done
    return None


def held_at(inventory: Inventory, done: int) -> dict[str, Collection[int]]:
    """Return who has which units of one state, for `testbed.partition.redistribution.needs`."""
    return {device: held[done] for device, held in inventory.items() if done in held}


def obsolete(inventory: Inventory, units: int, central: str) -> set[int]:
    """Return the states that nothing can make training resume from any more, whoever is lost next.

    Those are all before one that the central node, which does not fail, has whole; and those before one that is whole
    and of which every device has at least as many units.
    """
    states = sorted({done for held in inventory.values() for done in held}, reverse=True)
    found: set[int] = set()
    for newer in states:
        whole = held_at(inventory, newer)
        if missing(whole, units):
            continue
        safe = len(set(whole.get(central, ()))) == units
        found |= {
            older
            for older in states
            if older < newer
            and (
                safe or all(set(has) <= set(whole.get(device, ())) for device, has in held_at(inventory, older).items())
            )
        }
    return found


def replica_bytes(units: Sequence[Unit], optimizer: OptimizerPart) -> Extra:
    """Return what replication adds to a stage's memory, for planning.

    Of everything there is the last state and the next one, which is not complete yet. A stage has its own units and
    those of the one before, of which the planner knows only that they end where its own begin; so all before them are
    counted.
    The central node has all units, and the last stage's once more, counted as all behind its own.
    """

    def extra(stage: int, first: int, last: int) -> float:
        kept = units[:last] if stage else (*units, *units)
        return 2 * costs.state_bytes(kept, optimizer)

    return extra


def _due(done: int, every: int) -> bool:
    return bool(every) and done > 0 and done % every == 0
