"""What the coordinator of a training pipeline does: one step after the other, evaluations, checkpoints in between."""

from __future__ import annotations

from testbed.data.batches import micro_batches
from testbed.kits.layers.feed import Requests, Training
from testbed.kits.layers.score import told
from testbed.kits.messaging.supervision import Supervisor
from testbed.kits.pipeline.checkpointing import FromCheckpoint
from testbed.kits.pipeline.forwarding import evaluate
from testbed.kits.pipeline.stage import Activation, Labels
from testbed.methods.pipeline.updates import Loss, Routine, Updated


class Trainer:
    """A `testbed.kits.messaging.recovery.ResumableWork`."""

    def __init__(
        self, supervisor: Supervisor, recovery: FromCheckpoint, training: Training, tests: Requests, routine: Routine
    ) -> None:
        self._supervisor = supervisor
        self._recovery = recovery
        self._routine = routine
        self._training = training
        self._tests = tests

    @property
    def start(self) -> int:
        """The step to go on with."""
        return self._recovery.checkpoint.step

    async def run(self) -> None:
        """Train from the last checkpoint to the end, gather the weights, evaluate."""
        steps, every = self._training.steps, self._routine.evaluate_every
        for step in range(self.start, steps):
            await self._step(step)
            done = step + 1
            if self._supervisor.membership.joiners and self._routine.checkpoints(done, steps):
                await self._kept(done)
                await self._recovery.let_join()
            if every is not None and done % every == 0 and done < steps:
                await evaluate(self._supervisor, done, self._tests)
        await self._kept(steps)
        await evaluate(self._supervisor, steps, self._tests)

    async def _kept(self, step: int) -> None:
        """Wait until the checkpoint of this step is complete."""
        await self._supervisor.until(lambda: self._recovery.checkpoint.step == step)

    async def _step(self, step: int) -> None:
        """Feed one batch in, wait for its loss and for the first stage's update, which is the last of all."""
        supervisor, mailbox = self._supervisor, self._supervisor.mailbox
        images, labels = self._training.batch(step)
        samples = len(labels)
        parts = micro_batches(samples, min(self._routine.micro_batches, samples))
        number = mailbox.configuration
        mailbox.post(supervisor.layout[-1].device, Labels(number, step, labels))
        for micro, part in enumerate(parts):
            activation = Activation(number, "train", step, micro, len(parts), samples, images[part])
            mailbox.post(supervisor.layout[0].device, activation)
        loss = (await supervisor.take(Loss, step)).loss
        await supervisor.take(Updated, step)
        mailbox.device.record("step", step=step, samples=samples, **told(loss))
        supervisor.progress += 1
