"""Weight updates of a stage: the two `testbed.ml.pipeline.stage.UpdatePolicy` classes.

`SynchronousUpdates` makes one update for all micro-batches of a step, `AsynchronousUpdates` one update after every
batch while other batches are in flight. Both also make the copies of the weights from which training resumes after a
failure: `SynchronousUpdates` sends checkpoints to the coordinator, `AsynchronousUpdates` sends replicas to other
stages.
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
from testbed.ml.pipeline.stage import BatchReport, Passage, Stage, run_schedule
from testbed.ml.schedule import Action, Schedule, asynchronous_1f1b, versions

RECENT_BATCHES = 10
"""Number of newest batches whose mean time a stage reports: enough to average jitter, few enough to follow a device
that becomes slower. FTPipeHD's repartition uses the mean."""


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
        """Sends the newest checkpoint."""

    async def train(self, first: Activation) -> None:
        """Do the training step started by a first micro-batch."""
        self._batch = first.batch
        self._loss = 0.0
        position = self._stage.position
        stages = len(position.stages)
        actions = self._schedule(stages, position.index, first.micros)
        update = Action("update", first.batch)
        await run_schedule(self._stage, self, chain(actions, [update]))

    async def take_input(self, number: int) -> Activation:
        """Wait for the input of micro-batch ``number`` of this step."""
        key = ("train", self._batch, number)
        return await self._stage.mailbox.take(Activation, key)

    def version(self, batch: int) -> None:
        """Return None for every batch: all micro-batches use the newest weights."""

    def forward_done(self, passage: Passage) -> None:
        """Add to the loss of the batch."""
        self._loss += passage.loss

    def backward_done(
        self, passage: Passage, seconds: float, message: Gradient | None
    ) -> None:
        """Do nothing: the shard has added the gradient to the gradient of the batch."""

    async def update(self, number: int) -> None:
        """Take an optimizer step, report to the coordinator, and make a checkpoint if due."""
        stage = self._stage
        position = stage.position
        batch = self._batch
        done = batch + 1
        if position.next_device is None:
            loss = Loss(position.configuration, batch, self._loss)
            stage.mailbox.post(position.coordinator, loss)
        cost = costs.update_cost(stage.units, stage.problem.training)
        await self._add_tied(batch)
        # After the sums, since the norm of a tied weight is the norm of its complete gradient.
        norms = await self._exchange_norms(batch)
        update = partial(stage.shard.update, batch, norms)
        await stage.compute(update, cost, Span("update", batch))
        # An evaluation may end the training with the evaluated state as its result, which thus has to be stored.
        is_judged = stage.problem.workload.training.uses_evaluations
        is_evaluated = is_judged and is_due(done, self._options.evaluate_every)
        if is_evaluated or self._options.checkpoints(done, position.steps):
            await self._start_checkpoint(batch)
        # The first stage is the last one to update, so its report ends the step.
        if position.previous_device is None:
            updated = Updated(position.configuration, batch)
            stage.mailbox.post(position.coordinator, updated)

    async def _add_tied(self, batch: int) -> None:
        """Sum the gradients of weights shared by several stages, to keep the stages' copies equal.

        The first stage that uses such a weight sums the gradients of all stages in order, and returns the sum.
        """
        stage = self._stage
        position = stage.position
        tied = stage.problem.model.tied_weights
        to_sum: list[tuple[int, list[str]]] = []
        """(index of the weight, devices of its other stages) for weights that this stage sums."""
        to_send: list[tuple[int, str]] = []
        """(index of the weight, device of its first stage) for weights that another stage sums."""
        holders_by_weight = position.holders(stage.problem.model)
        for index, holders in enumerate(holders_by_weight):
            # A weight shared by units of one stage has one gradient already.
            if len(holders) == 1 or position.index not in holders:
                continue
            first, *others = [position.stages[holder][0] for holder in holders]
            if holders[0] == position.index:
                to_sum.append((index, others))
            else:
                to_send.append((index, first))
        # Every stage sends before it waits: of two stages, each may be the first stage of a weight of the other.
        for index, first in to_send:
            gradient = stage.shard.gradient(tied[index])
            self._send_tied(first, batch, index, gradient)
        for index, others in to_sum:
            await self._sum_tied(batch, index, others)
        for index, first in to_send:
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
        """Add the gradients of a tied weight from the devices ``others`` to this stage's, and send the sum to them."""
        stage = self._stage
        tied = stage.problem.model.tied_weights[index]
        total = stage.shard.gradient(tied)
        cost = Cost(tied.values)
        span = Span("update", batch)
        # In the order of the stages: the order of a sum decides its rounding.
        for other in others:
            message = await stage.mailbox.take(TiedGradient, (other, batch, index))
            add = partial(torch.add, total, message.tensor)
            total = await stage.compute(add, cost, span)
        stage.shard.put_gradient(tied, total)
        for other in others:
            self._send_tied(other, batch, index, total)

    async def _exchange_norms(self, batch: int) -> torch.Tensor | None:
        """Return the gradient norms of the whole model, (tensors,); None if this stage has all norms or needs none.

        Only clipping by norm needs them. The norms pass from the last stage to the first, each stage adding its own,
        and then back. They are summed in the order of the model for any cuts, so clipping is bitwise independent of the
        cuts.
        """
        stage = self._stage
        position = stage.position
        clip = stage.problem.workload.training.clip
        clips_by_norm = clip is not None and clip.norm is not None
        # A single stage has all norms already.
        if not clips_by_norm or len(position.stages) == 1:
            return None
        # A tied weight has one gradient, equal on all its stages, so its norm counts once.
        norms = stage.shard.norms(self._counted_elsewhere())
        if position.next_device is not None:
            later_norms = await stage.mailbox.take(Norms, (batch, False))
            norms = torch.cat([norms, later_norms.tensor])
        configuration = position.configuration
        if position.previous_device is not None:
            partial_norms = Norms(configuration, batch, whole=False, tensor=norms)
            stage.mailbox.post(position.previous_device, partial_norms)
            whole_norms = await stage.mailbox.take(Norms, (batch, True))
            norms = whole_norms.tensor
        if position.next_device is not None:
            whole_norms = Norms(configuration, batch, whole=True, tensor=norms)
            stage.mailbox.post(position.next_device, whole_norms)
        return norms

    def _counted_elsewhere(self) -> set[str]:
        """Return the names of tied weights whose norm another stage counts: the first stage using the weight."""
        position = self._stage.position
        model = self._stage.problem.model
        names: set[str] = set()
        holders_by_weight = position.holders(model)
        for tied, holders in zip(model.tied_weights, holders_by_weight, strict=True):
            if holders[0] != position.index:
                names.update(tied.names)
        return names

    async def _start_checkpoint(self, batch: int) -> None:
        """Copy the state after the update of ``batch``; send the copy while training continues.

        If the previous checkpoint is still being sent, training waits for it: links that are too slow for checkpoints
        slow training down instead of filling the memory.
        """
        stage = self._stage
        if self._sending is not None:
            await self._sending
        span = Span("checkpoint", batch)
        state = await stage.compute(stage.shard.state, stage.copy_cost, span)
        sending = self._send_state(batch + 1, state)
        self._sending = stage.mailbox.start_in_configuration(sending)

    async def _send_state(self, step: int, state: State) -> None:
        """Send a state unit by unit, to let gradients to the same device pass in between."""
        position = self._stage.position
        for unit in range(*position.units):
            unit_state = restrict(state, unit, unit + 1)
            message = UnitState(position.configuration, step, unit, unit_state)
            await self._stage.mailbox.post(position.coordinator, message)


class AsynchronousUpdates:
    """An update after every batch, with weight stashing and vertical sync.

    Training proceeds in stretches: from the batch that begins to fill the empty pipeline to the batch after which the
    pipeline is empty again. Within a stretch forwards and backwards alternate strictly, so the version used by a batch
    depends on the number of the batch alone, not on timing. Version v of the weights has the updates of all batches
    before v.
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
        """Number of updates that the version of a forward lacks, plus one."""
        if options.vertical_sync:
            # All stages use the version of the first stage, on which the whole window is in flight.
            self._staleness = self._window
        self._stretch_start = 0
        """The first batch of the stretch, and the version of the weights with which the stretch begins."""
        self._stretch_end = 0
        """The batch after the last one of the stretch."""
        self._pending: set[int] = set()
        """Batches between forward and backward."""
        self._newest_backward: tuple[float, Times, float]
        """The newest backward: seconds of its batch's forward and backward, times of the later stages, the loss."""
        self._batch_seconds: deque[float] = deque(maxlen=RECENT_BATCHES)
        """Seconds of each of the newest batches: forward, backward and update."""
        self._peak_kept = 0
        """Maximum number of versions stored in this stretch."""
        self._peak_in_use = 0
        """Maximum number of versions that pending batches used in this stretch."""

    async def train(self, first: Activation) -> None:
        """Train the stretch beginning with the batch of ``first``."""
        position = self._stage.position
        self._stretch_start = first.batch
        self._stage.shard.versions.restart(self._stretch_start)
        self._peak_kept = 1
        self._peak_in_use = 0
        actions = asynchronous_1f1b(
            len(position.stages), position.index, window=self._window
        )
        await run_schedule(self._stage, self, actions)
        await self._report_drained()

    async def take_input(self, number: int) -> Activation | None:
        """Wait for batch ``number`` of this stretch; at the end of the stretch, tell the next stage and return None."""
        batch = self._stretch_start + number
        position = self._stage.position
        # An `End` has the key of the activation that it replaces.
        key = ("train", batch, 0)
        message = await self._stage.mailbox.take((Activation, End), key)
        if isinstance(message, Activation):
            return message
        self._stretch_end = batch
        if position.next_device is not None:
            end = End(position.configuration, batch)
            self._stage.mailbox.post(position.next_device, end)
        return None

    def version(self, batch: int) -> int:
        """Return the version used by both forward and backward of a batch."""
        number = batch - self._stretch_start
        version = versions.version_used(number, self._staleness)
        return self._stretch_start + version

    def forward_done(self, passage: Passage) -> None:
        """Count the versions in use."""
        self._pending.add(passage.batch)
        versions_in_use = {self.version(batch) for batch in self._pending}
        self._peak_in_use = max(self._peak_in_use, len(versions_in_use))

    def backward_done(
        self, passage: Passage, seconds: float, message: Gradient | None
    ) -> BatchReport:
        """Store the times and the loss for `update`; return the times of this and later stages, and the loss."""
        self._pending.remove(passage.batch)
        later_times: Times = []
        loss = passage.loss
        if message is not None:
            later_times = message.times or []
            loss = message.loss or 0.0
        self._newest_backward = (passage.seconds + seconds, later_times, loss)
        return [self._mean_seconds(), *later_times], loss

    async def update(self, number: int) -> None:
        """Make the next version, replicate if due, and report to the coordinator."""
        batch = self._stretch_start + number
        position = self._stage.position
        seconds, later_times, loss = self._newest_backward
        update_seconds = await self._advance_version(batch)
        self._batch_seconds.append(seconds + update_seconds)
        replicates = bool(self._replica_targets(batch + 1))
        if replicates:
            await self._replicate_state(batch + 1)
        if position.previous_device is None:
            # Reported before any replica of the new state is sent: the coordinator then records the batch before
            # training can resume from a state that contains the batch.
            times = [self._mean_seconds(), *later_times]
            updated = Updated(position.configuration, batch, times, loss)
            self._stage.mailbox.post(position.coordinator, updated)
        if replicates and self._options.replication == "blocking":
            # Training waits only after the report above, which must precede the replicas.
            await self._store.finish_sending()

    async def _advance_version(self, batch: int) -> float:
        """Make the next version with the gradient of ``batch``; return the duration in seconds."""
        stage = self._stage
        next_batch = batch + 1
        cost = costs.update_cost(stage.units, stage.problem.training)
        aggregated = 0
        interval = self._options.aggregation_interval
        updates_in_stretch = next_batch - self._stretch_start
        if versions.is_aggregation_due(updates_in_stretch, self._depth, interval):
            aggregated = self._depth
            # FTPipeHD's weight aggregation: an addition for each parameter of each averaged version.
            cost += Cost(aggregated * costs.count_parameters(stage.units))

        def advance() -> None:
            with stage.weights:
                stage.shard.advance(
                    key=(batch, 0),
                    version=self.version(batch),
                    oldest_needed=self.version(next_batch),
                    aggregate=aggregated,
                )

        _, seconds = await stage.compute_timed(advance, cost, Span("update", batch))
        self._peak_kept = max(self._peak_kept, len(stage.shard.versions))
        return seconds

    def _mean_seconds(self) -> float | None:
        """Return the mean seconds of the newest batches; None before the first batch is done."""
        return fmean(self._batch_seconds) if self._batch_seconds else None

    def _replica_targets(self, done: int) -> set[str]:
        """Return the devices, including this one, that keep this stage's units after ``done`` batches; often none."""
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
        # An evaluation may end the training with the evaluated state as its result, which thus has to be stored.
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
        """Copy the state after ``done`` batches, and start to send the copy to the keepers.

        If earlier replicas are still being sent, training waits for them: links that are too slow for replicas slow
        training down instead of filling the memory.
        """
        await self._store.finish_sending()
        state = await self._keep_snapshot(done, "replicate")
        # This device has stored its copy already.
        keepers = self._replica_targets(done) - {self._stage.device.name}
        sending = self._send_replicas(done, state, keepers)
        self._store.sending_task = self._stage.mailbox.start_in_configuration(sending)

    async def _keep_snapshot(self, done: int, name: str) -> State:
        """Store a copy of the state after ``done`` batches on this device; ``name`` is the name of the span."""
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
        """Send a state unit by unit, to let activations and gradients pass in between."""
        position = self._stage.position
        mailbox = self._stage.mailbox
        for unit in range(*position.units):
            unit_state = restrict(state, unit, unit + 1)
            replica = Replica(position.configuration, done, unit, unit_state)
            # A unit is acknowledged by all keepers before the next one is sent.
            posts = [mailbox.post(keeper, replica) for keeper in sorted(keepers)]
            await asyncio.gather(*posts)
        mailbox.post(position.coordinator, Replicated(position.configuration, done))

    async def _report_drained(self) -> None:
        """Report that this stage is drained, and keep its state: the next partition may move its units."""
        stage = self._stage
        position = stage.position
        # A stretch may end before its first batch, with nothing to keep.
        if self._stretch_end > self._stretch_start:
            await self._keep_snapshot(self._stretch_end, "keep")
            version_bytes = sum(unit.weight_bytes for unit in stage.units)
            stage.device.record(
                "versions",
                stage=position.index,
                step=self._stretch_end,
                in_use=self._peak_in_use,
                kept=self._peak_kept,
                allowed=versions.max_in_flight(len(position.stages), position.index),
                bytes=self._peak_kept * version_bytes,
                replicas=self._store.replicas.bytes(),
            )
        drained = Drained(position.configuration, self._stretch_end)
        stage.mailbox.post(position.coordinator, drained)
