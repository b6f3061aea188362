"""Asynchronous training on one stage: an update after every batch, weight stashing and vertical sync."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from testbed.device import Cost, Span
from testbed.kits.asynchronous.messages import (
    BatchActivation,
    BatchGradient,
    BatchUpdated,
    Drained,
    End,
    Replica,
    Replicated,
    Times,
)
from testbed.kits.asynchronous.replicas import Point
from testbed.kits.asynchronous.replication import Replication
from testbed.kits.asynchronous.store import ReplicaStore
from testbed.kits.layers import costs
from testbed.kits.layers.shard import State, restrict
from testbed.kits.pipeline import stage as stages
from testbed.kits.pipeline.stage import Stage
from testbed.kits.pipeline.stage_loop import Passage, StageLoop
from testbed.schedule import asynchronous_1f1b, versions

if TYPE_CHECKING:
    import torch

RECENT = 10
"""Batches over which a stage takes the mean of its execution time."""


@dataclass(frozen=True)
class Asynchrony:
    """What a method wants of every stage in asynchronous training."""

    replication: Replication
    in_flight: int | None = None
    """Batches in the pipeline at once, at most; None, and never more than: as many as there are stages."""
    vertical_sync: bool = True
    """Whether a batch meets the same version on every stage; else each stage's newest when it is forwarded."""
    aggregate: int = 0
    """At which multiple of n - i updates a stage averages its versions; 0 is never."""

    def window(self, stages: int) -> int:
        """Return how many batches are under way at once."""
        return stages if self.in_flight is None else min(stages, self.in_flight)


class AsynchronousUpdates:
    """An `testbed.kits.pipeline.stage_loop.UpdatePolicy`.

    Trains in stretches: from a batch that fills the empty pipeline to the end that drains it again. Within a stretch
    forwards and backwards alternate strictly, so which version a batch meets depends on its number alone and never on
    the time that anything takes.
    """

    recompute = False

    def __init__(self, stage: Stage, asynchrony: Asynchrony, store: ReplicaStore) -> None:
        self._stage = stage
        self._asynchrony = asynchrony
        self._store = store
        position = stage.position
        count = len(position.stages)
        self._window = asynchrony.window(count)
        self._depth = versions.in_flight(count, position.index, self._window)
        self._span = self._window if asynchrony.vertical_sync else self._depth
        """A batch is forwarded with the weights as they were this many batches, less one, before it."""
        self._base = 0
        """The first batch of the stretch: all weights are of this version when it begins."""
        self._end = 0
        """The batch after its last."""
        self._under_way: set[int] = set()
        self._last: tuple[float, Times, float]
        """Of the batch done backward last: seconds of forward and backward, times of the later stages, its loss."""
        self._spent: deque[float] = deque(maxlen=RECENT)
        """Seconds of each of the last batches."""
        self._kept = 0
        """Versions kept at once in this stretch, at most."""
        self._in_use = 0
        """Versions that batches under way have met, at most."""

    async def train(self, first: stages.Activation) -> None:
        """Go through the stretch that a batch begins."""
        position = self._stage.position
        self._base = first.batch
        self._stage.shard.versions.restart(self._base)
        self._kept, self._in_use = 1, 0
        actions = asynchronous_1f1b(len(position.stages), position.index, window=self._window)
        await StageLoop(self._stage, self).run(actions)
        await self._drained()

    async def arrival(self, number: int) -> BatchActivation | None:
        """Return a batch of this stretch; None, and hand that on, where its end comes instead."""
        batch, position = self._base + number, self._stage.position
        arrived = await self._stage.mailbox.take((BatchActivation, End), ("train", batch, 0))
        if isinstance(arrived, BatchActivation):
            return arrived
        self._end = batch
        if position.after is not None:
            self._stage.post(position.after, End(position.configuration, batch))
        return None

    def span(self, name: str, batch: int, micro: int) -> Span:
        """Return how a piece of work on a batch is recorded."""
        return Span(name, batch)

    def version(self, batch: int) -> int:
        """Return the version that a batch is forwarded and done backward with."""
        return self._base + versions.used(batch - self._base, self._span)

    def forward_done(self, passage: Passage) -> None:
        """Count the versions in use."""
        self._under_way.add(passage.batch)
        self._in_use = max(self._in_use, len(set(map(self.version, self._under_way))))

    def gradient(self, passage: Passage, tensor: torch.Tensor, given: stages.Gradient | None) -> BatchGradient:
        """Return the message to the stage before."""
        later, loss = _known(passage, given)
        times = [self._mean(), *later]
        return BatchGradient(self._stage.position.configuration, *passage.key, tensor, times=times, loss=loss)

    def backward_done(self, passage: Passage, seconds: float, given: stages.Gradient | None) -> None:
        """Take note of what the update is to tell."""
        self._under_way.remove(passage.batch)
        self._last = (passage.seconds + seconds, *_known(passage, given))

    async def update(self, number: int) -> None:
        """Make the next version, replicate when it is time, and tell the coordinator."""
        batch, position = self._base + number, self._stage.position
        spent, later, loss = self._last
        self._spent.append(spent + await self._advance(batch))
        if self._targets(batch + 1):
            await self._replicate(batch + 1)
        if position.before is None:
            # The loss came with the gradients: an update that may be gone on from is one that the coordinator knows of.
            updated = BatchUpdated(position.configuration, batch, [self._mean(), *later], loss)
            self._stage.post(position.coordinator, updated)

    async def _advance(self, batch: int) -> float:
        """Make the next version; return the seconds that it took."""
        stage, done = self._stage, batch + 1
        cost = costs.update(stage.units, stage.problem.workload.optimizer)
        aggregated = 0
        if versions.aggregates(done - self._base, self._depth, self._asynchrony.aggregate):
            aggregated = self._depth
            cost += Cost(aggregated * costs.parameters(stage.units))
        advance = partial(stage.shard.advance, (batch, 0), self.version(batch), self.version(done), aggregated)
        begun = stage.device.now()
        await stage.compute(advance, cost, Span("update", batch))
        self._kept = max(self._kept, len(stage.shard.versions))
        return stage.device.now() - begun

    def _mean(self) -> float | None:
        """Return the mean seconds of the last batches; None before the first is done."""
        return fmean(self._spent) if self._spent else None

    def _targets(self, done: int) -> set[str]:
        """Return the devices that keep this stage's units of a step; the device itself is one, if there are any."""
        replication, position, keepers = self._asynchrony.replication, self._stage.position, set()
        if replication.chain(done):
            next_ones = replication.keepers(position.index, len(position.stages))
            keepers |= {self._stage.device.name, *(position.stages[stage][0] for stage in next_ones)}
        if replication.everything(done) or done == position.steps:
            keepers |= {self._stage.device.name, position.coordinator}
        return keepers

    async def _replicate(self, done: int) -> None:
        """Copy the state as it is after this step, and send it to its keepers while training goes on.

        What is still being sent of an earlier step is waited for first: links too slow for the replicas slow training
        down instead of filling the memory.
        """
        await self._store.spread()
        state = await self._snapshot(done, "replicate")
        keepers = self._targets(done) - {self._stage.device.name}
        self._store.spreading = self._stage.mailbox.start_in_configuration(self._spread(done, state, keepers))

    async def _snapshot(self, done: int, name: str) -> State:
        """Keep a copy of the state here."""
        stage = self._stage
        cost = costs.copy(stage.units, stage.problem.workload.optimizer)
        state = await stage.compute(stage.shard.state, cost, Span(name, done - 1))
        self._store.replicas.put(Point(stage.position.configuration, done), state, range(*stage.position.units))
        return state

    async def _spread(self, done: int, state: State, keepers: set[str]) -> None:
        """Send a state unit by unit, so that activations and gradients find their way in between."""
        stage, configuration = self._stage, self._stage.position.configuration
        for unit in range(*stage.position.units):
            replica = Replica(configuration, done, unit, restrict(state, unit, unit + 1))
            await asyncio.gather(*(stage.post(keeper, replica) for keeper in sorted(keepers)))
        stage.post(stage.position.coordinator, Replicated(configuration, done))

    async def _drained(self) -> None:
        """Say that nothing is under way, and keep the state for the device that is to have these units next."""
        stage, position = self._stage, self._stage.position
        if self._end > self._base:
            await self._snapshot(self._end, "keep")
            stage.device.record(
                "versions",
                stage=position.index,
                step=self._end,
                in_use=self._in_use,
                kept=self._kept,
                allowed=versions.in_flight(len(position.stages), position.index),
                bytes=self._kept * sum(unit.weight_bytes for unit in stage.units),
                replicas=self._store.replicas.bytes(),
            )
        stage.post(position.coordinator, Drained(position.configuration, self._end))


def _known(passage: Passage, given: stages.Gradient | None) -> tuple[Times, float]:
    """Return the times of the later stages for a batch, and its loss."""
    return (given.times, given.loss) if isinstance(given, BatchGradient) else ([], passage.loss)
