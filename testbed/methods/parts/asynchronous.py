"""One stage of an asynchronous pipeline: 1F1B with an update after every batch, weight stashing and vertical sync."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from testbed.device import Cost, Device, Span
from testbed.methods.base import Problem
from testbed.methods.parts import costs, messages
from testbed.methods.parts.former_stage import Place, Stage
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.replicas import Point, Replicas
from testbed.methods.parts.replication import Replication
from testbed.methods.parts.shard import State, restrict
from testbed.schedule import versions
from testbed.wire import Message

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

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

    def depth(self, stages: int, stage: int) -> int:
        """Return how many batches a stage has forwarded and not yet backwarded at most."""
        return versions.in_flight(stages, stage, self.window(stages))


class AsynchronousStage(Stage):
    """Trains in stretches: from a batch that fills the empty pipeline to the end that drains it again.

    Within a stretch forwards and backwards alternate strictly, so which version a batch meets depends on its number
    alone and never on the time that anything takes.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        place: Place,
        outbox: Outbox,
        asynchrony: Asynchrony,
        replicas: Replicas,
        incarnation: float,
    ) -> None:
        super().__init__(device, problem, place, outbox, None, incarnation)
        self._asynchrony = asynchrony
        self._replicas = replicas
        stages = len(place.stages)
        self._depth = asynchrony.depth(stages, place.index)
        self._span = asynchrony.window(stages) if asynchrony.vertical_sync else self._depth
        """A batch is forwarded with the weights as they were this many batches, less one, before it."""
        self._base = 0
        """The first batch of the stretch: all weights are of this version when it begins."""
        self._under_way: dict[int, tuple[int, float, float]] = {}
        """Batches forwarded and not yet backwarded: samples, seconds that the forward took, the last stage's loss."""
        self._spent: deque[float] = deque(maxlen=RECENT)
        """Seconds of each of the last batches."""
        self._kept = 0
        """Versions kept at once in this stretch, at most."""
        self._in_use = 0
        """Versions that batches under way have met, at most."""

    def put(self, message: Message) -> None:
        """Take in a message of this configuration."""
        if message.kind == messages.END:
            self._mailbox.put((messages.ACTIVATION, message["batch"], 0), None)
        else:
            self._note(message)
            super().put(message)

    async def run(self, state: State | None) -> None:
        """Build the shard, from a state or from the seed, and work until cancelled."""
        await self._load(state)
        await self._serve()

    def _begins(self, message: Message) -> bool:
        return bool(message["first"])

    def _note(self, message: Message) -> None:
        if message.kind == messages.GRADIENT:
            self._mailbox.put(("behind", message["batch"]), (message["times"], message["loss"]))

    async def _measured(self, work: Callable[[], T], cost: Cost, span: Span) -> tuple[T, float]:
        """Compute; return the result and the seconds that it took."""
        begun = self._device.now()
        result = await self._compute(work, cost, span)
        return result, self._device.now() - begun

    def _used(self, batch: int) -> int:
        """Return the version that a batch is forwarded and backwarded with."""
        return self._base + versions.used(batch - self._base, self._span)

    async def _train(self, order: Message) -> None:
        """Go through one stretch, in the order of 1F1B."""
        self._base = forward = backward = order["batch"]
        self._shard.versions.restart(self._base)
        self._kept, self._in_use = 1, 0
        ended = False
        while not ended or backward < forward:
            if not ended and forward - backward < self._depth:
                ended = not await self._forward_batch(forward)
                forward += not ended
            else:
                await self._backward_batch(backward, forward)
                backward += 1
        await self._drained(forward)

    async def _forward_batch(self, batch: int) -> bool:
        """Forward a batch, or hand on that there is none; say whether there was one."""
        inputs = await self._mailbox.take((messages.ACTIVATION, batch, 0))
        if inputs is None:
            if self.place.after is not None:
                self._tell(self.place.after, messages.END, batch=batch)
            return False
        key, version, samples = (batch, 0), self._used(batch), len(inputs)
        cost, span = costs.forward(self._units, samples), Span("forward", batch)
        loss = 0.0
        if self.place.after is None:
            labels = await self._mailbox.take((messages.LABELS, batch))
            forward_loss = partial(self._shard.forward_loss, key, inputs, labels, samples, version)
            loss, seconds = await self._measured(forward_loss, cost, span)
        else:
            outputs, seconds = await self._measured(partial(self._shard.forward, key, inputs, version), cost, span)
            self._tell(self.place.after, messages.ACTIVATION, outputs, **self._activation(batch, samples))
        self._under_way[batch] = (samples, seconds, loss)
        self._in_use = max(self._in_use, len({self._used(other) for other in self._under_way}))
        return True

    def _activation(self, batch: int, samples: int) -> dict[str, Any]:
        first = batch == self._base
        return {"work": messages.TRAIN, "batch": batch, "micro": 0, "micros": 1, "samples": samples, "first": first}

    async def _backward_batch(self, batch: int, forward: int) -> None:
        """Backward a batch, update, and replicate when it is time; ``forward`` is the batch to be forwarded next."""
        gradient: torch.Tensor | None = None
        later: list[float] = []
        samples, forwarding, loss = self._under_way[batch]
        if self.place.after is not None:
            gradient = await self._mailbox.take((messages.GRADIENT, batch, 0))
            later, loss = await self._mailbox.take(("behind", batch))
        del self._under_way[batch]
        backward = partial(self._shard.backward, (batch, 0), gradient)
        cost = costs.backward(self._units, samples)
        gradient, backwarding = await self._measured(backward, cost, Span("backward", batch))
        if self.place.before is not None:
            times = [self._mean(), *later]
            self._tell(self.place.before, messages.GRADIENT, gradient, batch=batch, micro=0, times=times, loss=loss)
        updating = await self._update(batch, forward)
        self._spent.append(forwarding + backwarding + updating)
        if self._targets(batch + 1):
            await self._replicate(batch + 1)
        if self.place.before is None:
            # The loss came with the gradients: an update that may be gone on from is one that the lead knows of.
            self._tell(self.place.lead, messages.UPDATED, batch=batch, times=[self._mean(), *later], loss=loss)

    async def _update(self, batch: int, forward: int) -> float:
        """Make the next version; return the seconds that it took."""
        done = batch + 1
        oldest = self._base + versions.used(min(done, forward) - self._base, self._span)
        cost = costs.update(self._units, self._problem.workload.optimizer)
        aggregated = 0
        if versions.aggregates(done - self._base, self._depth, self._asynchrony.aggregate):
            aggregated = self._depth
            cost = Cost(cost.flops + aggregated * costs.parameters(self._units))
        advance = partial(self._shard.advance, (batch, 0), self._used(batch), oldest, aggregated)
        _, seconds = await self._measured(advance, cost, Span("update", batch))
        self._kept = max(self._kept, len(self._shard.versions))
        return seconds

    def _mean(self) -> float | None:
        """Return the mean seconds of the last batches; None before the first is done."""
        return fmean(self._spent) if self._spent else None

    def _targets(self, done: int) -> set[str]:
        """Return who is to keep this stage's units as they are after so many batches; the device itself, if anybody."""
        replication, keepers = self._asynchrony.replication, set()
        if replication.chain(done):
            keepers |= {self._device.name, self.place.after or self.place.lead}
        if replication.everything(done) or done == self.place.steps:
            keepers |= {self._device.name, self.place.lead}
        return keepers

    async def _replicate(self, done: int) -> None:
        """Copy the state as it is after this step, and send it to its keepers while training goes on.

        What is still being sent of an earlier step is waited for first: links too slow for the replicas slow training
        down instead of filling the memory.
        """
        if self._keeping is not None:
            await self._keeping
        state = await self._snapshot(done, "replicate")
        self._keeping = asyncio.create_task(self._spread(done, state, self._targets(done) - {self._device.name}))

    async def _snapshot(self, done: int, name: str) -> State:
        """Keep a copy of the state here."""
        cost = costs.copy(self._units, self._problem.workload.optimizer)
        state = await self._compute(self._shard.state, cost, Span(name, done - 1))
        self._replicas.put(Point(self.place.configuration, done), state, range(*self.place.units))
        return state

    async def _spread(self, done: int, state: State, keepers: set[str]) -> None:
        """Send a state unit by unit, so that activations and gradients find their way in between."""
        for unit in range(*self.place.units):
            fields = {"configuration": self.place.configuration, "step": done, "unit": unit}
            piece = restrict(state, unit, unit + 1)
            await asyncio.gather(
                *(self._outbox.post(keeper, messages.REPLICA, piece, **fields) for keeper in sorted(keepers))
            )
        self._tell(self.place.lead, messages.REPLICATED, step=done)

    async def _drained(self, done: int) -> None:
        """Say that nothing is under way, and keep the state for whoever is to have these units next."""
        stages, index = len(self.place.stages), self.place.index
        if done > self._base:
            await self._snapshot(done, "keep")
            self._device.record(
                "versions",
                stage=index,
                step=done,
                in_use=self._in_use,
                kept=self._kept,
                allowed=versions.in_flight(stages, index),
                bytes=self._kept * sum(unit.weight_bytes for unit in self._units),
                replicas=self._replicas.bytes(),
            )
        self._tell(self.place.lead, messages.DRAINED, step=done)
