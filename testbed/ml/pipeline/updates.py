"""Weight updates: the two `testbed.ml.pipeline.stage.UpdatePolicy` classes, once a step or after every batch.

Both also make the copies of the weights from which training resumes after a failure: `SynchronousUpdates` sends
checkpoints to the coordinator, `AsynchronousUpdates` sends replicas to other stages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from statistics import fmean

from testbed.device import Cost, Span
from testbed.ml.data.batches import is_due
from testbed.ml.layers import costs
from testbed.ml.layers.shard import State, restrict
from testbed.ml.lazy import torch
from testbed.ml.pipeline.messages import (
    Activation,
    Drained,
    End,
    Gradient,
    Loss,
    Norms,
    Replica,
    Replicated,
    TiedGradient,
    Times,
    UnitState,
    Updated,
)
from testbed.ml.pipeline.placement import Point, ReplicaStore
from testbed.ml.pipeline.planning import AsynchronousOptions, SynchronousOptions
from testbed.ml.pipeline.stage import BatchNews, Passage, Stage, run_schedule
from testbed.ml.schedule import Action, Schedule, asynchronous_1f1b, versions

RECENT = 10
"""Number of last batches in the mean of a stage's execution time, which FTPipeHD's repartition uses."""


class SynchronousUpdates:
    """The same weights for all micro-batches of a step, then one update with the gradient of the whole batch."""

    whole_batches = False

    def __init__(
        self, schedule: Schedule, options: SynchronousOptions, stage: Stage
    ) -> None:
        self.recompute = options.recompute
        self._schedule = schedule
        self._options = options
        self._stage = stage
        self._batch = 0
        """The batch of the current step."""
        self._loss = 0.0
        """Loss of the current batch, from its micro-batches so far; 0 except on the last stage."""
        self._sending: asyncio.Task[None] | None = None
        """The checkpoint that is being sent."""

    async def train(self, first: Activation) -> None:
        """Do the training step started by a first micro-batch."""
        self._batch = first.batch
        self._loss = 0.0
        position = self._stage.position
        stages = len(position.stages)
        actions = self._schedule(stages, position.index, first.micros)
        update = Action("update", first.batch)
        await run_schedule(self._stage, self, chain(actions, [update]))

    async def arrival(self, number: int) -> Activation:
        """Return the inputs of a micro-batch of this step."""
        key = ("train", self._batch, number)
        return await self._stage.mailbox.take(Activation, key)

    def version(self, batch: int) -> None:
        """Return None for every batch: all micro-batches use the newest weights."""

    def forward_done(self, passage: Passage) -> None:
        """Add to the loss of the batch."""
        self._loss += passage.loss

    def backward_done(
        self, passage: Passage, seconds: float, given: Gradient | None
    ) -> None:
        """Do nothing: the shard accumulates the gradient."""

    async def update(self, number: int) -> None:
        """Take an optimizer step, report to the coordinator, and make a checkpoint if due."""
        stage = self._stage
        position = stage.position
        batch = self._batch
        done = batch + 1
        if position.after is None:
            loss = Loss(position.configuration, batch, self._loss)
            stage.mailbox.post(position.coordinator, loss)
        cost = costs.update_cost(stage.units, stage.problem.training)
        await self._add_tied(batch)
        # After the sums: a tied weight's norm is that of its complete gradient.
        norms = await self._exchange_norms(batch)
        update = partial(stage.shard.update, batch, norms)
        await stage.compute(update, cost, Span("update", batch))
        # An evaluation that may end the training needs the state it judges.
        is_judged = stage.problem.workload.training.uses_evaluations
        is_evaluated = is_judged and is_due(done, self._options.evaluate_every)
        if is_evaluated or self._options.checkpoints(done, position.steps):
            await self._start_checkpoint(batch)
        # The first stage is the last one to update, so its report ends the step.
        if position.before is None:
            updated = Updated(position.configuration, batch)
            stage.mailbox.post(position.coordinator, updated)

    async def _add_tied(self, batch: int) -> None:
        """Sum the gradients of weights that several stages share, so that the stages' copies stay equal.

        The first stage that uses such a weight sums the gradients of all stages in order, and returns the sum.
        """
        stage = self._stage
        position = stage.position
        tied = stage.problem.model.tied_weights
        summed_here: list[tuple[int, list[str]]] = []
        """Weights with this stage first, and the devices of the others."""
        summed_elsewhere: list[tuple[int, str]] = []
        """Weights with another stage first, and the device of that stage."""
        holders_by_weight = position.holders(stage.problem.model)
        for index, holders in enumerate(holders_by_weight):
            # A weight shared by units of one stage has one gradient already.
            if len(holders) == 1 or position.index not in holders:
                continue
            first, *others = [position.stages[holder][0] for holder in holders]
            if holders[0] == position.index:
                summed_here.append((index, others))
            else:
                summed_elsewhere.append((index, first))
        # All send before anyone waits: two stages may each be the first one of a weight of the other.
        for index, first in summed_elsewhere:
            gradient = stage.shard.gradient(tied[index])
            self._send_tied(first, batch, index, gradient)
        for index, others in summed_here:
            await self._sum_tied(batch, index, others)
        for index, first in summed_elsewhere:
            total = await stage.mailbox.take(TiedGradient, (first, batch, index))
            stage.shard.put_gradient(tied[index], total.tensor)

    def _send_tied(
        self,
        device: str,
        batch: int,
        index: int,
        gradient: torch.Tensor,
    ) -> None:
        configuration = self._stage.position.configuration
        message = TiedGradient(configuration, batch, index, gradient)
        self._stage.mailbox.post(device, message)

    async def _sum_tied(self, batch: int, index: int, others: Sequence[str]) -> None:
        """Add the gradients of ``others``, the other stages' devices, to the own one, and return the sum to them."""
        stage = self._stage
        tied = stage.problem.model.tied_weights[index]
        total = stage.shard.gradient(tied)
        cost = Cost(tied.values)
        span = Span("update", batch)
        # In the order of the stages, which decides how the sum is rounded.
        for other in others:
            part = await stage.mailbox.take(TiedGradient, (other, batch, index))
            add = partial(torch.add, total, part.tensor)
            total = await stage.compute(add, cost, span)
        stage.shard.put_gradient(tied, total)
        for other in others:
            self._send_tied(other, batch, index, total)

    async def _exchange_norms(self, batch: int) -> torch.Tensor | None:
        """Return the gradient norms of all stages, (tensors,), if gradients are clipped by norm.

        The norms pass from the last stage to the first, each stage adding its own, and then back. They are summed in
        the order of the model for any cuts, so clipping is bitwise independent of the cuts.
        """
        stage = self._stage
        position = stage.position
        clip = stage.problem.workload.training.clip
        clips_by_norm = clip is not None and clip.norm is not None
        # A single stage has all norms already.
        if not clips_by_norm or len(position.stages) == 1:
            return None
        # A tied weight has one gradient, equal on all its stages, and counts once.
        norms = stage.shard.norms(self._counted_elsewhere())
        if position.after is not None:
            later = await stage.mailbox.take(Norms, (batch, False))
            norms = torch.cat([norms, later.tensor])
        configuration = position.configuration
        if position.before is not None:
            partial_norms = Norms(configuration, batch, whole=False, tensor=norms)
            stage.mailbox.post(position.before, partial_norms)
            whole_norms = await stage.mailbox.take(Norms, (batch, True))
            norms = whole_norms.tensor
        if position.after is not None:
            whole_norms = Norms(configuration, batch, whole=True, tensor=norms)
            stage.mailbox.post(position.after, whole_norms)
        return norms

    def _counted_elsewhere(self) -> set[str]:
        """Return the names of tied weights whose norm another stage counts: the first stage that uses the weight."""
        position = self._stage.position
        model = self._stage.problem.model
        names: set[str] = set()
        holders_by_weight = position.holders(model)
        for tied, holders in zip(model.tied_weights, holders_by_weight, strict=True):
            if holders[0] != position.index:
                names.update(tied.names)
        return names

    async def _start_checkpoint(self, batch: int) -> None:
        """Copy the state after this step; send the copy while training continues.

        A previous checkpoint still being sent is awaited first: links too slow for the checkpoints slow training down
        instead of filling the memory.
        """
        stage = self._stage
        if self._sending is not None:
            await self._sending
        span = Span("checkpoint", batch)
        state = await stage.compute(stage.shard.state, stage.copy_cost, span)
        sending = self._send_state(batch + 1, state)
        self._sending = stage.mailbox.start_in_configuration(sending)

    async def _send_state(self, step: int, state: State) -> None:
        """Send a state unit by unit, so gradients to the same device are interleaved."""
        position = self._stage.position
        for unit in range(*position.units):
            piece = restrict(state, unit, unit + 1)
            message = UnitState(position.configuration, step, unit, piece)
            await self._stage.mailbox.post(position.coordinator, message)


class AsynchronousUpdates:
    """An update after every batch, with weight stashing and vertical sync.

    Training proceeds in stretches: from the batch that begins to fill the empty pipeline to the batch after which the
    pipeline is empty again. Within a stretch forwards and backwards alternate strictly, so the version used by a batch
    depends on the number of the batch alone, not on timing.
    """

    recompute = False
    whole_batches = True

    def __init__(
        self, options: AsynchronousOptions, store: ReplicaStore, stage: Stage
    ) -> None:
        self._stage = stage
        self._options = options
        self._store = store
        position = stage.position
        count = len(position.stages)
        self._window = options.window(count)
        self._depth = versions.max_in_flight(count, position.index, self._window)
        """Maximum number of batches between forward and backward on this stage."""
        self._staleness = self._depth
        """Staleness of forwards in batches, plus one."""
        if options.vertical_sync:
            # All stages use the version of the first stage, on which the whole window is in flight.
            self._staleness = self._window
        self._base = 0
        """The first batch of the stretch: all weights are of this version when it begins."""
        self._end = 0
        """The batch after the last one of the stretch."""
        self._under_way: set[int] = set()
        """Batches between forward and backward."""
        self._last: tuple[float, Times, float]
        """Of the last backward: seconds of forward and backward, times of the later stages, the loss."""
        self._spent: deque[float] = deque(maxlen=RECENT)
        """Seconds of each of the last batches."""
        self._kept = 0
        """Peak number of versions kept in this stretch."""
        self._in_use = 0
        """Peak number of versions used by batches under way."""

    async def train(self, first: Activation) -> None:
        """Train the stretch that begins with the batch of ``first``."""
        position = self._stage.position
        self._base = first.batch
        # Version v has the updates of all batches before v.
        self._stage.shard.versions.restart(self._base)
        self._kept = 1
        self._in_use = 0
        actions = asynchronous_1f1b(
            len(position.stages), position.index, window=self._window
        )
        await run_schedule(self._stage, self, actions)
        await self._report_drained()

    async def arrival(self, number: int) -> Activation | None:
        """Return a batch of this stretch, or forward its end to the next stage and return None."""
        batch = self._base + number
        position = self._stage.position
        # An end has the key of the activation that will not come.
        key = ("train", batch, 0)
        arrived = await self._stage.mailbox.take((Activation, End), key)
        if isinstance(arrived, Activation):
            return arrived
        self._end = batch
        if position.after is not None:
            end = End(position.configuration, batch)
            self._stage.mailbox.post(position.after, end)
        return None

    def version(self, batch: int) -> int:
        """Return the version used by both forward and backward of a batch."""
        within_stretch = batch - self._base
        used = versions.version_used(within_stretch, self._staleness)
        return self._base + used

    def forward_done(self, passage: Passage) -> None:
        """Count the versions in use."""
        self._under_way.add(passage.batch)
        in_use = {self.version(batch) for batch in self._under_way}
        self._in_use = max(self._in_use, len(in_use))

    def backward_done(
        self, passage: Passage, seconds: float, given: Gradient | None
    ) -> BatchNews:
        """Store the data for the report of the update; return the times of this and later stages, and the loss."""
        self._under_way.remove(passage.batch)
        later: Times = []
        loss = passage.loss
        if given is not None:
            later = given.times or []
            loss = given.loss or 0.0
        self._last = (passage.seconds + seconds, later, loss)
        return [self._mean_seconds(), *later], loss

    async def update(self, number: int) -> None:
        """Make the next version, replicate if due, and report to the coordinator."""
        batch = self._base + number
        position = self._stage.position
        seconds, later, loss = self._last
        self._spent.append(seconds + await self._advance_version(batch))
        replicates = bool(self._replica_targets(batch + 1))
        if replicates:
            await self._replicate_state(batch + 1)
        if position.before is None:
            # No replica of this state has left yet, so the coordinator records a batch before training can resume from
            # a state that contains the batch.
            times = [self._mean_seconds(), *later]
            updated = Updated(position.configuration, batch, times, loss)
            self._stage.mailbox.post(position.coordinator, updated)
        if replicates and self._options.replication == "blocking":
            # After the report, which a coordinator needs before the replicas.
            await self._store.finish_sending()

    async def _advance_version(self, batch: int) -> float:
        """Make the next version; return the seconds taken."""
        stage = self._stage
        done = batch + 1
        cost = costs.update_cost(stage.units, stage.problem.training)
        aggregated = 0
        interval = self._options.aggregation_interval
        if versions.is_aggregation_due(done - self._base, self._depth, interval):
            aggregated = self._depth
            # FTPipeHD's weight aggregation: an addition for each parameter of each averaged version.
            cost += Cost(aggregated * costs.count_parameters(stage.units))

        def advance() -> None:
            with stage.weights:
                stage.shard.advance(
                    key=(batch, 0),
                    version=self.version(batch),
                    oldest_needed=self.version(done),
                    aggregate=aggregated,
                )

        _, seconds = await stage.timed(advance, cost, Span("update", batch))
        self._kept = max(self._kept, len(stage.shard.versions))
        return seconds

    def _mean_seconds(self) -> float | None:
        """Return the mean seconds of the last batches; None before the first one is done."""
        return fmean(self._spent) if self._spent else None

    def _replica_targets(self, done: int) -> set[str]:
        """Return the devices keeping this stage's units of a step, including the device itself."""
        options = self._options
        position = self._stage.position
        own = self._stage.device.name
        targets: set[str] = set()
        if options.is_chain_replication_due(done):
            targets.add(own)
            keepers = options.keepers(position.index, len(position.stages))
            for keeper in keepers:
                device, _, _ = position.stages[keeper]
                targets.add(device)
        # An evaluation that may end the training needs the state it judges, as the end needs the result.
        is_judged = self._stage.problem.workload.training.uses_evaluations
        is_evaluated = is_judged and is_due(done, options.evaluate_every)
        if (
            is_evaluated
            or options.is_global_replication_due(done)
            or done == position.steps
        ):
            targets |= {own, position.coordinator}
        return targets

    async def _replicate_state(self, done: int) -> None:
        """Copy the state after this step, and start to send the copy to its keepers.

        Replicas of an earlier step still being sent are awaited first: links too slow for the replicas slow training
        down instead of filling the memory.
        """
        await self._store.finish_sending()
        state = await self._keep_snapshot(done, "replicate")
        # The device itself has kept its snapshot.
        keepers = self._replica_targets(done) - {self._stage.device.name}
        sending = self._send_replicas(done, state, keepers)
        self._store.sending = self._stage.mailbox.start_in_configuration(sending)

    async def _keep_snapshot(self, done: int, name: str) -> State:
        """Keep a copy of the state on this device."""
        stage = self._stage
        span = Span(name, done - 1)
        state = await stage.compute(stage.shard.state, stage.copy_cost, span)
        point = Point(stage.position.configuration, done)
        self._store.replicas.put(point, state, range(*stage.position.units))
        return state

    async def _send_replicas(
        self,
        done: int,
        state: State,
        keepers: set[str],
    ) -> None:
        """Send a state unit by unit, so activations and gradients are interleaved."""
        position = self._stage.position
        mailbox = self._stage.mailbox
        for unit in range(*position.units):
            piece = restrict(state, unit, unit + 1)
            replica = Replica(position.configuration, done, unit, piece)
            # A unit is acknowledged by all keepers before the next one is sent.
            posts = [mailbox.post(keeper, replica) for keeper in sorted(keepers)]
            await asyncio.gather(*posts)
        mailbox.post(position.coordinator, Replicated(position.configuration, done))

    async def _report_drained(self) -> None:
        """Report the drained pipeline, and keep the state for the next holders of these units."""
        stage = self._stage
        position = stage.position
        # A stretch may end before its first batch.
        if self._end > self._base:
            await self._keep_snapshot(self._end, "keep")
            version_bytes = sum(unit.weight_bytes for unit in stage.units)
            stage.device.record(
                "versions",
                stage=position.index,
                step=self._end,
                in_use=self._in_use,
                kept=self._kept,
                allowed=versions.max_in_flight(len(position.stages), position.index),
                bytes=self._kept * version_bytes,
                replicas=self._store.replicas.bytes(),
            )
        drained = Drained(position.configuration, self._end)
        stage.mailbox.post(position.coordinator, drained)
