"""One stage of a pipeline in one configuration: receives inputs, computes, and forwards results by any schedule.

A schedule is a sequence of actions, such as F0 F1 B0; `run_schedule` waits for the inputs of each action, computes, and
sends the results to the neighbouring stages. The `UpdatePolicy` of a stage is the difference between synchronous and
asynchronous training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from testbed.device import Cost, Span
from testbed.messaging.mailbox import Mailbox
from testbed.ml.data.batches import cut_batch
from testbed.ml.layers import costs
from testbed.ml.layers.shape_shard import ShapeShard, make_shard
from testbed.ml.layers.shard import Shard, State, result_of
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.models.chain import Model
from testbed.ml.pipeline.messages import (
    Activation,
    Configure,
    Gradient,
    Labels,
    Output,
    Prepare,
    Purpose,
    Stages,
    Times,
)
from testbed.ml.pipeline.placement import RUNNING, Point
from testbed.ml.schedule import Action

T = TypeVar("T")

SPANS: dict[Purpose, str] = {
    "train": "forward",
    "evaluate": "evaluate",
    "infer": "forward",
}
"""Span names of a forward by purpose."""


@dataclass(frozen=True)
class StagePosition:
    """The position of a stage in one configuration.

    >>> stages = [("a", 0, 2), ("b", 2, 5)]
    >>> position = StagePosition(1, coordinator="a", stages=stages, index=1, steps=100)
    >>> position.units, position.before, position.after
    ((2, 5), 'a', None)
    """

    configuration: int
    coordinator: str
    """The device that feeds the pipeline and collects the results."""
    stages: Stages
    index: int
    """This stage, counted from 0."""
    steps: int
    """Training steps of the whole workload."""

    @staticmethod
    def from_message(
        device: str, coordinator: str, message: Configure | Prepare
    ) -> StagePosition:
        """Return the position that the coordinator's message gives a device."""
        names = [name for name, _, _ in message.stages]
        return StagePosition(
            configuration=message.configuration,
            coordinator=coordinator,
            stages=message.stages,
            index=names.index(device),
            steps=message.steps,
        )

    @property
    def units(self) -> tuple[int, int]:
        """First unit and last unit (exclusive)."""
        _, first, last = self.stages[self.index]
        return first, last

    def holders(self, model: Model) -> list[list[int]]:
        """Return the stages that use each tied weight of the model, in the order of `Model.tied_weights`."""
        cuts = [first for _, first, _ in self.stages]
        return [tied.holders(cuts) for tied in model.tied_weights]

    @property
    def before(self) -> str | None:
        """The device of the previous stage; None for the first."""
        if self.index == 0:
            return None
        device, _, _ = self.stages[self.index - 1]
        return device

    @property
    def after(self) -> str | None:
        """The device of the next stage; None for the last."""
        if self.index + 1 == len(self.stages):
            return None
        device, _, _ = self.stages[self.index + 1]
        return device


class Stage:
    """A `testbed.messaging.membership.Role` bound to one configuration.

    Messages trigger the work: a micro-batch of training starts a run of training, for which ``train`` is called with
    the first activation still in the mailbox; other micro-batches are forwarded in the order of arrival.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        problem: PlanningProblem,
        position: StagePosition,
        state: State | None = None,
        updates: Callable[[Stage], UpdatePolicy] | None = None,
    ) -> None:
        """``updates`` is required for training."""
        self.state = state
        """The initial state; None for the seed's."""
        self.position = position
        self.problem = problem
        self.mailbox = mailbox
        self.device = mailbox.device
        self.units = problem.model.units[slice(*position.units)]
        self.actions = 0
        """Number of operations and arrivals so far, by which the coordinator tells a slow device from a stuck one."""
        self.computing = False
        self.shard: Shard | ShapeShard
        """The weights of the stage; set by `prepare`."""
        self.weights = threading.Lock()
        """Held while weights change or are copied: work of an ended configuration may still run in its thread."""
        self._is_loaded = False
        self._updates = None if updates is None else updates(self)

    async def prepare(self) -> None:
        """Build the shard, from the state or from the seed."""

        def build() -> Shard | ShapeShard:
            built = make_shard(self.problem, *self.position.units, self.device.name)
            if self.state is not None:
                built.load(self.state)
            return built

        self.shard = await self.compute(build, self.copy_cost, Span("load"))
        self._is_loaded = True
        if self._updates is not None:
            # The coordinator exposes the whole model as last gathered: these serve where gathering fails.
            self.device.expose(self._exposed_weights, part=True)

    def _exposed_weights(self) -> State:
        return result_of(self.shard.state())

    @property
    def copy_cost(self) -> Cost:
        """Cost of copying the complete state."""
        return costs.copy_cost(self.units, self.problem.training)

    @property
    def point(self) -> Point:
        """The point that stands for the weights the stage trains with."""
        return Point(self.position.configuration, RUNNING)

    @property
    def held_units(self) -> list[int]:
        """The units of the stage; none before their weights are loaded."""
        if not self._is_loaded:
            return []
        return list(range(*self.position.units))

    async def snapshot(self) -> State:
        """Return a copy of the newest weights and the optimizer's state."""

        def copy() -> State:
            with self.weights:
                return self.shard.state()

        return await self.compute(copy, self.copy_cost, Span("keep"))

    async def serve(self) -> None:
        """Train and forward incoming micro-batches until cancelled."""
        while True:
            # Not taken: the policy takes the inputs of training itself, in the order of its schedule.
            first = await self.mailbox.peek(Activation)
            if first.work == "train":
                assert self._updates is not None
                await self._updates.train(first)
            else:
                await self._forward_only(await self.mailbox.take(Activation))

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Compute on the device's processor and count the operation."""
        self.computing = True
        try:
            return await self.device.compute(work, cost, span)
        finally:
            self.computing = False
            self.actions += 1

    async def timed(
        self, work: Callable[[], T], cost: Cost, span: Span
    ) -> tuple[T, float]:
        """Compute; return the result and the seconds taken."""
        begun = self.device.now()
        result = await self.compute(work, cost, span)
        return result, self.device.now() - begun

    async def _forward_only(self, given: Activation) -> None:
        """Forward one micro-batch; the last stage sends the outputs to the coordinator."""
        inputs = given.tensor
        position = self.position
        work = partial(self.shard.infer, inputs)
        cost = costs.forward_cost(self.units, len(inputs))
        span = Span(SPANS[given.work], given.batch)
        outputs = await self.compute(work, cost, span)
        if position.after is None:
            result = Output(position.configuration, given.work, given.batch, outputs)
            self.mailbox.post(position.coordinator, result)
        else:
            activation = replace(given, tensor=outputs)
            self.mailbox.post(position.after, activation)


@dataclass(frozen=True)
class Passage:
    """One micro-batch with a completed forward and a pending backward."""

    batch: int
    micro: int
    samples: int
    """Samples of the micro-batch."""
    loss: float
    """The micro-batch's part of the batch's loss; 0 except on the last stage."""
    seconds: float
    """Duration of the forward."""

    @property
    def key(self) -> tuple[int, int]:
        """Batch and micro-batch."""
        return self.batch, self.micro


BatchNews = tuple[Times, float]
"""Mean seconds of a batch on a stage and each later stage, and the loss of the batch."""


class UpdatePolicy(Protocol):
    """Determines when weights change, and which version a micro-batch uses."""

    recompute: bool
    """Whether all stages but the last keep no activations, and forward a second time before backward."""
    whole_batches: bool
    """Whether a batch passes as one, so that spans need no number of a micro-batch."""

    async def train(self, first: Activation) -> None:
        """Do the training started by a first micro-batch, by calling `run_schedule` with a schedule."""

    async def arrival(self, number: int) -> Activation | None:
        """Return the inputs of forward ``number`` of the schedule; None if no more micro-batches will arrive."""

    def version(self, batch: int) -> int | None:
        """Return the version of the weights for a batch; None selects the newest."""

    def forward_done(self, passage: Passage) -> None:
        """Handle a completed forward whose output was sent."""

    def backward_done(
        self, passage: Passage, seconds: float, given: Gradient | None
    ) -> BatchNews | None:
        """Handle a completed backward; return the fields sent with the gradient to the previous stage.

        ``given`` is the message of the next stage, if any.
        """

    async def update(self, number: int) -> None:
        """Execute the schedule's update of this number."""


async def run_schedule(
    stage: Stage, policy: UpdatePolicy, actions: Iterable[Action]
) -> None:
    """Execute all actions in order.

    An infinite schedule ends once no more inputs arrive and all received micro-batches have been updated.
    """
    executor = _Executor(stage, policy)
    ended = False
    """Whether the inputs have ended."""
    for action in actions:
        if action.kind == "forward":
            # Once a forward has found no input, the schedule's further forwards must not wait for one.
            if not ended:
                ended = not await executor.forward(action.micro)
        elif action.kind == "backward":
            await executor.backward(action.micro)
        else:
            await policy.update(action.micro)
        # The update of the last backward is still to be done.
        if ended and not executor.under_way and action.kind != "backward":
            return


class _Executor:
    """Executes single actions: waits for the inputs, computes, and sends the results."""

    def __init__(self, stage: Stage, policy: UpdatePolicy) -> None:
        self._stage = stage
        self._policy = policy
        self.under_way: dict[int, Passage] = {}
        """Micro-batches between forward and backward, by their number in the schedule."""
        self._labels: Labels | None = None
        """Labels of the last batch, which all micro-batches of the batch use."""

    async def forward(self, number: int) -> bool:
        """Execute one forward; return whether its input arrived."""
        stage = self._stage
        activation = await self._policy.arrival(number)
        if activation is None:
            return False
        samples = len(activation.tensor)
        cost = costs.forward_cost(stage.units, samples)
        span = self._make_span("forward", activation.batch, activation.micro)
        loss = 0.0
        # The last stage has the end of the model, and computes the loss in its forward.
        if stage.position.after is None:
            forward_loss = await self._loss_work(activation)
            loss, seconds = await stage.timed(forward_loss, cost, span)
        else:
            forward = self._forward_work(activation)
            outputs, seconds = await stage.timed(forward, cost, span)
            result = replace(activation, tensor=outputs)
            stage.mailbox.post(stage.position.after, result)
        passage = Passage(activation.batch, activation.micro, samples, loss, seconds)
        self.under_way[number] = passage
        self._policy.forward_done(passage)
        return True

    def _forward_work(self, activation: Activation) -> Callable[[], torch.Tensor]:
        """Return the forward of a micro-batch through this stage."""
        shard = self._stage.shard
        key = (activation.batch, activation.micro)
        rows = (_rows_of(activation).start, activation.samples)
        if self._policy.recompute:
            # The backward repeats this forward with the newest weights, which no update changes before.
            return partial(shard.forward_lightly, key, activation.tensor, rows=rows)
        version = self._policy.version(activation.batch)
        return partial(
            shard.forward, key, activation.tensor, version=version, rows=rows
        )

    async def _loss_work(self, activation: Activation) -> Callable[[], float]:
        """Wait for the batch's labels; return the forward through the end of the model."""
        stage = self._stage
        labels = await self._labels_of(activation.batch)
        part = _rows_of(activation)
        return partial(
            stage.shard.forward_loss,
            key=(activation.batch, activation.micro),
            inputs=activation.tensor,
            labels=labels[part],
            total_weight=stage.problem.training.weight(labels),
            version=self._policy.version(activation.batch),
            rows=(part.start, activation.samples),
        )

    async def _labels_of(self, batch: int) -> Any:
        """Return the labels of a batch, (samples,)."""
        # All micro-batches of a batch use the labels of one message.
        if self._labels is None or self._labels.batch != batch:
            self._labels = await self._stage.mailbox.take(Labels, batch)
        return self._labels.tensor

    async def backward(self, number: int) -> None:
        """Execute one backward, with the gradient of the next stage or of the loss."""
        stage = self._stage
        position = stage.position
        passage = self.under_way[number]
        cost = costs.backward_cost(stage.units, passage.samples)
        arrived: Gradient | None = None
        output_gradient = None
        if position.after is not None:
            arrived = await stage.mailbox.take(Gradient, passage.key)
            output_gradient = arrived.tensor
            # The backward repeats the forward first, whose activations were not kept.
            if self._policy.recompute:
                cost += costs.forward_cost(stage.units, passage.samples)
        del self.under_way[number]
        work = partial(stage.shard.backward, passage.key, output_gradient)
        span = self._make_span("backward", *passage.key)
        input_gradient, seconds = await stage.timed(work, cost, span)
        news = self._policy.backward_done(passage, seconds, arrived)
        # Nobody needs the gradient of the samples.
        if position.before is None:
            return
        assert input_gradient is not None
        message = Gradient(position.configuration, *passage.key, input_gradient)
        if news is not None:
            times, loss = news
            message = replace(message, times=times, loss=loss)
        stage.mailbox.post(position.before, message)

    def _make_span(self, name: str, batch: int, micro: int) -> Span:
        if self._policy.whole_batches:
            return Span(name, batch)
        return Span(name, batch, micro)


def _rows_of(activation: Activation) -> slice:
    """Return the micro-batch's samples within its batch."""
    parts = cut_batch(activation.samples, activation.micros)
    return parts[activation.micro]
