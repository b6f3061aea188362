"""The coordinator's side of training: feeding the pipeline, recording steps, evaluating, repartitioning.

A step is recorded when the first stage, on the coordinator's device, reports its update. The first stage sends copies
of its state with this update only afterwards, so training never resumes from a state with an unrecorded step.
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
from testbed.ml.pipeline.measuring import Profiler
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
    """Evaluations of the model; their scores decide early stopping, and which weights are the result."""

    def __init__(
        self,
        supervisor: Supervisor,
        context: ProgramContext,
        steps: int,
        is_complete: Callable[[int], bool],
        weights: Callable[[], State],
    ) -> None:
        """``steps`` is the length of the training.

        ``is_complete`` returns whether this device has the whole model after a step, ``weights`` the newest such model.
        """
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

    async def evaluate(self, step: int) -> bool:
        """Evaluate the model after ``step`` steps; return whether training continues.

        If training may end with this step, the evaluation first waits until this device has the whole model, which may
        become the result.
        """
        may_be_last = step == self._steps or self._training.part.uses_evaluations
        if may_be_last:
            await self._supervisor.until(lambda: self._is_complete(step))
        fields = await evaluate(self._supervisor, step, self._tests, self._training)
        self.stopping.judge(step, fields, self._weights)
        return not self.stopping.reason


class SynchronousTrainer:
    """Synchronous training on the coordinator: one step after the other, with checkpoints in between.

    A `testbed.messaging.supervision.ResumableWork`.
    """

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
        self._has_losses = context.problem.workload.numerics != "none"
        self._evaluations = Evaluations(
            supervisor,
            context,
            self._training.steps,
            self._is_checkpointed,
            recovery.weights,
        )
        self._evaluation_trigger = IntervalTrigger(
            self._options.evaluate_every, supervisor.device.now()
        )
        self._reports: dict[str, Loss | Updated] = {}
        """Reports of stages about the current step, by kind of message."""
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
        # Once: training that resumes at a later step has recorded them before.
        if self.start == 0:
            self._training.record_left_out(device)
        for step in range(self.start, steps):
            await self._train_step(step)
            done = step + 1
            # New devices join after a checkpoint: the new configuration resumes from it, so that no step is repeated.
            joiners = self._supervisor.membership.joiners
            if joiners and self._options.checkpoints(done, steps):
                await self._supervisor.until(partial(self._is_checkpointed, done))
                await self._recovery.admit_joiners()
            if done < steps and self._evaluation_trigger.is_due(done, device.now()):
                if not await self._evaluations.evaluate(done):
                    return
                self._evaluation_trigger.restart(device.now())
        await self._evaluations.evaluate(steps)

    def _is_checkpointed(self, step: int) -> bool:
        """Return whether the newest complete checkpoint is the state after ``step`` steps."""
        return self._recovery.checkpoint.step == step

    async def _train_step(self, step: int) -> None:
        """Feed one batch; wait for the loss and for the first stage's update, which ends the step."""
        supervisor = self._supervisor
        mailbox = supervisor.mailbox
        images, labels = self._training.batch(step)
        samples = len(labels)
        # An incomplete last batch may have fewer samples than micro-batches.
        micro_batches = min(self._options.micro_batches, samples)
        slices = cut_batch(samples, micro_batches)
        configuration = mailbox.configuration
        self._reports.clear()
        first_stage = supervisor.layout[0].device
        last_stage = supervisor.layout[-1].device
        mailbox.post(last_stage, Labels(configuration, step, labels))
        for micro, rows in enumerate(slices):
            activation = Activation(
                configuration=configuration,
                work="train",
                batch=step,
                micro=micro,
                micros=len(slices),
                samples=samples,
                tensor=images[rows],
            )
            mailbox.post(first_stage, activation)
        # The loss from the last stage, and the report of the update from the first one.
        await supervisor.until(lambda: len(self._reports) == 2)

    def _record_step(self, report: Loss | Updated) -> None:
        """Record the current step once both reports have arrived, in either order."""
        self._reports[report.kind] = report
        loss = self._reports.get(Loss.kind)
        if loss is None or loss.loss is None or len(self._reports) < 2:
            return
        self._supervisor.device.record(
            "step",
            step=loss.batch,
            samples=self._training.count(loss.batch),
            **loss_fields(loss.loss, computed=self._has_losses),
        )
        self._supervisor.progress += 1


@dataclass(frozen=True)
class Feeding:
    """State: batches are fed into the pipeline, which is empty at first."""

    first_batch: int
    draining_time: float = 0.0
    """Seconds that the pipeline took to run empty before."""


@dataclass(frozen=True)
class Draining:
    """State: the pipeline runs empty."""

    first_pending: int
    """The first batch that is not done on all stages."""
    next_batch: int
    """The batch to continue with: all batches before it are in flight or done."""
    target: StagePartition | None
    """The partition to change to afterwards; None keeps the present one."""
    start_time: float
    """The time at which the last batch was fed, in seconds."""


@dataclass(frozen=True)
class Reconfiguring:
    """State: the pipeline is empty and receives another partition."""

    next_batch: int
    """The batch to continue with."""
    target: StagePartition
    """The partition that was worth the change when the pipeline began to drain."""
    draining_time: float
    """Seconds that the pipeline took to run empty."""


class AsynchronousTrainer:
    """Asynchronous training on the coordinator; a `testbed.messaging.supervision.ResumableWork`.

    A state machine with the states `Feeding`, `Draining` and `Reconfiguring`: the pipeline runs empty for evaluations
    and for changes of the partition, and is filled again afterwards. A stretch is the training between two times at
    which the pipeline is empty.
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
        replica_index = recovery.replica_index
        self._evaluations = Evaluations(
            supervisor,
            context,
            self._training.steps,
            replica_index.has_all_units,
            replica_index.weights,
        )
        self._profiler = Profiler(
            supervisor, recovery, partitioner, problem, self._training
        )
        self._evaluation_trigger = IntervalTrigger(
            problem.options.evaluate_every, self._device.now()
        )
        self._batches_done = 0
        """Number of batches done on all stages, including batches before a resumption."""
        self._evaluated_step = 0
        """The step of the newest evaluation."""
        self._mailbox.on(Updated, self._record_batch)

    @property
    def start(self) -> int:
        """The step to resume with."""
        return self._recovery.start

    async def run(self) -> None:
        """Train to the last batch, evaluating in between and at the end. Raises `Lost`."""
        # Once: training that resumes at a later step has recorded them before.
        if self.start == 0:
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
        first_batch = state.first_batch
        if first_batch == self._training.steps:
            await self._evaluations.evaluate(first_batch)
            return None
        target = await self._measure_and_propose()
        if target is not None:
            return await self._after_draining(first_batch, target, state.draining_time)
        window = self._window_size
        self._device.record(
            "stretch",
            step=first_batch,
            in_flight=window,
            partition=self._supervisor.stages,
            configuration=self._mailbox.configuration,
        )
        self._batches_done = first_batch
        next_batch = first_batch
        first_pending = first_batch
        while True:
            # More batches than the window would only wait before a stage, which stores one weight version for each.
            while next_batch - first_pending < window:
                if self._must_drain(first_batch, next_batch):
                    return self._end_stretch(first_pending, next_batch)
                self._post_batch(next_batch, begins_stretch=next_batch == first_batch)
                next_batch += 1
            await self._wait_until_done(first_pending)
            first_pending += 1
            if self._must_reconsider(first_pending, next_batch):
                target = self._propose_if_measured()
                if target is not None or self._profiler.lacks_measurements:
                    return self._end_stretch(first_pending, next_batch, target)

    async def _measure_and_propose(self) -> StagePartition | None:
        """Make the measurements missing for the choice of a partition; return the partition to change to, if any."""
        if not self._profiler.lacks_measurements or self._recovery.recovering:
            return None
        await self._profiler.measure_missing()
        return self._propose_partition()

    def _must_drain(self, first_batch: int, batch: int) -> bool:
        """Return whether the pipeline must run empty before ``batch``, in a stretch beginning with ``first_batch``."""
        if batch == self._training.steps:
            return True
        # An evaluation needs the weights of one step on all stages, which they have only while no batch is in flight.
        return batch > first_batch and self._must_evaluate(batch)

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
        self,
        first_pending: int,
        next_batch: int,
        target: StagePartition | None = None,
    ) -> Draining:
        """Let the pipeline run empty; the arguments are those of `Draining`."""
        now = self._device.now()
        first_stage = self._supervisor.layout[0].device
        end = End(self._mailbox.configuration, next_batch)
        self._mailbox.post(first_stage, end)
        return Draining(first_pending, next_batch, target, now)

    async def _await_drain(self, state: Draining) -> Reconfiguring | Feeding | None:
        """Wait until the batches in flight are done, and all stages have reported that they are drained."""
        target = state.target
        for batch in range(state.first_pending, state.next_batch):
            await self._wait_until_done(batch)
            # Not left to the next stretch, which does not see the batches after which the partition is reconsidered
            # here.
            if self._must_reconsider(batch + 1, state.next_batch):
                target = self._propose_if_measured()
        for assignment in self._supervisor.layout:
            await self._supervisor.take(Drained, assignment.device)
        draining_time = self._device.now() - state.start_time
        return await self._after_draining(state.next_batch, target, draining_time)

    async def _after_draining(
        self, next_batch: int, target: StagePartition | None, draining_time: float
    ) -> Reconfiguring | Feeding | None:
        """Evaluate if an evaluation is due; return the next state, None at the end of training."""
        if self._must_evaluate(next_batch):
            self._evaluated_step = next_batch
            if not await self._evaluations.evaluate(next_batch):
                return None
            self._evaluation_trigger.restart(self._device.now())
        if target is None:
            return Feeding(next_batch, draining_time)
        return Reconfiguring(next_batch, target, draining_time)

    async def _change_partition(self, state: Reconfiguring) -> Feeding:
        """Change to another partition; raises `Lost` if a device with a stage is absent."""
        recovery = self._recovery
        old = recovery.partition
        start_time = self._device.now()
        wanted_devices = {*old.devices, *state.target.devices}
        present = await recovery.regroup(wanted_devices)
        # Proposed again: a device of the target partition may have left meanwhile.
        new = self._partitioner.propose_repartition(old, present)
        recovery.adopt(old if new is None else new)
        await recovery.establish()
        self._device.record(
            "repartition",
            step=state.next_batch,
            partition=self._supervisor.stages,
            seconds=state.draining_time + self._device.now() - start_time,
            draining=state.draining_time,
        )
        return Feeding(self.start, state.draining_time)

    def _record_batch(self, updated: Updated) -> None:
        """Record a batch whose update the first stage, the last one to update, has reported."""
        assert updated.times is not None
        assert updated.loss is not None
        batch = updated.batch
        self._partitioner.store_times(self._recovery.partition, updated.times)
        has_losses = self._problem.workload.numerics != "none"
        loss = loss_fields(updated.loss, computed=has_losses)
        self._device.record(
            "step", step=batch, samples=self._training.count(batch), **loss
        )
        self._batches_done = batch + 1
        self._recovery.batches_done = self._batches_done
        # Batches repeated after a recovery do not count: a run that only repeats batches must be given up.
        progress = max(self._supervisor.progress, self._batches_done)
        self._supervisor.progress = progress
        if self._recovery.recovering:
            self._recovery.recovering = False
            self._device.record("recovery", phase="trained", step=batch)

    async def _wait_until_done(self, batch: int) -> None:
        """Wait until a batch is done. Raises `Lost` for lost devices not returning in time."""

        def is_done() -> bool:
            return self._batches_done > batch

        while True:
            try:
                return await self._supervisor.until(is_done)
            except Lost as lost:
                if not await self._recovery.await_return(lost):
                    raise

    def _must_evaluate(self, step: int) -> bool:
        """Return whether an evaluation after a step is due and not done yet."""
        # The end of training evaluates the last step in any case.
        if step in (self._evaluated_step, self._training.steps):
            return False
        return self._evaluation_trigger.is_due(step, self._device.now())

    def _must_reconsider(self, batches: int, next_batch: int) -> bool:
        """Return whether to reconsider the partition after ``batches`` batches, while batches before ``next_batch`` are
        fed.

        Also begins to measure the links to standby devices.
        """
        is_due = self._partitioner.is_repartition_due(batches)
        self._profiler.measure_standby(repeats=is_due)
        return is_due and next_batch < self._training.steps

    def _propose_partition(self) -> StagePartition | None:
        """Return the partition worth a change now, if any."""
        partition = self._recovery.partition
        present = {*partition.devices, *self._recovery.standby.eligible_joiners()}
        return self._partitioner.propose_repartition(
            partition, self._recovery.ordered(present)
        )

    def _propose_if_measured(self) -> StagePartition | None:
        """Return the partition worth a change; None while measurements for the choice are missing."""
        if self._profiler.lacks_measurements:
            return None
        return self._propose_partition()
