"""One stage of a pipeline in one configuration: receives inputs, computes, and forwards results by any schedule.

A schedule is a sequence of actions, such as F0 F1 B0: the forwards of micro-batches 0 and 1, then the backward of 0.
`run_schedule` waits for the inputs of each action, computes, and sends the results to the neighbouring stages. The
`UpdatePolicy` of a stage is the difference between synchronous and asynchronous training.
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
from testbed.ml.pipeline.placement import RUNNING_STEP, Point
from testbed.ml.schedule import Action

T = TypeVar("T")

FORWARD_SPANS: dict[Purpose, str] = {
    "train": "forward",
    "evaluate": "evaluate",
    "infer": "forward",
}
"""Names of a forward's span in the events, by the purpose of the batch."""


@dataclass(frozen=True)
class StagePosition:
    """The position of a stage in one configuration.

    >>> stages = [("a", 0, 2), ("b", 2, 5)]
    >>> position = StagePosition(1, coordinator="a", stages=stages, index=1, steps=100)
    >>> position.units, position.previous_device, position.next_device
    ((2, 5), 'a', None)
    """

    configuration: int
    coordinator: str
    """The device that feeds the pipeline and collects the results."""
    stages: Stages
    index: int
    """The number of this stage, from 0."""
    steps: int
    """Training steps of the whole workload."""

    @staticmethod
    def from_message(
        device: str, coordinator: str, message: Configure | Prepare
    ) -> StagePosition:
        """Return the position of a device by the stages in the coordinator's message."""
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
        """Return the numbers of the stages using each tied weight, in the order of `Model.tied_weights`."""
        cuts = [first for _, first, _ in self.stages]
        return [tied.holders(cuts) for tied in model.tied_weights]

    @property
    def previous_device(self) -> str | None:
        """The device of the previous stage; None for the first."""
        if self.index == 0:
            return None
        device, _, _ = self.stages[self.index - 1]
        return device

    @property
    def next_device(self) -> str | None:
        """The device of the next stage; None for the last."""
        if self.index + 1 == len(self.stages):
            return None
        device, _, _ = self.stages[self.index + 1]
        return device


class Stage:
    """The work of a device in one configuration; a `testbed.messaging.membership.Role`.

    Incoming activations decide what the stage does next. An activation of training starts the `UpdatePolicy`, which
    trains until its schedule ends. Activations of evaluation and inference are only forwarded, in the order of arrival.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        problem: PlanningProblem,
        position: StagePosition,
        state: State | None = None,
        updates: Callable[[Stage], UpdatePolicy] | None = None,
    ) -> None:
        """``updates`` creates the update policy of this stage; None for inference."""
        self.state = state
        """Weights and optimizer state to begin with; None to draw the weights from the seed."""
        self.position = position
        self.problem = problem
        self.mailbox = mailbox
        self.device = mailbox.device
        self.units = problem.model.units[slice(*position.units)]
        self.actions = 0
        """Number of computations and received units, by which the coordinator tells a slow device from a stuck one."""
        self.computing = False
        """Whether a computation is running."""
        self.shard: Shard | ShapeShard
        """The weights of the stage; set by `prepare`."""
        self.weights = threading.Lock()
        """Lock of the weights while they change or are copied: the thread of an ended configuration's computation may
        still be running."""
        self._is_loaded = False
        self._updates = None if updates is None else updates(self)

    async def prepare(self) -> None:
        """Build the shard with the weights of ``state`` or of the seed."""

        def build() -> Shard | ShapeShard:
            built = make_shard(self.problem, *self.position.units, self.device.name)
            if self.state is not None:
                built.load(self.state)
            return built

        self.shard = await self.compute(build, self.copy_cost, Span("load"))
        self._is_loaded = True
        if self._updates is not None:
            # The coordinator exposes the whole model as it was gathered last. If gathering fails, the run takes its
            # weights from the parts that the stages expose here.
            self.device.expose(self._exposed_weights, part=True)

    def _exposed_weights(self) -> State:
        return result_of(self.shard.state())

    @property
    def copy_cost(self) -> Cost:
        """Cost of copying the complete state."""
        return costs.copy_cost(self.units, self.problem.training)

    @property
    def point(self) -> Point:
        """The point representing the current weights of the stage."""
        return Point(self.position.configuration, RUNNING_STEP)

    @property
    def loaded_units(self) -> list[int]:
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
            # The activation stays in the mailbox: a policy takes the inputs of training in the order of its schedule.
            first = await self.mailbox.peek(Activation)
            if first.work == "train":
                assert self._updates is not None
                await self._updates.train(first)
            else:
                await self._forward_only(await self.mailbox.take(Activation))

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Compute on the device's processor and count the computation in ``actions``."""
        self.computing = True
        try:
            return await self.device.compute(work, cost, span)
        finally:
            self.computing = False
            self.actions += 1

    async def compute_timed(
        self, work: Callable[[], T], cost: Cost, span: Span
    ) -> tuple[T, float]:
        """Compute; return the result and the duration in seconds."""
        start = self.device.now()
        result = await self.compute(work, cost, span)
        return result, self.device.now() - start

    async def _forward_only(self, activation: Activation) -> None:
        """Forward one micro-batch without training; the last stage sends the outputs to the coordinator."""
        inputs = activation.tensor
        position = self.position
        work = partial(self.shard.infer, inputs)
        cost = costs.forward_cost(self.units, len(inputs))
        span = Span(FORWARD_SPANS[activation.work], activation.batch)
        outputs = await self.compute(work, cost, span)
        if position.next_device is None:
            result = Output(
                configuration=position.configuration,
                work=activation.work,
                batch=activation.batch,
                tensor=outputs,
            )
            self.mailbox.post(position.coordinator, result)
        else:
            self.mailbox.post(position.next_device, replace(activation, tensor=outputs))


@dataclass(frozen=True)
class Passage:
    """The passage of a micro-batch through a stage: the forward is done, the backward is pending."""

    batch: int
    micro: int
    """Number of the micro-batch in its batch, from 0."""
    samples: int
    """Samples of the micro-batch."""
    loss: float
    """The micro-batch's part of the batch's loss; 0 except on the last stage."""
    seconds: float
    """Duration of the forward, in seconds."""

    @property
    def key(self) -> tuple[int, int]:
        """Batch and micro-batch."""
        return self.batch, self.micro


BatchReport = tuple[Times, float]
"""Mean seconds of a batch on a stage and on each later stage, and the loss of the batch."""


class UpdatePolicy(Protocol):
    """Determines when weights change, and which version of the weights a micro-batch uses."""

    recompute: bool
    """Whether all stages but the last discard activations, and repeat the forward before the backward."""
    whole_batches: bool
    """Whether a batch is a single micro-batch, so that spans need no number of a micro-batch."""

    async def train(self, first: Activation) -> None:
        """Train from the micro-batch ``first`` on, which is still in the mailbox, by calling `run_schedule`."""

    async def take_input(self, number: int) -> Activation | None:
        """Wait for the input of the schedule's forward ``number``; return None if no more micro-batches will arrive."""

    def version(self, batch: int) -> int | None:
        """Return the version of the weights for a batch; None selects the newest."""

    def forward_done(self, passage: Passage) -> None:
        """Handle a completed forward whose output was sent."""

    def backward_done(
        self, passage: Passage, seconds: float, message: Gradient | None
    ) -> BatchReport | None:
        """Handle a backward that took ``seconds``; return the report to send to the previous stage with its gradient.

        ``message`` is the gradient from the next stage; None on the last stage.
        """

    async def update(self, number: int) -> None:
        """Execute update ``number`` of the schedule."""


async def run_schedule(
    stage: Stage, policy: UpdatePolicy, actions: Iterable[Action]
) -> None:
    """Execute all actions in order.

    An infinite schedule ends once no more inputs arrive, and every received micro-batch has changed the weights.
    """
    executor = _Executor(stage, policy)
    has_more_inputs = True
    for action in actions:
        if action.kind == "forward":
            # Once a forward has got no input, the schedule's further forwards must not wait for one.
            if has_more_inputs:
                has_more_inputs = await executor.forward(action.micro)
        elif action.kind == "backward":
            await executor.backward(action.micro)
        else:
            await policy.update(action.micro)
        # After the last backward the schedule continues with its update.
        is_done = not has_more_inputs and not executor.passages
        if is_done and action.kind != "backward":
            return


class _Executor:
    """Executes single actions: waits for the inputs, computes, and sends the results."""

    def __init__(self, stage: Stage, policy: UpdatePolicy) -> None:
        self._stage = stage
        self._policy = policy
        self.passages: dict[int, Passage] = {}
        """Micro-batches between forward and backward, by their number in the schedule."""
        self._labels: Labels | None = None
        """Labels of the newest batch, which all micro-batches of the batch use."""

    async def forward(self, number: int) -> bool:
        """Execute one forward; return whether the input arrived."""
        stage = self._stage
        activation = await self._policy.take_input(number)
        if activation is None:
            return False
        samples = len(activation.tensor)
        cost = costs.forward_cost(stage.units, samples)
        span = self._make_span("forward", activation.batch, activation.micro)
        loss = 0.0
        # The forward of the last stage ends with the loss.
        if stage.position.next_device is None:
            forward_loss = await self._loss_work(activation)
            loss, seconds = await stage.compute_timed(forward_loss, cost, span)
        else:
            forward = self._forward_work(activation)
            outputs, seconds = await stage.compute_timed(forward, cost, span)
            result = replace(activation, tensor=outputs)
            stage.mailbox.post(stage.position.next_device, result)
        passage = Passage(activation.batch, activation.micro, samples, loss, seconds)
        self.passages[number] = passage
        self._policy.forward_done(passage)
        return True

    def _forward_work(self, activation: Activation) -> Callable[[], torch.Tensor]:
        """Return the forward of a micro-batch through the stage."""
        shard = self._stage.shard
        key = (activation.batch, activation.micro)
        rows = (_rows_of(activation).start, activation.samples)
        if self._policy.recompute:
            # The backward repeats this forward with the newest weights, which are the same until then.
            return partial(shard.forward_lightly, key, activation.tensor, rows=rows)
        version = self._policy.version(activation.batch)
        return partial(
            shard.forward, key, activation.tensor, version=version, rows=rows
        )

    async def _loss_work(self, activation: Activation) -> Callable[[], float]:
        """Wait for the batch's labels; return the forward through the end of the model."""
        stage = self._stage
        labels = await self._labels_of(activation.batch)
        rows = _rows_of(activation)
        return partial(
            stage.shard.forward_loss,
            key=(activation.batch, activation.micro),
            inputs=activation.tensor,
            labels=labels[rows],
            total_weight=stage.problem.training.weight(labels),
            version=self._policy.version(activation.batch),
            rows=(rows.start, activation.samples),
        )

    async def _labels_of(self, batch: int) -> Any:
        """Return the labels of a batch, (samples,)."""
        # The message has the labels of the whole batch, so only its first micro-batch takes the message.
        if self._labels is None or self._labels.batch != batch:
            self._labels = await self._stage.mailbox.take(Labels, batch)
        return self._labels.tensor

    async def backward(self, number: int) -> None:
        """Execute one backward, with the gradient of the next stage or of the loss."""
        stage = self._stage
        position = stage.position
        passage = self.passages[number]
        cost = costs.backward_cost(stage.units, passage.samples)
        received: Gradient | None = None
        output_gradient = None
        if position.next_device is not None:
            received = await stage.mailbox.take(Gradient, passage.key)
            output_gradient = received.tensor
            # The backward repeats the forward first, whose activations were discarded.
            if self._policy.recompute:
                cost += costs.forward_cost(stage.units, passage.samples)
        del self.passages[number]
        work = partial(stage.shard.backward, passage.key, output_gradient)
        span = self._make_span("backward", passage.batch, passage.micro)
        input_gradient, seconds = await stage.compute_timed(work, cost, span)
        report = self._policy.backward_done(passage, seconds, received)
        # The input of the first stage are the samples, whose gradient has no use.
        if position.previous_device is None:
            return
        assert input_gradient is not None
        message = Gradient(
            configuration=position.configuration,
            batch=passage.batch,
            micro=passage.micro,
            tensor=input_gradient,
        )
        if report is not None:
            times, loss = report
            message = replace(message, times=times, loss=loss)
        stage.mailbox.post(position.previous_device, message)

    def _make_span(self, name: str, batch: int, micro: int) -> Span:
        if self._policy.whole_batches:
            return Span(name, batch)
        return Span(name, batch, micro)


def _rows_of(activation: Activation) -> slice:
    """Return the rows of the micro-batch in a batch's tensors."""
    parts = cut_batch(activation.samples, activation.micros)
    return parts[activation.micro]
