"""What the coordinator of an asynchronous pipeline does: feeds it, measures, evaluates, changes the partition."""

from __future__ import annotations

from testbed.data.dataset import Dataset
from testbed.kits.asynchronous.messages import BatchActivation, BatchUpdated, Drained, End
from testbed.kits.asynchronous.partitioners import AsynchronousOptions, HomogeneousPartitioner
from testbed.kits.asynchronous.recovery import FromReplicas
from testbed.kits.asynchronous.survey import Survey
from testbed.kits.layers.feed import Requests, Training
from testbed.kits.layers.score import told
from testbed.kits.messaging.supervision import Lost, Supervisor
from testbed.kits.pipeline.forwarding import evaluate
from testbed.kits.pipeline.stage import Labels
from testbed.method import Problem
from testbed.partition.redistribution import StagePartition


class AsynchronousTrainer:
    """A `testbed.kits.messaging.recovery.ResumableWork`: trains in stretches, between which the pipeline is empty."""

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: FromReplicas,
        partitioner: HomogeneousPartitioner,
        problem: Problem[AsynchronousOptions],
        dataset: Dataset,
    ) -> None:
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._recovery = recovery
        self._partitioner = partitioner
        self._problem = problem
        self._training = Training(dataset, problem.workload, problem.seed)
        self._tests = Requests(dataset, problem.workload.batch_size)
        self._steps = self._training.steps
        self._survey = Survey(supervisor, recovery, partitioner, problem, self._training)
        self._evaluated = 0
        self._ended = 0.0
        """When it was last told to run empty."""
        self._draining = 0.0
        """Seconds that it then took to be empty."""

    @property
    def start(self) -> int:
        """The step to go on with."""
        return self._recovery.start

    async def run(self) -> None:
        """Train in stretches to the last batch, evaluate in between and at the end."""
        step = self.start
        while step < self._steps:
            step, wanted = await self._stretch(step)
            if self._evaluates(step):
                self._evaluated = step
                await evaluate(self._supervisor, step, self._tests)
            if step < self._steps and wanted is not None:
                await self._change(step, wanted)
                step = self.start
        await self._supervisor.until(lambda: self._recovery.points.has_all(self._steps))
        await evaluate(self._supervisor, self._steps, self._tests)

    async def _stretch(self, first: int) -> tuple[int, StagePartition | None]:
        """Train from a batch on until all are done or something else is to be done.

        Return the batch to go on with, and the partition to change to, if there is a better one.
        """
        supervisor = self._supervisor
        if self._survey.lacking and not self._recovery.recovering:
            await self._survey.learn()
            if (better := self._better()) is not None:
                return first, better
        window = self._problem.options.asynchrony.window(len(supervisor.layout))
        self._device.record(
            "stretch",
            step=first,
            in_flight=window,
            partition=supervisor.stages,
            configuration=self._mailbox.configuration,
        )
        fed = done = first
        ending = False
        wanted: StagePartition | None = None
        while not ending or done < fed:
            while not ending and fed - done < window:
                if fed == self._steps or (fed > first and self._evaluates(fed)):
                    ending = self._end(fed)
                else:
                    self._feed(fed, fed == first)
                    fed += 1
            if done < fed:
                await self._done(done)
                done += 1
                # Also while the pipeline runs empty for an evaluation: this batch does not come again.
                due = self._partitioner.due(done)
                self._survey.look(again=due)
                if due and fed < self._steps:
                    wanted = None if self._survey.lacking else self._better()
                    if self._survey.lacking or wanted is not None:
                        ending = ending or self._end(fed)
        for part in supervisor.layout:
            await supervisor.take(Drained, part.device)
        self._draining = self._device.now() - self._ended
        return fed, wanted

    def _feed(self, batch: int, first: bool) -> None:
        layout, number = self._supervisor.layout, self._mailbox.configuration
        images, labels = self._training.batch(batch)
        self._mailbox.post(layout[-1].device, Labels(number, batch, labels))
        activation = BatchActivation(number, "train", batch, 0, 1, len(labels), images, first)
        self._mailbox.post(layout[0].device, activation)

    def _end(self, batch: int) -> bool:
        """Let the pipeline run empty before this batch."""
        self._ended = self._device.now()
        self._mailbox.post(self._supervisor.layout[0].device, End(self._mailbox.configuration, batch))
        return True

    async def _done(self, batch: int) -> None:
        """Wait until a batch is done on all stages, the first one's update being the last of all."""
        supervisor = self._supervisor
        updated = await self._updated(batch)
        self._partitioner.observe(self._recovery.partition, updated.times)
        self._device.record("step", step=batch, samples=self._training.samples, **told(updated.loss))
        supervisor.progress = max(supervisor.progress, batch + 1)
        if self._recovery.recovering:
            self._recovery.recovering = False
            self._device.record("recovery", phase="trained", step=batch)

    async def _updated(self, batch: int) -> BatchUpdated:
        """Return the word that a batch is done, waited for as long as nobody is really lost."""
        while True:
            try:
                return await self._supervisor.take(BatchUpdated, batch)
            except Lost as lost:
                if not await self._recovery.returned(lost):
                    raise

    def _evaluates(self, step: int) -> bool:
        every = self._problem.options.evaluate_every
        return every is not None and step % every == 0 and step not in (self._evaluated, self._steps)

    def _better(self) -> StagePartition | None:
        """Return the partition that is worth changing to now; None where there is none."""
        partition = self._recovery.partition
        there = {*partition.devices, *self._recovery.joiners()}
        return self._partitioner.better(partition, self._recovery.ordered(there))

    async def _change(self, step: int, wanted: StagePartition) -> None:
        """Change to another partition, the pipeline being empty; raises `Lost` when a stage is not there any more."""
        recovery = self._recovery
        before = recovery.partition
        begun = self._device.now()
        there = await recovery.regroup({*before.devices, *wanted.devices})
        recovery.take_up(self._partitioner.better(before, there) or before)
        await recovery.establish()
        self._device.record(
            "repartition",
            step=step,
            partition=self._supervisor.stages,
            seconds=self._draining + self._device.now() - begun,
            draining=self._draining,
        )
