"""One stage of a pipeline in one configuration: takes what arrives, computes, passes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from testbed.data.batches import micro_batches
from testbed.device import Cost, Device, Span
from testbed.methods.base import Problem
from testbed.methods.parts import costs, messages
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.shard import Shard, State, restrict
from testbed.schedule import Schedule
from testbed.wire import Message

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Mailbox:
    """Holds each thing until somebody takes it, and each taker until the thing is there."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, asyncio.Future[Any]] = {}

    def _slot(self, key: Hashable) -> asyncio.Future[Any]:
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
        return self._slots[key]

    def put(self, key: Hashable, thing: object) -> None:
        """Leave a thing; a second one of the same name is a repetition and is dropped."""
        slot = self._slot(key)
        if not slot.done():
            slot.set_result(thing)

    async def take(self, key: Hashable) -> Any:
        """Return the thing of that name as soon as it is there, once."""
        thing = await self._slot(key)
        del self._slots[key]
        return thing


SPANS = {messages.TRAIN: "forward", messages.EVALUATE: "evaluate", messages.INFER: "forward"}
"""Name of the span in which a micro-batch goes forward, by what it is for."""


@dataclass(frozen=True)
class Routine:
    """What a method wants of every stage in training."""

    schedule: Schedule
    checkpoint_every: int
    """Steps after which each stage sends its state to the lead; it does so after the last step in any case."""
    recompute: bool = False
    """Whether all stages but the last keep no activations, and forward a second time before they backward."""

    def checkpoints(self, step: int, steps: int) -> bool:
        """Say whether the state after ``step`` of ``steps`` is kept."""
        return step % self.checkpoint_every == 0 or step == steps


@dataclass(frozen=True)
class Place:
    """Where a stage stands in one configuration."""

    configuration: int
    lead: str
    stages: tuple[tuple[str, int, int], ...]
    """(device, first, last) in their order."""
    index: int
    steps: int
    """Training steps of the whole workload."""

    @property
    def units(self) -> tuple[int, int]:
        """First unit, and the one after the last."""
        return self.stages[self.index][1:]

    @property
    def before(self) -> str | None:
        """The device of the stage before; None for the first."""
        return self.stages[self.index - 1][0] if self.index else None

    @property
    def after(self) -> str | None:
        """The device of the next stage; None for the last."""
        return self.stages[self.index + 1][0] if self.index + 1 < len(self.stages) else None


class Stage:
    """The numerics and the traffic of one stage; lives as long as its configuration.

    It learns what to do from what arrives: the first micro-batch of a training step starts that step, every other
    micro-batch of an evaluation or inference is forwarded in the order of arrival.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        place: Place,
        outbox: Outbox,
        routine: Routine | None,
        incarnation: float,
    ) -> None:
        self.place = place
        self.actions = 0
        """Pieces of work done: rises as long as the stage gets on."""
        self.computing = False
        self._device = device
        self._problem = problem
        self._outbox = outbox
        self._routine = routine
        self._incarnation = incarnation
        self._mailbox = Mailbox()
        self._orders: asyncio.Queue[Message] = asyncio.Queue()
        self._units = problem.model.units[slice(*place.units)]
        self._keeping: asyncio.Task[None] | None = None
        """The checkpoint that is being sent."""
        self._shard: Shard

    @property
    def configuration(self) -> int:
        """The configuration that it lasts for."""
        return self.place.configuration

    def put(self, message: Message) -> None:
        """Take in a message of this configuration."""
        if message.kind == messages.LABELS:
            self._mailbox.put((message.kind, message["batch"]), message.tensors[messages.TENSOR])
            return
        training = message.kind == messages.GRADIENT or message["work"] == messages.TRAIN
        if training:
            self._mailbox.put((message.kind, message["batch"], message["micro"]), message.tensors[messages.TENSOR])
        if message.kind == messages.ACTIVATION and (not training or self._begins(message)):
            self._orders.put_nowait(message)

    def _begins(self, message: Message) -> bool:
        """Say whether this activation begins a piece of training."""
        return bool(message["micro"] == 0)

    async def run(self, state: State | None) -> None:
        """Build the shard, from a state or from the seed, say so to the lead, and work until cancelled."""
        await self._load(state)
        self._tell(self.place.lead, messages.CONFIGURED, incarnation=self._incarnation)
        await self._serve()

    async def _load(self, state: State | None) -> None:
        optimizer = self._problem.workload.optimizer

        def build() -> Shard:
            shard = Shard(self._problem.model, *self.place.units, self._problem.seed, optimizer)
            if state is not None:
                shard.load(state)
            return shard

        self._shard = await self._compute(build, costs.copy(self._units, optimizer), Span("load"))

    async def _serve(self) -> None:
        try:
            while True:
                order = await self._orders.get()
                if order["work"] == messages.TRAIN:
                    await self._train(order)
                else:
                    await self._forward_only(order)
        finally:
            if self._keeping is not None:
                self._keeping.cancel()

    def _tell(self, peer: str, kind: str, tensor: torch.Tensor | None = None, **fields: Any) -> None:
        """Send a message of this configuration without waiting."""
        tensors = {} if tensor is None else {messages.TENSOR: tensor}
        self._outbox.post(peer, kind, tensors, **{**fields, "configuration": self.place.configuration})

    async def _compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        self.computing = True
        try:
            return await self._device.compute(work, cost, span)
        finally:
            self.computing = False
            self.actions += 1

    async def _forward_only(self, order: Message) -> None:
        """Pass one micro-batch through; the last stage hands the outputs to the lead."""
        inputs = order.tensors[messages.TENSOR]
        span = Span(SPANS[order["work"]], order["batch"])
        outputs = await self._compute(lambda: self._shard.infer(inputs), costs.forward(self._units, len(inputs)), span)
        if self.place.after is None:
            self._tell(self.place.lead, messages.OUTPUT, outputs, work=order["work"], batch=order["batch"])
        else:
            self._tell(self.place.after, messages.ACTIVATION, outputs, **order.fields)

    async def _train(self, order: Message) -> None:
        """Do one training step as the schedule says, update, and checkpoint when it is time."""
        assert self._routine is not None
        batch, parts = order["batch"], micro_batches(order["samples"], order["micros"])
        last = self.place.after is None
        labels: Any = await self._mailbox.take((messages.LABELS, batch)) if last else None
        loss = 0.0
        for action in self._routine.schedule(len(self.place.stages), self.place.index, len(parts)):
            part = parts[action.micro]
            if action.kind == "backward":
                await self._backward(batch, action.micro, part.stop - part.start)
            elif last:
                loss += await self._forward_loss(batch, action.micro, labels[part], order["samples"])
            else:
                await self._forward(order, action.micro)
        if last:
            self._tell(self.place.lead, messages.LOSS, batch=batch, loss=loss)
        cost = costs.update(self._units, self._problem.workload.optimizer)
        await self._compute(self._shard.update, cost, Span("update", batch))
        if self._routine.checkpoints(batch + 1, self.place.steps):
            await self._checkpoint(batch)
        if self.place.before is None:
            self._tell(self.place.lead, messages.UPDATED, batch=batch)

    async def _forward(self, order: Message, micro: int) -> None:
        batch = order["batch"]
        inputs = await self._mailbox.take((messages.ACTIVATION, batch, micro))
        assert self._routine is not None
        forward = self._shard.forward_lightly if self._routine.recompute else self._shard.forward
        outputs = await self._compute(
            partial(forward, (batch, micro), inputs),
            costs.forward(self._units, len(inputs)),
            Span("forward", batch, micro),
        )
        assert self.place.after is not None
        self._tell(self.place.after, messages.ACTIVATION, outputs, **{**order.fields, "micro": micro})

    async def _forward_loss(self, batch: int, micro: int, labels: torch.Tensor, samples: int) -> float:
        inputs = await self._mailbox.take((messages.ACTIVATION, batch, micro))
        return await self._compute(
            partial(self._shard.forward_loss, (batch, micro), inputs, labels, samples),
            costs.forward(self._units, len(inputs)),
            Span("forward", batch, micro),
        )

    async def _backward(self, batch: int, micro: int, samples: int) -> None:
        gradient = None
        if self.place.after is not None:
            gradient = await self._mailbox.take((messages.GRADIENT, batch, micro))
        assert self._routine is not None
        cost = costs.backward(self._units, samples)
        if self._routine.recompute and self.place.after is not None:
            cost = Cost(cost.flops + costs.forward(self._units, samples).flops)
        gradient = await self._compute(
            partial(self._shard.backward, (batch, micro), gradient),
            cost,
            Span("backward", batch, micro),
        )
        if self.place.before is not None:
            self._tell(self.place.before, messages.GRADIENT, gradient, batch=batch, micro=micro)

    async def _checkpoint(self, batch: int) -> None:
        """Copy the state as it is after this step; send it while training goes on.

        One that is still being sent is waited for first: a link too slow for the checkpoints slows training down
        instead of filling the memory.
        """
        if self._keeping is not None:
            await self._keeping
        cost = costs.copy(self._units, self._problem.workload.optimizer)
        state = await self._compute(self._shard.state, cost, Span("checkpoint", batch))
        self._keeping = asyncio.create_task(self._keep(batch + 1, state))

    async def _keep(self, step: int, state: State) -> None:
        """Send a state unit by unit, so that gradients to the same device find their way in between."""
        for unit in range(*self.place.units):
            await self._outbox.post(
                self.place.lead,
                messages.STATE,
                restrict(state, unit, unit + 1),
                configuration=self.place.configuration,
                step=step,
                unit=unit,
            )
