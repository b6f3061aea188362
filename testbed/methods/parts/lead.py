"""The lead: arranges devices into stages, notices when that fails, and arranges those left anew.

Detection and recovery use nothing but messages. Nothing heard from the stages for ``patience`` seconds makes the lead
probe them; a slow device answers and is waited for, one that is silent or holds nothing is lost. The lead then opens
a configuration with a higher number, waits up to ``return_window`` for the lost ones to answer, and sets up the same
stages again from its last checkpoint, or other ones over the devices left. A device that comes back later joins at the
next checkpoint. What belongs to a lower configuration is ignored everywhere.

The death of the lead itself is not survived: it holds the data and the checkpoints. A lead that restarts starts the
workload over, in configurations numbered above those of its former self.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.device import Device
from testbed.errors import InputError, TestbedError
from testbed.methods.base import Job
from testbed.methods.parts import costs, messages
from testbed.methods.parts.bell import Bell
from testbed.methods.parts.checkpoint import Checkpoint, Collector
from testbed.methods.parts.crew import Answer, Crew, Lost
from testbed.methods.parts.feed import Requests
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.score import Score
from testbed.methods.parts.shard import State, restrict, weights_of
from testbed.methods.parts.worker import Worker
from testbed.plan import Piece
from testbed.wire import Message

if TYPE_CHECKING:
    import torch

Layout = Sequence[Piece]
"""Stages in their order; the first is the lead's."""
Planner = Callable[[Collection[str]], Layout]
"""Devices that can be had -> stages over them; raises `InputError` where there are none."""

HOPELESS = 10
"""Recoveries in a row, nothing having been done in between, after which the lead does without who is lost again."""
FRUITLESS = 20
"""Recoveries in a row, nothing having been done in between, after which the lead gives up."""
CALMEST = 8.0
"""How many times its first patience the lead may come to have with devices that turn out to be slow to reach."""


@dataclass(frozen=True)
class Temper:
    """How long the lead waits for what, in seconds."""

    patience: float
    """Without news before the stages are probed, and without an answer before they count as lost."""
    return_window: float
    """For lost devices to come back before the others go on without them."""
    standstill: float
    """Without anything done, though all stages answer."""
    startup: float = 30.0
    """Patience until the first configuration stands: devices do not all start at once."""


class Joining(Exception):  # noqa: N818 - good news
    """At a checkpoint, devices are there that were not when the stages were arranged."""


class Lead(ABC):
    """The lead's side of one run; a subclass says what work is done."""

    steps = 0
    """Training steps of the whole workload."""

    def __init__(
        self, device: Device, job: Job, worker: Worker, outbox: Outbox, temper: Temper, planner: Planner
    ) -> None:
        self.device = device
        self.job = job
        self.layout: Layout = job.plan.pieces
        self.checkpoint = Checkpoint(0, job.weights)
        self.progress = 0
        """Rises with every piece of work done: recoveries without any in between are fruitless."""
        self.results: dict[tuple[str, int], Message] = {}
        """What came out of the present configuration, by kind and batch."""
        self._configuration = int(device.now() * 1000)
        self._worker = worker
        self._outbox = outbox
        self._temper = temper
        self._patience = max(temper.startup, temper.patience)
        self._established = False
        self._planner = planner
        self._news = Bell(device)
        self._crew = Crew(device, job.problem, outbox, self._news, self.backlog)
        self._collector = Collector(len(job.problem.model.units))
        self._heard = 0
        """Messages of what was the present configuration: rises as long as the pipeline gets on."""
        self.joiners: set[str] = set()
        """Devices that answer and are no stage."""
        self._cut: set[str] = set()
        """Devices that answer but had lost a neighbour: not asked to join again."""

    @abstractmethod
    async def work(self) -> None:
        """Do what is left to do, from ``self.checkpoint`` on; called again after every recovery."""

    @property
    def start(self) -> int:
        """The step, or request, that the present configuration began with."""
        return self.checkpoint.step

    async def run(self) -> None:
        """Work to the end through whatever happens; raises `TestbedError` when too few devices are left."""
        self.device.expose(lambda: weights_of(self.checkpoint.state or {}))
        self._enter()
        await self._go_on()

    async def _go_on(self, recovering: bool = False) -> None:
        """Work, recover and work again until all is done."""
        fruitless = 0
        while True:
            before = self.progress
            try:
                await self._establish()
                if recovering:
                    self.device.record("recovery", phase="resumed", step=self.start, partition=self._stages())
                    recovering = False
                await self.work()
                return
            except Joining:
                await self._welcome()
            except Lost as lost:
                recovering = True
                fruitless = 0 if self.progress > before else fruitless + 1
                if fruitless == FRUITLESS:
                    raise TestbedError(
                        f"{FRUITLESS} recoveries in a row without getting on, the last for {lost}: if links or "
                        "devices are slower than the scenario says, raise method.patience"
                    ) from lost
                if fruitless >= HOPELESS:
                    lost = Lost(lost.missing, lost.missing, lost.back)
                self._exclude(lost.cut)
                await self._recover(lost)

    def orders(self) -> dict[str, Any]:
        """Return what a configure message says beside the state; see `messages`."""
        return {"stages": self._stages(), "steps": self.steps}

    def state_of(self, part: Piece) -> State:
        """Return what one device begins with, of the last checkpoint; nothing where it is to draw its own."""
        state = self.checkpoint.state
        return {} if state is None else restrict(state, part.first, part.last)

    def backlog(self, part: Piece) -> float:
        """Return how many bytes a device may be sending to the lead: a checkpoint, and inputs."""
        workload, units = self.job.problem.workload, self.job.problem.model.units[part.first : part.last]
        return costs.state_bytes(units, workload.optimizer) + workload.batch_size * units[0].input_bytes

    def handle(self, message: Message) -> None:
        """Take in any message that reaches this device; never waits."""
        kind = message.kind
        current = message.fields.get("configuration") == self._configuration
        if current and kind != messages.ALIVE:
            self._heard += 1
        if kind in (messages.HELLO, messages.ALIVE, messages.CONFIGURED):
            self._crew.handle(message)
            if message.sender not in self._cut and all(message.sender != part.device for part in self.layout):
                self.joiners.add(message.sender)
        elif not current:
            return
        elif kind == messages.STATE:
            completed = self._collector.add(message["step"], message["unit"], message.tensors)
            self.checkpoint = completed or self.checkpoint
        elif kind in (messages.LOSS, messages.UPDATED, messages.OUTPUT):
            self.results[kind, message["batch"]] = message
        else:
            self._worker.handle(message)
        self._news.ring()

    def post(self, peer: str, kind: str, tensor: torch.Tensor, **fields: Any) -> None:
        """Send a piece of work of the present configuration without waiting."""
        self._outbox.post(peer, kind, {messages.TENSOR: tensor}, configuration=self._configuration, **fields)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until the stages have brought something about; raises `Lost` when they cannot any more."""
        while not done():
            if restarted := self._crew.restarted & {part.device for part in self.layout}:
                raise Lost(restarted, back=restarted)
            heard = self._heard
            if await self._news.wait(self._patience) or self._heard != heard:
                continue
            if await self._crew.roll_call(self.layout, self._patience, lambda: self._heard):
                self._crew.check_movement(self.layout, self._own_answer(), self._temper.standstill)

    async def forward_all(
        self, work: str, wanted: Iterable[int], window: int, images: Callable[[int], torch.Tensor]
    ) -> AsyncIterator[tuple[int, torch.Tensor]]:
        """Send the wanted batches through the stages, ``window`` at a time; yield index and outputs of each.

        ``images`` is asked for a batch's inputs at the moment they are sent.
        """
        waiting = deque(wanted)
        under_way: set[int] = set()
        while waiting or under_way:
            while waiting and len(under_way) < window:
                index = waiting.popleft()
                under_way.add(index)
                inputs = images(index)
                fields = {"work": work, "batch": index, "micro": 0, "micros": 1, "samples": len(inputs)}
                self.post(self.layout[0].device, messages.ACTIVATION, inputs, **fields)
            await self.until(lambda: any(kind == messages.OUTPUT for kind, _ in self.results))
            kind, index = next(key for key in self.results if key[0] == messages.OUTPUT)
            under_way.remove(index)
            self.progress += 1
            yield index, self.results.pop((kind, index)).tensors[messages.TENSOR]

    async def evaluate(self, step: int, tests: Requests) -> None:
        """Send the test part through the stages, as many batches at once as keep them all busy."""
        score = Score()
        outputs = self.forward_all(messages.EVALUATE, range(len(tests)), 2 * len(self.layout), tests.images)
        async for index, output in outputs:
            score.add(output, tests.labels(index))
        self.device.record("evaluate", step=step, accuracy=score.accuracy, loss=score.loss)

    def let_join(self) -> None:
        """Raise `Joining` if devices have come (back) that would make for more stages; call at a checkpoint."""
        if not self.joiners:
            return
        try:
            possible = self._planner({*self.joiners, *(part.device for part in self.layout)})
        except InputError:
            possible = ()
        if len(possible) <= len(self.layout):
            self.joiners.clear()
            return
        raise Joining

    def _stages(self) -> list[tuple[str, int, int]]:
        """Return the stages as they are told and recorded."""
        return [(part.device, part.first, part.last) for part in self.layout]

    def _own_answer(self) -> Answer:
        """Say of this device what the others answer of theirs."""
        stage = self._worker.stage
        assert stage is not None
        return Answer(self._configuration, stage.actions, stage.computing, self._outbox.overdue())

    def _enter(self) -> None:
        """Give up the present configuration for a new one."""
        self._configuration += 1
        self._outbox.withdraw()
        self._worker.enter(self._configuration)
        self._collector.clear()
        self.results.clear()
        self._crew.enter(self._configuration)

    async def _establish(self) -> None:
        """Tell every stage what it is, from the last checkpoint on, and wait until all are ready."""
        self._crew.appoint()
        given = self.checkpoint.state is not None
        for part in self.layout:
            self._outbox.post(
                part.device,
                messages.CONFIGURE,
                self.state_of(part),
                configuration=self._configuration,
                given=given,
                **self.orders(),
            )
        await self.until(lambda: self._crew.ready >= {part.device for part in self.layout})
        if not self._established:
            self._established = True
            self._patience = self._temper.patience

    async def _recover(self, lost: Lost) -> None:
        """Wait for lost devices to come back; arrange those that are there."""
        self.device.record("recovery", phase="detected", step=self.start, missing=lost.missing)
        known = dict(self._crew.appointed)
        self._enter()
        await self._gather({part.device for part in self.layout}, self._temper.return_window)
        self._learn_patience(lost, known)
        self._arrange()

    def _exclude(self, names: Collection[str]) -> None:
        """Turn devices away for good, though they may answer: with them the others get nowhere."""
        for name in sorted({*names} - self._cut):
            self.device.record(
                "log", text=f"{name} is turned away: it may answer, but the others do not get on with it"
            )
        self._cut |= {*names}

    def _learn_patience(self, lost: Lost, known: Mapping[str, float]) -> None:
        """Be more patient if a device was there all the time, only slow to reach.

        ``known`` are the incarnations that were told what to be: who started anew is not slow. What a device holds says
        less, since it may be so slow to reach that it never heard what to be.
        """
        answering = [name for name in lost.missing if name in self._crew.answers and name not in lost.cut]
        if any(known.get(name) == self._crew.there[name] for name in answering):
            self._patience = min(2 * self._patience, max(self._patience, CALMEST * self._temper.patience))

    async def _welcome(self) -> None:
        """Arrange the devices anew, those that have come included."""
        self.device.record("log", text=f"{', '.join(sorted(self.joiners))} join at step {self.checkpoint.step}")
        self._enter()
        await self._gather({*self.joiners, *(part.device for part in self.layout)}, self._patience)
        self._arrange()

    async def _gather(self, names: Collection[str], seconds: float) -> None:
        """Ask everybody, and wait until all of these have answered in the present configuration, at most so long."""
        wanted = {*names} - {self.device.name} - self._cut
        deadline = self.device.now() + seconds
        self._crew.ask(self._crew.others)
        while wanted - self._crew.there.keys() and self.device.now() < deadline:
            await self._news.wait(deadline - self.device.now())

    def _arrange(self) -> None:
        """Keep the stages if all their devices are there and no others, else plan over those that are."""
        there = {self.device.name, *self._crew.there} - self._cut
        if {part.device for part in self.layout} == there:
            return
        try:
            self.layout = self._planner(there)
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error
        self.joiners = there - {part.device for part in self.layout}
