"""The coordinator's side of training: feeding the pipeline, recording steps, evaluating, repartitioning.

A step is recorded when the first stage, on the same device, reports its update. A state containing the update can leave
the device only later, so training never resumes from an unrecorded step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from testbed.messaging.supervision import Lost, Supervisor
from testbed.ml.data.batches import IntervalTrigger, cut_batch
from testbed.ml.layers.feed import Requests, Training, loss_fields
from testbed.ml.layers.shard import State
from testbed.ml.method import PlanningProblem, ProgramContext
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.checkpointing import CheckpointRecovery
from testbed.ml.pipeline.forwarding import evaluate
from testbed.ml.pipeline.measuring import LinkProfiler
from testbed.ml.pipeline.messages import Activation, Drained, End, Labels, Loss, Updated
from testbed.ml.pipeline.planning import (
    AsynchronousOptions,
    Partitioner,
    SynchronousOptions,
    momentum_advice,
)
from testbed.ml.pipeline.recovery import ReplicaRecovery
from testbed.ml.training.stopping import Stopping


class Evaluations:
    """Evaluates the model periodically; the results decide the exposed weights and early stopping."""

    def __init__(
        self,
        supervisor: Supervisor,
        context: ProgramContext,
        steps: int,
        is_complete: Callable[[int], bool],
        weights: Callable[[], State],
    ) -> None:
        """``is_complete`` returns whether all weights after a step are here, ``weights`` the newest complete ones."""
        assert context.dataset is not None
        self.stopping = Stopping(context.problem.training)
        self._supervisor = supervisor
        self._training = context.problem.training
        self._tests = Requests(context.dataset, context.problem.workload.batch_size)
        self._steps = steps
        self._is_complete = is_complete
        self._weights = weights
        supervisor.device.expose(self._exposed_weights)

    def _exposed_weights(self) -> State:
        return self.stopping.result(self._weights())

    async def make(self, step: int) -> bool:
        """Evaluate the model after ``step`` steps; return whether training continues.

        If the step is the last one, or early stopping may end training here, wait until its weights are complete: they
        may become the result.
        """
        may_be_last = step == self._steps or self._training.part.uses_evaluations
        if may_be_last:
            await self._supervisor.until(lambda: self._is_complete(step))
        fields = await evaluate(self._supervisor, step, self._tests, self._training)
        self.stopping.judge(step, fields, self._weights)
        return not self.stopping.reason


class SynchronousTrainer:
    """A `testbed.messaging.supervision.ResumableWork`: one step after the other, with checkpoints in between."""

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: CheckpointRecovery,
        context: ProgramContext[SynchronousOptions],
    ) -> None:
        assert context.dataset is not None
        self._supervisor = supervisor
        self._recovery = recovery
        self._options = context.problem.options
        self._training = Training(
            context.dataset, context.problem.workload, context.problem.seed
        )
        self._computed = context.problem.workload.numerics != "none"
        self._evaluations = Evaluations(
            supervisor,
            context,
            self._training.steps,
            self._is_checkpointed,
            recovery.weights,
        )
        self._due = IntervalTrigger(
            self._options.evaluate_every, supervisor.device.now()
        )
        self._reports: dict[str, Loss | Updated] = {}
        """Reports about the current step, by kind."""
        supervisor.mailbox.on(Loss, self._record_step)
        supervisor.mailbox.on(Updated, self._record_step)

    @property
    def start(self) -> int:
        """The step to resume with."""
        return self._recovery.checkpoint.step

    async def run(self) -> None:
        """Train from the last checkpoint to the end, gather the weights and evaluate. Raises `Lost`."""
        steps = self._training.steps
        device = self._supervisor.device
        # Not again where training resumes at a later step.
        if not self.start:
            self._training.record_left_out(self._supervisor.device)
        for step in range(self.start, steps):
            await self._train_step(step)
            done = step + 1
            # Joiners wait for a checkpoint: a new configuration resumes from the last one and would lose steps since.
            joiners = self._supervisor.membership.joiners
            if joiners and self._options.checkpoints(done, steps):
                await self._supervisor.until(partial(self._is_checkpointed, done))
                await self._recovery.admit_joiners()
            if done < steps and self._due(done, device.now()):
                if not await self._evaluations.make(done):
                    return
                self._due.made(device.now())
        await self._evaluations.make(steps)

    def _is_checkpointed(self, step: int) -> bool:
        """Return whether the checkpoint after ``step`` steps is complete."""
        return self._recovery.checkpoint.step == step

    async def _train_step(self, step: int) -> None:
        """Feed one batch; wait for its loss and for the first stage's update, which ends the step."""
        supervisor = self._supervisor
        mailbox = supervisor.mailbox
        images, labels = self._training.batch(step)
        samples = len(labels)
        # An incomplete last batch may have fewer samples than micro-batches.
        micro_batches = min(self._options.micro_batches, samples)
        parts = cut_batch(samples, micro_batches)
        configuration = mailbox.configuration
        self._reports.clear()
        first_stage = supervisor.layout[0].device
        last_stage = supervisor.layout[-1].device
        mailbox.post(last_stage, Labels(configuration, step, labels))
        for micro, part in enumerate(parts):
            activation = Activation(
                configuration=configuration,
                work="train",
                batch=step,
                micro=micro,
                micros=len(parts),
                samples=samples,
                tensor=images[part],
            )
            mailbox.post(first_stage, activation)
        # The loss of the last stage, and the update of the first one.
        await supervisor.until(lambda: len(self._reports) == 2)

    def _record_step(self, report: Loss | Updated) -> None:
        """Record the current step once both its loss and its update have arrived."""
        # The reports come from the last and from the first stage, in any order.
        self._reports[report.kind] = report
        loss = self._reports.get(Loss.kind)
        if loss is None or loss.loss is None or len(self._reports) < 2:
            return
        self._supervisor.device.record(
            "step",
            step=loss.batch,
            samples=self._training.count(loss.batch),
            **loss_fields(loss.loss, computed=self._computed),
        )
        self._supervisor.progress += 1


@dataclass(frozen=True)
class Feeding:
    """State: the pipeline is being filled, starting with a batch."""

    first: int
    """The first batch."""
    draining: float = 0.0
    """Seconds that the pipeline took to run empty before."""


@dataclass(frozen=True)
class Draining:
    """State: the pipeline runs empty; all batches before ``end`` are under way or done."""

    done: int
    """The first batch that is not done on all stages."""
    end: int
    target: StagePartition | None
    """The partition to change to afterwards; None keeps the present one."""
    since: float
    """When the last batch was fed, in seconds."""


@dataclass(frozen=True)
class Reconfiguring:
    """State: the pipeline is empty and receives another partition."""

    step: int
    """The batch to continue with."""
    target: StagePartition
    draining: float
    """Seconds that the pipeline took to run empty."""


class AsynchronousTrainer:
    """Asynchronous training on the coordinator; a `testbed.messaging.supervision.ResumableWork`.

    A state machine with the states `Feeding`, `Draining` and `Reconfiguring`: the pipeline runs empty for evaluations
    and for changes of the partition, and is filled again afterwards.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: ReplicaRecovery,
        partitioner: Partitioner,
        context: ProgramContext[AsynchronousOptions],
    ) -> None:
        assert context.dataset is not None
        problem: PlanningProblem[AsynchronousOptions] = context.problem
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._recovery = recovery
        self._partitioner = partitioner
        self._problem = problem
        self._training = Training(context.dataset, problem.workload, problem.seed)
        points = recovery.points
        self._evaluations = Evaluations(
            supervisor, context, self._training.steps, points.has_all, points.weights
        )
        self._profiler = LinkProfiler(
            supervisor, recovery, partitioner, problem, self._training
        )
        self._due = IntervalTrigger(problem.options.evaluate_every, self._device.now())
        self._done = 0
        """The batch after the last one that is done on all stages."""
        self._evaluated = 0
        self._mailbox.on(Updated, self._record_batch)

    @property
    def start(self) -> int:
        """The step to resume with."""
        return self._recovery.start

    async def run(self) -> None:
        """Train to the last batch, evaluating in between and at the end. Raises `Lost`."""
        # Not again where training resumes at a later step.
        if not self.start:
            self._record_warnings()
            self._training.record_left_out(self._device)
        state: Feeding | Draining | Reconfiguring | None = Feeding(self.start)
        while state is not None:
            if isinstance(state, Feeding):
                state = await self._feed_batches(state)
            elif isinstance(state, Draining):
                state = await self._await_drain(state)
            else:
                state = await self._change_partition(state)

    def _record_warnings(self) -> None:
        """Record a warning about momentum with gradients several batches old."""
        for text in momentum_advice(self._problem, self._window_size):
            self._device.record("log", text=text)

    @property
    def _window_size(self) -> int:
        """Maximum number of batches in the pipeline."""
        return self._problem.options.window(len(self._supervisor.layout))

    async def _feed_batches(
        self, state: Feeding
    ) -> Draining | Reconfiguring | Feeding | None:
        """Feed batches until the end of training, the next evaluation, or a possible repartition."""
        first = state.first
        if first == self._training.steps:
            await self._evaluations.make(first)
            return None
        target = await self._measure_and_propose()
        if target is not None:
            return await self._after_draining(first, target, state.draining)
        window = self._window_size
        # A stretch is the training between two times at which the pipeline is empty.
        self._device.record(
            "stretch",
            step=first,
            in_flight=window,
            partition=self._supervisor.stages,
            configuration=self._mailbox.configuration,
        )
        self._done = first
        done = first
        fed = first
        while True:
            # More batches than the window would only wait before a stage, which stores one weight version for each.
            while fed - done < window:
                if self._must_drain(first, fed):
                    return self._end_stretch(done, fed)
                self._post_batch(fed, begins_stretch=fed == first)
                fed += 1
            await self._wait_until_done(done)
            done += 1
            if self._must_reconsider(done, fed):
                target = self._propose_if_measured()
                if target is not None or self._profiler.lacks_measurements:
                    return self._end_stretch(done, fed, target)

    async def _measure_and_propose(self) -> StagePartition | None:
        """Measure the times and links missing for the choice of a partition; return a better partition, if any."""
        if not self._profiler.lacks_measurements or self._recovery.recovering:
            return None
        await self._profiler.measure_missing()
        return self._propose_partition()

    def _must_drain(self, first: int, batch: int) -> bool:
        """Return whether the pipeline must run empty before a batch."""
        if batch == self._training.steps:
            return True
        # An evaluation needs the weights of one step on all stages, which they have only while no batch is under way.
        return batch > first and self._must_evaluate(batch)

    def _post_batch(self, batch: int, *, begins_stretch: bool) -> None:
        """Send the labels of a batch to the last stage, and the samples to the first."""
        layout = self._supervisor.layout
        configuration = self._mailbox.configuration
        images, labels = self._training.batch(batch)
        labels_message = Labels(configuration, batch, labels)
        self._mailbox.post(layout[-1].device, labels_message)
        activation = Activation(
            configuration=configuration,
            work="train",
            batch=batch,
            micro=0,
            micros=1,
            samples=len(labels),
            tensor=images,
            first=begins_stretch,
        )
        self._mailbox.post(layout[0].device, activation)

    def _end_stretch(
        self, done: int, end: int, target: StagePartition | None = None
    ) -> Draining:
        """Make the pipeline run empty before batch ``end``; all batches before ``done`` are done."""
        now = self._device.now()
        first_stage = self._supervisor.layout[0].device
        last_message = End(self._mailbox.configuration, end)
        self._mailbox.post(first_stage, last_message)
        return Draining(done, end, target, now)

    async def _await_drain(self, state: Draining) -> Reconfiguring | Feeding | None:
        """Wait until the batches under way are done, and all stages have reported that they are drained."""
        target = state.target
        for batch in range(state.done, state.end):
            await self._wait_until_done(batch)
            # Also while draining: the batch after which a partition is due passes only once.
            if self._must_reconsider(batch + 1, state.end):
                target = self._propose_if_measured()
        for part in self._supervisor.layout:
            await self._supervisor.take(Drained, part.device)
        draining = self._device.now() - state.since
        return await self._after_draining(state.end, target, draining)

    async def _after_draining(
        self, step: int, target: StagePartition | None, draining: float
    ) -> Reconfiguring | Feeding | None:
        """Run a due evaluation; return the next state, None at the end of training."""
        if self._must_evaluate(step):
            self._evaluated = step
            if not await self._evaluations.make(step):
                return None
            self._due.made(self._device.now())
        if target is None:
            return Feeding(step, draining)
        return Reconfiguring(step, target, draining)

    async def _change_partition(self, state: Reconfiguring) -> Feeding:
        """Change to another partition; raises `Lost` if a stage is absent."""
        recovery = self._recovery
        before = recovery.partition
        begun = self._device.now()
        wanted = {*before.devices, *state.target.devices}
        present = await recovery.regroup(wanted)
        # Chosen again: a device of the target partition may have left meanwhile.
        better = self._partitioner.propose_repartition(before, present)
        recovery.adopt(before if better is None else better)
        await recovery.establish()
        self._device.record(
            "repartition",
            step=state.step,
            partition=self._supervisor.stages,
            seconds=state.draining + self._device.now() - begun,
            draining=state.draining,
        )
        return Feeding(self.start, state.draining)

    def _record_batch(self, updated: Updated) -> None:
        """Record a batch done on all stages; the first stage's update is the last."""
        assert updated.times is not None
        assert updated.loss is not None
        batch = updated.batch
        self._partitioner.store_times(self._recovery.partition, updated.times)
        has_numbers = self._problem.workload.numerics != "none"
        loss = loss_fields(updated.loss, computed=has_numbers)
        self._device.record(
            "step", step=batch, samples=self._training.count(batch), **loss
        )
        self._done = batch + 1
        self._recovery.done = self._done
        # Batches repeated after a recovery are no progress: a run that only repeats them must be given up.
        self._supervisor.progress = max(self._supervisor.progress, self._done)
        if self._recovery.recovering:
            self._recovery.recovering = False
            self._device.record("recovery", phase="trained", step=batch)

    async def _wait_until_done(self, batch: int) -> None:
        """Wait until a batch is done, unless a device is lost. Raises `Lost`."""
        while True:
            try:
                return await self._supervisor.until(lambda: self._done > batch)
            except Lost as lost:
                if not await self._recovery.await_return(lost):
                    raise

    def _must_evaluate(self, step: int) -> bool:
        """Return whether an evaluation after a step is due and not done yet."""
        # The last step is evaluated in any case, at the end of training.
        if step in (self._evaluated, self._training.steps):
            return False
        return self._due(step, self._device.now())

    def _must_reconsider(self, done: int, fed: int) -> bool:
        """Return whether to reconsider the partition after ``done`` batches; measure links to standby devices first."""
        due = self._partitioner.is_repartition_due(done)
        self._profiler.measure_standby(repeats=due)
        return due and fed < self._training.steps

    def _propose_partition(self) -> StagePartition | None:
        """Return the partition worth changing to now, if any."""
        partition = self._recovery.partition
        present = {*partition.devices, *self._recovery.standby.joiners()}
        return self._partitioner.propose_repartition(
            partition, self._recovery.ordered(present)
        )

    def _propose_if_measured(self) -> StagePartition | None:
        """Return the partition worth changing to; None while measurements for the choice are missing."""
        if self._profiler.lacks_measurements:
            return None
        return self._propose_partition()
