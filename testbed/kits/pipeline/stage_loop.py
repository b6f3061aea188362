"""Training on one stage: the actions of a schedule, carried out one after the other.

What tells synchronous from asynchronous training apart is an `UpdatePolicy`, which the loop is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from testbed.data.batches import micro_batches
from testbed.device import Cost, Span
from testbed.kits.layers import costs
from testbed.kits.pipeline.stage import Activation, Gradient, Labels, Stage
from testbed.schedule import Action

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """One micro-batch that a stage has forwarded and not yet done backward."""

    batch: int
    micro: int
    samples: int
    """Of the micro-batch."""
    loss: float
    """Its part of the batch's loss; 0 on all stages but the last."""
    seconds: float
    """That its forward took."""

    @property
    def key(self) -> tuple[int, int]:
        """Batch and micro-batch."""
        return self.batch, self.micro


class UpdatePolicy(Protocol):
    """When weights change, and which of them a micro-batch meets."""

    recompute: bool
    """Whether all stages but the last keep no activations, and forward a second time before backward."""

    async def arrival(self, number: int) -> Activation | None:
        """Return the inputs of the ``number``-th forward; None where it does not come, nor any after it."""

    def span(self, name: str, batch: int, micro: int) -> Span:
        """Return how a piece of work on a micro-batch is recorded."""

    def version(self, batch: int) -> int | None:
        """Return which version of the weights a batch meets; None: the newest, there being no other."""

    def forward_done(self, passage: Passage) -> None:
        """Take note of a forward that is done and handed on."""

    def gradient(self, passage: Passage, tensor: torch.Tensor, given: Gradient | None) -> Gradient:
        """Return the message to the stage before; ``given`` is the one of the stage after, if there is one."""

    def backward_done(self, passage: Passage, seconds: float, given: Gradient | None) -> None:
        """Take note of a backward that is done and handed on."""

    async def update(self, number: int) -> None:
        """Carry out the schedule's update of that number."""


class StageLoop:
    """Executes the actions of one stage, waiting for what each needs and handing on what it makes."""

    def __init__(self, stage: Stage, policy: UpdatePolicy) -> None:
        self._stage = stage
        self._policy = policy
        self._under_way: dict[int, Passage] = {}
        self._labels: Labels | None = None

    async def run(self, actions: Iterable[Action]) -> None:
        """Do all actions in their order; end earlier where forwards cease to come and all that came are updated."""
        ended = False
        for action in actions:
            if action.kind == "forward":
                ended = ended or not await self._forward(action.micro)
            elif action.kind == "backward":
                await self._backward(action.micro)
            else:
                await self._policy.update(action.micro)
            if ended and not self._under_way and action.kind != "backward":
                return

    async def _forward(self, number: int) -> bool:
        """Do one forward; say whether there was one to do."""
        stage, policy = self._stage, self._policy
        given = await policy.arrival(number)
        if given is None:
            return False
        key, inputs, version = (given.batch, given.micro), given.tensor, policy.version(given.batch)
        shard, cost = stage.shard, costs.forward(stage.units, len(inputs))
        span = policy.span("forward", *key)
        loss = 0.0
        if stage.position.after is None:
            labels = await self._labels_of(given)
            work = partial(shard.forward_loss, key, inputs, labels, given.samples, version)
            loss, seconds = await self._timed(work, cost, span)
        else:
            forward = shard.forward_lightly if policy.recompute else partial(shard.forward, version=version)
            outputs, seconds = await self._timed(partial(forward, key, inputs), cost, span)
            stage.post(stage.position.after, replace(given, tensor=outputs))
        self._under_way[number] = passage = Passage(*key, len(inputs), loss, seconds)
        policy.forward_done(passage)
        return True

    async def _timed(self, work: Callable[[], T], cost: Cost, span: Span) -> tuple[T, float]:
        """Compute; return the result and the seconds that it took."""
        begun = self._stage.device.now()
        return await self._stage.compute(work, cost, span), self._stage.device.now() - begun

    async def _labels_of(self, given: Activation) -> Any:
        """Return the labels of a micro-batch, (samples,)."""
        if self._labels is None or self._labels.batch != given.batch:
            self._labels = await self._stage.mailbox.take(Labels, given.batch)
        return self._labels.tensor[micro_batches(given.samples, given.micros)[given.micro]]

    async def _backward(self, number: int) -> None:
        stage, policy = self._stage, self._policy
        passage = self._under_way[number]
        given: Gradient | None = None
        cost = costs.backward(stage.units, passage.samples)
        if stage.position.after is not None:
            given = await stage.mailbox.take(Gradient, passage.key)
            if policy.recompute:
                cost += costs.forward(stage.units, passage.samples)
        del self._under_way[number]
        work = partial(stage.shard.backward, passage.key, None if given is None else given.tensor)
        gradient, seconds = await self._timed(work, cost, policy.span("backward", *passage.key))
        if stage.position.before is not None:
            assert gradient is not None
            stage.post(stage.position.before, policy.gradient(passage, gradient, given))
        policy.backward_done(passage, seconds, given)
