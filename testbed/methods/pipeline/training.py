"""What the lead of a training pipeline does: one step after the other, evaluations, checkpoints in between."""

from __future__ import annotations

from testbed.data.batches import micro_batches
from testbed.device import Device
from testbed.methods.base import Job
from testbed.methods.parts import messages
from testbed.methods.parts.feed import Requests, Training
from testbed.methods.parts.lead import Lead, Planner, Temper
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.stage import Routine
from testbed.methods.parts.worker import Worker
from testbed.methods.pipeline.options import PipelineOptions


class Trainer(Lead):
    """Leads a training run; its weights, exposed, are those of the last checkpoint."""

    def __init__(
        self,
        device: Device,
        job: Job[PipelineOptions],
        worker: Worker,
        outbox: Outbox,
        temper: Temper,
        planner: Planner,
        routine: Routine,
    ) -> None:
        super().__init__(device, job, worker, outbox, temper, planner)
        assert job.dataset is not None
        workload = job.problem.workload
        self._options = job.problem.options
        self._routine = routine
        self._training = Training(job.dataset, workload, job.problem.seed)
        self._tests = Requests(job.dataset, workload.batch_size)
        self.steps = self._training.steps

    async def work(self) -> None:
        """Train from the last checkpoint to the end, gather the weights, evaluate."""
        for step in range(self.checkpoint.step, self.steps):
            await self._step(step)
            done = step + 1
            if self.joiners and self._routine.checkpoints(done, self.steps):
                await self._kept(done)
                self.let_join()
            every = self._options.evaluate_every
            if every is not None and done % every == 0 and done < self.steps:
                await self.evaluate(done, self._tests)
        await self._kept(self.steps)
        await self.evaluate(self.steps, self._tests)

    async def _kept(self, step: int) -> None:
        """Wait until the checkpoint of this step is complete."""
        await self.until(lambda: self.checkpoint.step == step)

    async def _step(self, step: int) -> None:
        """Feed one batch in, wait for its loss and for the first stage's update, which is the last of all."""
        images, labels = self._training.batch(step)
        parts = micro_batches(len(labels), min(self._options.pieces, len(labels)))
        self.post(self.layout[-1].device, messages.LABELS, labels, batch=step)
        for micro, part in enumerate(parts):
            self.post(
                self.layout[0].device,
                messages.ACTIVATION,
                images[part],
                work=messages.TRAIN,
                batch=step,
                micro=micro,
                micros=len(parts),
                samples=len(labels),
            )
        loss, updated = (messages.LOSS, step), (messages.UPDATED, step)
        await self.until(lambda: loss in self.results and updated in self.results)
        del self.results[updated]
        self.device.record("step", step=step, loss=self.results.pop(loss)["loss"], samples=len(labels))
        self.progress += 1
