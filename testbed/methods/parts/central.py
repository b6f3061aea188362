"""The central node of an asynchronous pipeline: feeds it, replicates, adapts the partition, recovers from replicas.

Every change of the partition goes the same way, after a failure or without one. A new configuration is opened and
everybody says which units he has of which state. The newest state of which every unit is somewhere is gone on from;
after a drain that is the present one, after a failure that of the last replication. Each stage is told which units it
lacks and who has them, fetches them and says so; once all have, the central node commits, and training begins again
with the first batch that this state does not contain. Until then everybody keeps what he has, so a failure in between
only means another try.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from testbed.device import Device
from testbed.errors import InputError, TestbedError
from testbed.methods.base import Job
from testbed.methods.parts import messages
from testbed.methods.parts.arranging import Homogeneous
from testbed.methods.parts.asynchronous import Asynchrony
from testbed.methods.parts.crew import Answer, Lost
from testbed.methods.parts.feed import Requests, Training
from testbed.methods.parts.keeper import Keeper
from testbed.methods.parts.lead import Lead, Temper
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.placement import Placement, place
from testbed.methods.parts.profiling import profile
from testbed.methods.parts.replicas import BEGINNING, Inventory, Lineage, Point, dump, load, read, written
from testbed.methods.parts.shard import weights_of
from testbed.methods.parts.verdict import judge
from testbed.network.link import Pair
from testbed.partition.redistribution import Partition
from testbed.plan import Piece
from testbed.wire import Message

if TYPE_CHECKING:
    import torch


class Central(Lead):
    """Leads asynchronous training. Its weights, exposed, are the newest that it has as a whole."""

    def __init__(
        self,
        device: Device,
        job: Job,
        keeper: Keeper,
        outbox: Outbox,
        temper: Temper,
        arranger: Homogeneous,
        asynchrony: Asynchrony,
        evaluate_every: int | None,
    ) -> None:
        super().__init__(device, job, keeper, outbox, temper, lambda there: ())
        assert job.dataset is not None
        workload = job.problem.workload
        self._problem = job.problem
        self._keeper = keeper
        self._arranger = arranger
        self._asynchrony = asynchrony
        self._evaluate_every = evaluate_every
        self._units = len(job.problem.model.units)
        self._training = Training(job.dataset, workload, job.problem.seed)
        self._tests = Requests(job.dataset, workload.batch_size)
        self.steps = self._training.steps
        self._seeded = job.weights is None
        if job.weights is not None:
            keeper.replicas.put(BEGINNING, job.weights, range(self._units))
        self.partition = _partition(job.plan.pieces)
        self._lineage = Lineage()
        self._placement = Placement(BEGINNING, {})
        """Where the present configuration goes on from."""
        self._safe = BEGINNING
        """The newest point of which every unit is on two devices, or here."""
        self._whole = BEGINNING
        """The newest point of which every unit is here."""
        self._members: dict[str, float] = {}
        """The stages' incarnations when they were told what to be."""
        self._drained: set[str] = set()
        self._replicated: dict[int, set[str]] = {}
        """Who has had his units of a step replicated."""
        self._evaluated = 0
        self._measured: dict[Pair, float] = {}
        """Bit/s between devices, as they say."""
        self._profiled = False
        self._recovering = False
        """Whether the next batch done is the first one after a recovery."""
        self._wanted: Partition | None = None
        """What to change to once the pipeline is empty."""
        self._turned_away: set[str] = set()
        self._ended = 0.0
        """When it was last told to run empty."""
        self._draining = 0.0
        """Seconds that it then took to be empty."""

    @property
    def start(self) -> int:
        """The step that the present configuration began with."""
        return self._placement.point.step

    async def run(self) -> None:
        """Train to the end through whatever happens; raises `TestbedError` when too few devices are left."""
        self.device.expose(self._weights)
        if self._remember():
            await self._return()
        else:
            self._enter()
            self._take_up(self.partition)
        await self._go_on(self._recovering)

    def _remember(self) -> bool:
        """Read what the central node's program has left on the disk before it died; say whether there was anything."""
        training, replicas = self.device.saved("training"), self.device.saved("replicas")
        if training is None:
            return False
        self._lineage, self.partition = read(training)
        self.layout = self._arranger.pieces(self.partition)
        if replicas is not None:
            load(self._keeper.replicas, replicas)
            self._whole = self._newest_whole() or BEGINNING
        return True

    async def _return(self) -> None:
        """Go on where the program was before it died, as far as that is known to somebody."""
        self.device.record("recovery", phase="detected", step=self._whole.step, missing=[self.device.name])
        self._enter()
        await self._gather(self.partition.devices, max(self._temper.patience, self._temper.return_window))
        self._resume()

    def handle(self, message: Message) -> None:
        """Take in any message that reaches this device; never waits."""
        if message.kind not in (messages.DRAINED, messages.REPLICATED, messages.MEASURED):
            super().handle(message)
            if not self._arranger.admits:
                self._turn_away()
            return
        if message["configuration"] != self._configuration:
            return
        self._heard += 1
        if message.kind == messages.DRAINED:
            self._drained.add(message.sender)
        elif message.kind == messages.MEASURED:
            rate = message["rate"]
            self._measured[message.sender, message["target"]] = math.inf if rate is None else rate
        else:
            self._note_replicated(message["step"], message.sender)
        self._news.ring()

    def _turn_away(self) -> None:
        """Do without devices that have come since the stages were arranged, where the method cannot use them."""
        for name in sorted(self.joiners - self._turned_away):
            self.device.record("log", text=f"{name} is turned away: its units are another's")
        self._turned_away |= self.joiners
        self.joiners.clear()

    async def work(self) -> None:
        """Train in stretches to the last batch, evaluate in between and at the end."""
        step = self.start
        while step < self.steps:
            step = await self._stretch(step)
            if self._evaluates(step):
                self._evaluated = step
                await self.evaluate(step, self._tests)
            if step < self.steps and self._wanted is not None:
                await self._change(step)
                step = self.start
        last = self._lineage.point(self.steps)
        await self.until(lambda: len(self._keeper.replicas.units(last)) == self._units)
        await self.evaluate(self.steps, self._tests)

    async def _stretch(self, first: int) -> int:
        """Train from a batch on until all are done or something else is; return the batch to go on with.

        The pipeline is empty before and after.
        """
        if not self._recovering:
            await self._learn()
        window = self._asynchrony.window(len(self.layout))
        self.device.record(
            "stretch", step=first, in_flight=window, partition=self._stages(), configuration=self._configuration
        )
        self._drained.clear()
        fed = done = first
        ending = False
        while not ending or done < fed:
            while not ending and fed - done < window:
                if fed == self.steps or (fed > first and self._evaluates(fed)):
                    ending = self._end(fed)
                else:
                    self._feed(fed, fed == first)
                    fed += 1
            if done < fed:
                await self._done(done)
                done += 1
                if not ending and fed < self.steps and self._wants_change(done):
                    ending = self._end(fed)
        await self.until(lambda: self._drained >= {part.device for part in self.layout})
        self._draining = self.device.now() - self._ended
        return fed

    async def _learn(self) -> None:
        """Measure, while nothing else goes on, what the choice of partitions needs and nobody knows yet."""
        found = None
        if self._arranger.profile_runs and not self._profiled:
            images, labels = self._training.batch(0)
            found = await profile(self.device, self._problem, images, labels, self._arranger.profile_runs)
            self._profiled = True
            self.device.record("profile", seconds=list(found.execution))
        rates = {}
        for pair in self._arranger.unknown(self.partition):
            rates[pair] = await self._rate(*pair)
        self._arranger.learn(found, rates)

    async def _rate(self, source: str, target: str) -> float:
        """Have a stage measure the link to another."""
        self._outbox.post(source, messages.MEASURE, configuration=self._configuration, target=target)
        await self.until(lambda: (source, target) in self._measured)
        rate = self._measured.pop((source, target))
        finite = None if math.isinf(rate) else rate
        self.device.record("bandwidth", source=source, destination=target, rate=finite)
        return rate

    def _feed(self, batch: int, first: bool) -> None:
        images, labels = self._training.batch(batch)
        self.post(self.layout[-1].device, messages.LABELS, labels, batch=batch)
        fields = {"work": messages.TRAIN, "micro": 0, "micros": 1, "samples": len(labels), "first": first}
        self.post(self.layout[0].device, messages.ACTIVATION, images, batch=batch, **fields)

    def _end(self, batch: int) -> bool:
        """Let the pipeline run empty before this batch."""
        self._ended = self.device.now()
        self._outbox.post(self.layout[0].device, messages.END, configuration=self._configuration, batch=batch)
        return True

    async def _done(self, batch: int) -> None:
        """Wait until a batch is done on all stages, the first one's update being the last of all."""
        await self.until(lambda: (messages.UPDATED, batch) in self.results)
        updated = self.results.pop((messages.UPDATED, batch))
        self._arranger.observe(self.partition, updated["times"])
        self.device.record("step", step=batch, loss=updated["loss"], samples=self._training.samples)
        self.progress = max(self.progress, batch + 1)
        if self._recovering:
            self._recovering = False
            self.device.record("recovery", phase="trained", step=batch)

    def _evaluates(self, step: int) -> bool:
        every = self._evaluate_every
        return every is not None and step % every == 0 and step not in (self._evaluated, self.steps)

    def _wants_change(self, done: int) -> bool:
        """Say whether the pipeline is to run empty now because there is something better; remember what."""
        if self._arranger.due(done):
            coming = self.joiners if self._arranger.admits else set()
            self._wanted = self._arranger.better(self.partition, self._ordered({*self.partition.devices, *coming}))
        return self._wanted is not None

    async def _change(self, step: int) -> None:
        """Change to another partition, the pipeline being empty; raises `Lost` when a stage is not there any more."""
        assert self._wanted is not None
        before, wanted, self._wanted = self.partition, self._wanted, None
        begun = self.device.now()
        self._enter()
        await self._gather({*before.devices, *wanted.devices}, self._patience)
        there = self._there()
        verdict = judge(self._members, self._present(there))
        if verdict.lost:
            raise Lost(verdict.lost, back=verdict.empty)
        self._take_up(self._arranger.better(before, there) or before)
        await self._establish()
        self.device.record(
            "repartition",
            step=step,
            partition=self._stages(),
            seconds=self._draining + self.device.now() - begun,
            draining=self._draining,
            bytes=self._moved_bytes(),
        )

    async def _establish(self) -> None:
        """Have every stage fetch what it lacks; commit once all have it."""
        crew, point = self._crew, self._placement.point
        crew.appoint()
        stages = self._stages()
        for part in self.layout:
            need = self._placement.need(part.device)
            self._outbox.post(
                part.device,
                messages.CONFIGURE,
                configuration=self._configuration,
                stages=stages,
                steps=self.steps,
                made=point.configuration,
                step=point.step,
                seeded=need is None,
                fetch={} if need is None else {holder: list(units) for holder, units in need.fetch.items()},
            )
        await self.device.save("training", written(self._lineage, self.partition))
        await self.until(lambda: crew.ready >= {part.device for part in self.layout})
        self._members = self._present(self.partition.devices)
        if self._recovering:
            self.device.record("recovery", phase="redistributed", step=self.start, bytes=self._moved_bytes())
        for part in self.layout:
            whole = {self._whole} if part.device == self.device.name else set()
            self._tell_to_keep(messages.COMMIT, part.device, {point, self._safe, *whole})
        if not self._established:
            self._established = True
            self._patience = self._temper.patience

    def _tell_to_keep(self, kind: str, device: str, points: Collection[Point]) -> None:
        keep = [[point.configuration, point.step] for point in sorted(points)]
        self._outbox.post(device, kind, configuration=self._configuration, keep=keep)

    def _note_replicated(self, step: int, device: str) -> None:
        """Once all stages have their units replicated, older points are needed no more."""
        point = Point(self._configuration, step)
        having = self._replicated.setdefault(step, set())
        having.add(device)
        if having < {part.device for part in self.layout} or point < self._safe:
            return
        self._safe = point
        if len(self._keeper.replicas.units(point)) == self._units:
            self._whole = point
        for part in self.layout:
            whole = {self._whole} if part.device == self.device.name else set()
            self._tell_to_keep(messages.KEEP, part.device, {point, *whole})
        self._keeper.save("replicas", dump(self._keeper.replicas))

    async def _recover(self, lost: Lost) -> None:
        """Find out who has what, choose the state to go on from and the stages to go on with."""
        self.device.record("recovery", phase="detected", step=self.progress, missing=lost.missing)
        self._wanted = None
        known = dict(self._crew.appointed)
        self._enter()
        gone = set(lost.missing) - lost.back
        await self._gather(set(self.partition.devices) - gone, self._patience, gone)
        self._learn_patience(lost, known)
        self._resume()

    def _resume(self) -> None:
        """Choose the state to go on from and the stages to go on with, among the devices that have answered."""
        there = self._there()
        present = self._present(there)
        # What no configuration has told yet has nothing to lose: it counts as it is.
        members = {name: self._members.get(name, present.get(name, 0.0)) for name in self.partition.devices}
        case = judge(members, present).case
        self._take_up(self._after_loss(there))
        self._recovering = True
        self.device.record("recovery", phase="repartitioned", step=self.start, case=case, partition=self._stages())

    async def _gather(self, names: Collection[str], seconds: float, missing: Collection[str] = ()) -> None:
        """Ask everybody what he has; wait so long for these, and for missing ones as long as they may be away."""
        crew, now = self._crew, self.device.now()
        patient, returning = now + seconds, now + self._temper.return_window
        awaited = dict.fromkeys(names, patient) | dict.fromkeys(missing, returning)
        crew.ask(crew.others)
        while True:
            left = [
                until - self.device.now()
                for name, until in awaited.items()
                if name not in (self.device.name, *crew.answers, *self._cut) and until > self.device.now()
            ]
            if not left:
                return
            await self._news.wait(max(left))

    def _there(self) -> list[str]:
        """Return the devices that can be stages, in the order of the scenario."""
        there = {self.device.name, *self._crew.answers} - self._cut
        if not self._arranger.admits:
            there &= set(self.partition.devices)
        return self._ordered(there)

    def _present(self, names: Collection[str]) -> dict[str, float]:
        """Return the incarnations of devices that are there."""
        return {name: self._crew.there.get(name, self._keeper.incarnation) for name in names}

    def _ordered(self, names: Collection[str]) -> list[str]:
        return [spec.name for spec in self._problem.devices if spec.name in names]

    def _after_loss(self, there: Sequence[str]) -> Partition:
        """Return the stages to go on with: the same if all are there, else what the method makes of those that are."""
        if set(self.partition.devices) <= set(there):
            return self.partition
        try:
            return self._arranger.after_loss(self.partition, there)
        except InputError as error:
            raise TestbedError(f"not enough devices: {error.text}") from error

    def _take_up(self, partition: Partition) -> None:
        """Make a partition the one to be established, from the newest state of which every unit is somewhere."""
        crew = self._crew
        inventory: dict[str, Inventory] = {self.device.name: self._keeper.replicas.inventory()}
        for name, answer in crew.answers.items():
            inventory[name] = [] if name in crew.restarted | self._cut else list(answer.held)
        self._placement = place(self._lineage, inventory, self.partition, partition, self._seeded, self.steps)
        self._lineage = self._lineage.branch(self.start, self._configuration)
        self._safe, self._whole = (
            point if point in self._lineage else BEGINNING for point in (self._safe, self._whole)
        )
        self._replicated.clear()
        joining = set(partition.devices).difference(self.partition.devices)
        if joining:
            self.device.record("log", text=f"{', '.join(sorted(joining))} joins at step {self.start}")
        self.partition, self.layout = partition, self._arranger.pieces(partition)
        # Who has not answered is not there: it would be waited for in vain at the next change.
        self.joiners = crew.answers.keys() - set(partition.devices) - self._cut

    def _moved_bytes(self) -> float:
        """Return the bytes that the present configuration had fetched."""
        return self._placement.bytes(self._problem.model.units, self._problem.workload.optimizer)

    def _own_answer(self) -> Answer:
        answer = super()._own_answer()
        return replace(answer, computing=answer.computing or self._outbox.waiting())

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the newest weights that are here as a whole; none before any are."""
        point = self._newest_whole()
        return {} if point is None else weights_of(self._keeper.replicas.state(point, range(self._units)))

    def _newest_whole(self) -> Point | None:
        """Return the newest point that still counts of which every unit is here."""
        replicas = self._keeper.replicas
        whole = [point for point in replicas.points() if len(replicas.units(point)) == self._units]
        return max((point for point in whole if point in self._lineage), key=lambda point: point.step, default=None)


def _partition(layout: Sequence[Piece]) -> Partition:
    return Partition(tuple(part.device for part in layout), (0, *(part.last for part in layout)))
