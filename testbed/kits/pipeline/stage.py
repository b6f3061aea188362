"""One stage of a pipeline in one configuration: loads its units, takes what arrives, computes, passes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from testbed.device import Cost, Span
from testbed.kits.layers import costs
from testbed.kits.layers.shape_shard import ShapeShard, shard
from testbed.kits.layers.shard import Shard, State
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.typed import Typed
from testbed.method import Problem

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Purpose = Literal["train", "evaluate", "infer"]
SPANS: dict[Purpose, str] = {"train": "forward", "evaluate": "evaluate", "infer": "forward"}
"""Name of the span in which a micro-batch goes forward, by what it is for."""


@dataclass(frozen=True)
class Configure(Typed, kind="configure", opens=True):
    """From the coordinator: be this stage."""

    configuration: int
    stages: Sequence[tuple[str, int, int]]
    """(device, first unit, one after its last), in their order."""
    steps: int
    """Training steps of the whole workload."""
    given: bool
    """Whether the state is here; else it comes from the seed."""
    state: State


@dataclass(frozen=True)
class Activation(Typed, kind="activation", key=("work", "batch", "micro")):
    """To the next stage, the first one's from the coordinator: inputs of a micro-batch."""

    configuration: int
    work: Purpose
    batch: int
    """The training step, or the batch of an evaluation or inference."""
    micro: int
    micros: int
    """Micro-batches of the batch."""
    samples: int
    """Of the whole batch."""
    tensor: torch.Tensor
    """(samples of the micro-batch, ...)"""


@dataclass(frozen=True)
class Labels(Typed, kind="labels", key=("batch",)):
    """From the coordinator to the last stage: labels of a whole batch, (samples,)."""

    configuration: int
    batch: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Gradient(Typed, kind="gradient", key=("batch", "micro")):
    """To the stage before: the gradient of what it has sent."""

    configuration: int
    batch: int
    micro: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Output(Typed, kind="output", key=("work", "batch")):
    """From the last stage to the coordinator: outputs of a batch, (samples, ...)."""

    configuration: int
    work: Purpose
    batch: int
    tensor: torch.Tensor


STAGE_KINDS: tuple[type[Typed], ...] = (Configure, Activation, Labels, Gradient, Output)


class Placing(Protocol):
    """A message that says which stages there are, such as `Configure`."""

    @property
    def configuration(self) -> int: ...  # noqa: D102
    @property
    def stages(self) -> Sequence[tuple[str, int, int]]: ...  # noqa: D102
    @property
    def steps(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands in one configuration."""

    configuration: int
    coordinator: str
    stages: Sequence[tuple[str, int, int]]
    """(device, first unit, one after its last), in their order."""
    index: int
    steps: int
    """Training steps of the whole workload."""

    @staticmethod
    def told(device: str, coordinator: str, told: Placing) -> StagePosition:
        """Return where a device stands by what it was told."""
        index = [name for name, _, _ in told.stages].index(device)
        return StagePosition(told.configuration, coordinator, told.stages, index, told.steps)

    @property
    def units(self) -> tuple[int, int]:
        """First unit, and the one after the last."""
        _, first, last = self.stages[self.index]
        return first, last

    @property
    def before(self) -> str | None:
        """The device of the stage before; None for the first."""
        return self.stages[self.index - 1][0] if self.index else None

    @property
    def after(self) -> str | None:
        """The device of the next stage; None for the last."""
        return self.stages[self.index + 1][0] if self.index + 1 < len(self.stages) else None


class Stage:
    """A `testbed.kits.messaging.roles.Role`; lives as long as its configuration.

    It learns what to do from what arrives: a micro-batch of training begins a piece of training, which ``train`` is
    called for with the first activation still in the mailbox; any other is forwarded in the order of arrival.
    """

    def __init__(self, mailbox: Mailbox, problem: Problem, position: StagePosition, state: State | None = None) -> None:
        self.state = state
        """What it begins with; None: the seed's."""
        self.position = position
        self.problem = problem
        self.mailbox = mailbox
        self.device = mailbox.device
        self.units = problem.model.units[slice(*position.units)]
        self.actions = 0
        self.computing = False
        self.shard: Shard | ShapeShard
        self.train: Callable[[Activation], Awaitable[None]] | None = None

    async def prepare(self) -> None:
        """Build the shard, from the state or from the seed."""
        optimizer = self.problem.workload.optimizer

        def build() -> Shard | ShapeShard:
            made = shard(self.problem.model, *self.position.units, self.problem.seed, self.problem.workload)
            if self.state is not None:
                made.load(self.state)
            return made

        self.shard = await self.compute(build, costs.copy(self.units, optimizer), Span("load"))

    async def serve(self) -> None:
        """Train and forward whatever arrives, until cancelled."""
        while True:
            first = await self.mailbox.peek(Activation)
            if first.work == "train":
                assert self.train is not None
                await self.train(first)
            else:
                await self._forward_only(await self.mailbox.take(Activation))

    def post(self, peer: str, message: Typed) -> asyncio.Future[None]:
        """Send without waiting."""
        return self.mailbox.post(peer, message)

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Do a piece of work on the device's processor, and count it."""
        self.computing = True
        try:
            return await self.device.compute(work, cost, span)
        finally:
            self.computing = False
            self.actions += 1

    async def _forward_only(self, given: Activation) -> None:
        """Pass one micro-batch through; the last stage hands the outputs to the coordinator."""
        inputs, position = given.tensor, self.position
        cost, span = costs.forward(self.units, len(inputs)), Span(SPANS[given.work], given.batch)
        outputs = await self.compute(lambda: self.shard.infer(inputs), cost, span)
        if position.after is None:
            self.post(position.coordinator, Output(position.configuration, given.work, given.batch, outputs))
        else:
            self.post(position.after, replace(given, tensor=outputs))
