"""What the coordinator of a training does: feeds the pipeline, records what is done, evaluates, changes the partition.

A step is recorded at the instant at which the first stage, on the same device, reports its update: before any state
that contains it can leave that device, so that nothing is gone on from that was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from testbed.messaging.supervision import Lost, Supervisor
from testbed.method import Job, Problem
from testbed.ml.data.batches import Due, cut_batch
from testbed.ml.layers.feed import Requests, Training, loss_fields
from testbed.ml.layers.shard import State
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.checkpointing import FromCheckpoint
from testbed.ml.pipeline.forwarding import evaluate
from testbed.ml.pipeline.measuring import Survey
from testbed.ml.pipeline.messages import Activation, Drained, End, Labels, Loss, Updated
from testbed.ml.pipeline.planning import AsynchronousOptions, Partitioner, SynchronousOptions, momentum_advice
from testbed.ml.pipeline.recovery import FromReplicas
from testbed.ml.training.stopping import Stopping


class Evaluations:
    """Tries the model on the test data now and then; what comes of it decides what the device exposes, and the end."""

    def __init__(
        self, supervisor: Supervisor, job: Job, steps: int, whole: Callable[[int], bool], weights: Callable[[], State]
    ) -> None:
        """``whole`` says whether the state after a step is here as a whole, ``weights`` returns the newest that are."""
        assert job.dataset is not None
        self.stopping = Stopping(job.problem.training)
        self._supervisor = supervisor
        self._training = job.problem.training
        self._tests = Requests(job.dataset, job.problem.workload.batch_size)
        self._steps = steps
        self._whole = whole
        self._weights = weights
        supervisor.device.expose(lambda: self.stopping.result(weights()))

    async def make(self, step: int) -> bool:
        """Evaluate after a step; wait for its state where that is the last or may be. Return whether to go on."""
        if step == self._steps or self._training.part.judged:
            await self._supervisor.until(lambda: self._whole(step))
        fields = await evaluate(self._supervisor, step, self._tests, self._training)
        self.stopping.judge(step, fields, self._weights)
        return not self.stopping.reason


class SynchronousTrainer:
    """A `testbed.messaging.supervision.ResumableWork`: one step after the other, checkpoints in between."""

    def __init__(self, supervisor: Supervisor, recovery: FromCheckpoint, job: Job[SynchronousOptions]) -> None:
        assert job.dataset is not None
        self._supervisor = supervisor
        self._recovery = recovery
        self._options = job.problem.options
        self._training = Training(job.dataset, job.problem.workload, job.problem.seed)
        self._computed = job.problem.workload.numerics != "none"
        self._evaluations = Evaluations(supervisor, job, self._training.steps, self._is_kept, recovery.weights)
        self._due = Due(self._options.evaluate_every, supervisor.device.now())
        self._reports: dict[str, Loss | Updated] = {}
        """What has been reported of the present step, by kind."""
        supervisor.mailbox.on(Loss, self._report)
        supervisor.mailbox.on(Updated, self._report)

    @property
    def start(self) -> int:
        """The step to go on with."""
        return self._recovery.checkpoint.step

    async def run(self) -> None:
        """Train from the last checkpoint to the end, gather the weights, evaluate. Raises `Lost`."""
        steps, due, now = self._training.steps, self._due, self._supervisor.device.now
        if not self.start:
            self._training.record_left_out(self._supervisor.device)
        for step in range(self.start, steps):
            await self._step(step)
            done = step + 1
            if self._supervisor.membership.joiners and self._options.checkpoints(done, steps):
                await self._supervisor.until(partial(self._is_kept, done))
                await self._recovery.let_join()
            if done < steps and due(done, now()):
                if not await self._evaluations.make(done):
                    return
                due.made(now())
        await self._evaluations.make(steps)

    def _is_kept(self, step: int) -> bool:
        """Return whether the checkpoint of this step is complete."""
        return self._recovery.checkpoint.step == step

    async def _step(self, step: int) -> None:
        """Feed one batch in, wait for its loss and for the first stage's update, which is the last of all."""
        supervisor, mailbox = self._supervisor, self._supervisor.mailbox
        images, labels = self._training.batch(step)
        samples = len(labels)
        parts = cut_batch(samples, min(self._options.micro_batches, samples))
        number = mailbox.configuration
        self._reports.clear()
        mailbox.post(supervisor.layout[-1].device, Labels(number, step, labels))
        for micro, part in enumerate(parts):
            activation = Activation(number, "train", step, micro, len(parts), samples, images[part])
            mailbox.post(supervisor.layout[0].device, activation)
        await supervisor.until(lambda: len(self._reports) == 2)

    def _report(self, report: Loss | Updated) -> None:
        """Record the present step once both its loss and its update are there."""
        self._reports[report.kind] = report
        loss = self._reports.get(Loss.kind)
        if loss is not None and loss.loss is not None and len(self._reports) == 2:
            fields = {
                "step": loss.batch,
                "samples": self._training.count(loss.batch),
                **loss_fields(loss.loss, self._computed),
            }
            self._supervisor.device.record("step", **fields)
            self._supervisor.progress += 1


class AsynchronousTrainer:
    """A `testbed.messaging.supervision.ResumableWork` in stretches, between which the pipeline is empty."""

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: FromReplicas,
        partitioner: Partitioner,
        job: Job[AsynchronousOptions],
    ) -> None:
        assert job.dataset is not None
        problem: Problem[AsynchronousOptions] = job.problem
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._recovery = recovery
        self._partitioner = partitioner
        self._options = problem.options
        self._problem = problem
        self._training = Training(job.dataset, problem.workload, problem.seed)
        self._computed = problem.workload.numerics != "none"
        self._steps = self._training.steps
        points = recovery.points
        self._evaluations = Evaluations(supervisor, job, self._steps, points.has_all, points.weights)
        self._survey = Survey(supervisor, recovery, partitioner, problem, self._training)
        self._due = Due(self._options.evaluate_every, self._device.now())
        self._done = 0
        """The batch after the last one that is done on all stages."""
        self._evaluated = 0
        self._ended = 0.0
        """When the pipeline was last made to run empty."""
        self._draining = 0.0
        """Seconds that it then took to be empty."""
        self._mailbox.on(Updated, self._record)

    @property
    def start(self) -> int:
        """The step to go on with."""
        return self._recovery.start

    async def run(self) -> None:
        """Train in stretches to the last batch, evaluate in between and at the end. Raises `Lost`."""
        step = self.start
        self._warn()
        if not step:
            self._training.record_left_out(self._device)
        while step < self._steps:
            step, wanted = await self._stretch(step)
            if self._evaluates(step):
                self._evaluated = step
                if not await self._evaluations.make(step):
                    return
                self._due.made(self._device.now())
            if step < self._steps and wanted is not None:
                await self._change(step, wanted)
                step = self.start
        await self._evaluations.make(self._steps)

    def _warn(self) -> None:
        """Record, once, what momentum does to gradients that are some batches old."""
        for text in momentum_advice(self._problem, self._options.window(len(self._supervisor.layout))):
            if not self.start:
                self._device.record("log", text=text)

    async def _stretch(self, first: int) -> tuple[int, StagePartition | None]:
        """Train from a batch on until all are done or something else is to be done.

        Return the batch to go on with, and the partition to change to, if there is a better one.
        """
        supervisor = self._supervisor
        if self._survey.lacking and not self._recovery.recovering:
            await self._survey.learn()
            if (better := self._better()) is not None:
                return first, better
        window = self._options.window(len(supervisor.layout))
        self._device.record(
            "stretch",
            step=first,
            in_flight=window,
            partition=supervisor.stages,
            configuration=self._mailbox.configuration,
        )
        fed = done = self._done = first
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
                await self._until_done(done)
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
        activation = Activation(number, "train", batch, 0, 1, len(labels), images, first)
        self._mailbox.post(layout[0].device, activation)

    def _end(self, batch: int) -> bool:
        """Let the pipeline run empty before this batch."""
        self._ended = self._device.now()
        self._mailbox.post(self._supervisor.layout[0].device, End(self._mailbox.configuration, batch))
        return True

    def _record(self, updated: Updated) -> None:
        """Record a batch that is done on all stages, the first one's update being the last of all."""
        assert updated.times is not None
        assert updated.loss is not None
        batch = updated.batch
        self._partitioner.observe(self._recovery.partition, updated.times)
        self._device.record(
            "step", step=batch, samples=self._training.count(batch), **loss_fields(updated.loss, self._computed)
        )
        self._done = batch + 1
        self._supervisor.progress = max(self._supervisor.progress, self._done)
        if self._recovery.recovering:
            self._recovery.recovering = False
            self._device.record("recovery", phase="trained", step=batch)

    async def _until_done(self, batch: int) -> None:
        """Wait until a batch is done, for as long as nobody is really lost. Raises `Lost`."""
        while True:
            try:
                return await self._supervisor.until(lambda: self._done > batch)
            except Lost as lost:
                if not await self._recovery.returned(lost):
                    raise

    def _evaluates(self, step: int) -> bool:
        return self._due(step, self._device.now()) and step not in (self._evaluated, self._steps)

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
