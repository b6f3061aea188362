"""Synchronous training on one stage: one update at the end of a step, with the gradient of the whole batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from testbed.device import Span
from testbed.kits.layers import costs
from testbed.kits.layers.shard import State, restrict
from testbed.kits.messaging.typed import Fixed, Typed
from testbed.kits.pipeline.checkpointing import UnitState
from testbed.kits.pipeline.stage import STAGE_KINDS, Activation, Gradient, Stage
from testbed.kits.pipeline.stage_loop import Passage, StageLoop
from testbed.schedule import Action, Schedule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Loss(Typed, kind="loss", key=("batch",)):
    """From the last stage to the coordinator: mean loss of a batch."""

    configuration: int
    batch: int
    loss: Fixed


@dataclass(frozen=True)
class Updated(Typed, kind="updated", key=("batch",)):
    """From the first stage, whose update is the last of all, to the coordinator on the same device."""

    configuration: int
    batch: int


TRAINING_KINDS: tuple[type[Typed], ...] = (*STAGE_KINDS, UnitState, Loss, Updated)


@dataclass(frozen=True)
class Routine:
    """What a method wants of every stage in training."""

    schedule: Schedule
    micro_batches: int
    """Of a batch; fewer where it has fewer samples."""
    checkpoint_every: int
    """Steps after which each stage sends its state to the coordinator; it does so after the last step in any case."""
    evaluate_every: int | None = None
    """Steps; None: at the end only."""
    recompute: bool = False
    """See `testbed.kits.pipeline.stage_loop.UpdatePolicy`."""

    def checkpoints(self, step: int, steps: int) -> bool:
        """Say whether the state after ``step`` of ``steps`` is kept."""
        return step % self.checkpoint_every == 0 or step == steps


class SynchronousUpdates:
    """An `testbed.kits.pipeline.stage_loop.UpdatePolicy`: the same weights for all micro-batches of a step."""

    def __init__(self, stage: Stage, routine: Routine) -> None:
        self.recompute = routine.recompute
        self._stage = stage
        self._routine = routine
        self._batch = 0
        self._loss = 0.0
        self._sending: asyncio.Task[None] | None = None
        """The checkpoint that is being sent."""

    async def train(self, first: Activation) -> None:
        """Do the training step that a first micro-batch begins."""
        self._batch, self._loss = first.batch, 0.0
        position = self._stage.position
        actions = self._routine.schedule(len(position.stages), position.index, first.micros)
        await StageLoop(self._stage, self).run(chain(actions, [Action("update", first.batch)]))

    async def arrival(self, number: int) -> Activation:
        """Return the inputs of a micro-batch of this step."""
        return await self._stage.mailbox.take(Activation, ("train", self._batch, number))

    def span(self, name: str, batch: int, micro: int) -> Span:
        """Return how a piece of work on a micro-batch is recorded."""
        return Span(name, batch, micro)

    def version(self, batch: int) -> None:
        """All micro-batches meet the newest weights."""

    def forward_done(self, passage: Passage) -> None:
        """Add to the loss of the batch."""
        self._loss += passage.loss

    def gradient(self, passage: Passage, tensor: torch.Tensor, given: Gradient | None) -> Gradient:
        """Return the message to the stage before."""
        return Gradient(self._stage.position.configuration, *passage.key, tensor)

    def backward_done(self, passage: Passage, seconds: float, given: Gradient | None) -> None:
        """The gradient is added up in the shard; there is nothing else to do."""

    async def update(self, number: int) -> None:
        """Take an optimizer step, tell the coordinator, and make a checkpoint when it is time."""
        stage, position, batch = self._stage, self._stage.position, self._batch
        if position.after is None:
            stage.post(position.coordinator, Loss(position.configuration, batch, self._loss))
        cost = costs.update(stage.units, stage.problem.workload.optimizer)
        await stage.compute(stage.shard.update, cost, Span("update", batch))
        if self._routine.checkpoints(batch + 1, position.steps):
            await self._checkpoint(batch)
        if position.before is None:
            stage.post(position.coordinator, Updated(position.configuration, batch))

    async def _checkpoint(self, batch: int) -> None:
        """Copy the state as it is after this step; send it while training goes on.

        One that is still being sent is waited for first: a link too slow for the checkpoints slows training down
        instead of filling the memory.
        """
        stage = self._stage
        if self._sending is not None:
            await self._sending
        cost = costs.copy(stage.units, stage.problem.workload.optimizer)
        state = await stage.compute(stage.shard.state, cost, Span("checkpoint", batch))
        self._sending = stage.mailbox.start_in_configuration(self._send(batch + 1, state))

    async def _send(self, step: int, state: State) -> None:
        """Send a state unit by unit, so that gradients to the same device find their way in between."""
        position = self._stage.position
        for unit in range(*position.units):
            piece = restrict(state, unit, unit + 1)
            await self._stage.post(position.coordinator, UnitState(position.configuration, step, unit, piece))
