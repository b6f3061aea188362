"""One super neuron at work: sleep until a slot begins, take what has arrived, compute, cast."""

from __future__ import annotations

from statistics import fmean, pstdev

import torch
from torch.nn import functional

from testbed.device import Device
from testbed.methods.base import Job
from testbed.methods.edgepipe.exchange import Exchange, Placement, Planned
from testbed.methods.edgepipe.messages import KINDS, Losses, Outputs
from testbed.methods.edgepipe.missing import EDGEPIPE, Missing
from testbed.methods.edgepipe.neurons import Neurons
from testbed.methods.edgepipe.planner import EdgePipeDetails, EdgePipeOptions, division_of, timetable_of
from testbed.methods.edgepipe.timeslots import LayerAction, Timetable
from testbed.methods.parts.feed import Requests, Training
from testbed.methods.parts.mailbox import Mailbox
from testbed.methods.parts.score import Score
from testbed.models.slices import pick

EdgePipeJob = Job[EdgePipeOptions, EdgePipeDetails]


async def run(device: Device, job: EdgePipeJob) -> None:
    """Train and test, slot by slot, from the slot that it is."""
    async with Mailbox(device, job.problem.links, KINDS) as mailbox:
        problem, details = job.problem, job.plan.details
        division, table = division_of(problem), timetable_of(details)
        part = division.super_neurons[details.devices.index(device.name)]
        placement = Planned(division, details.devices)
        exchange = Exchange(mailbox, placement, problem.options.transmissions, table.staleness(1))
        neurons = Neurons(device, problem, {layer: part.of(layer) for layer in part.layers if layer}, EDGEPIPE.learn)
        await Member(device, job, placement, exchange, neurons, EDGEPIPE).run(part.group, table)


class Member:
    """What one device does in each slot."""

    # Six parts, each of which another method may have its own of.
    def __init__(
        self,
        device: Device,
        job: EdgePipeJob,
        placement: Placement,
        exchange: Exchange,
        neurons: Neurons,
        missing: Missing,
    ) -> None:
        assert job.dataset is not None
        self._device = device
        self._options = job.problem.options
        self._slot = job.plan.details.slot
        self._leads = job.plan.lead == device.name
        self._training = Training(job.dataset, job.problem.workload, job.problem.seed)
        self._tests = Requests(job.dataset, job.problem.workload.batch_size)
        self._output = job.plan.details.groups[-1][1] - 1
        self._placement = placement
        self._exchange = exchange
        self._neurons = neurons
        self._missing = missing
        self._scores = [Score() for _ in range(self._options.test_runs)]

    async def run(self, group: int, table: Timetable) -> None:
        """Train, then test over the same links; slots that are over are left out."""
        steps = self._training.steps
        count = table.slots(steps)
        for slot in range(count):
            action = table.action(group, slot)
            if await self._begins(slot) and action is not None and action.batch < steps:
                if action.kind == "forward" and action.layer:
                    # Whatever its losses were, their slot is past.
                    self._neurons.forget(action.layer, action.batch - table.staleness(action.layer))
                await self._train(action)
        await self._test(group, count, testing(table))

    async def _test(self, group: int, first: int, table: Timetable) -> None:
        count = self._options.test_runs * len(self._tests)
        scored = 0
        for slot in range(table.slots(count)):
            action = table.action(group, slot)
            if await self._begins(first + slot) and action is not None and action.batch < count:
                if self._leads and action.layer == self._output:
                    # The results of the batch before were shared in a slot that is over.
                    scored = self._score(scored, action.batch)
                await self._infer(action.layer, action.batch)
        await self._device.sleep(max(0.0, (first + table.slots(count)) * self._slot - self._device.now()))
        if self._leads:
            self._score(scored, count)
            accuracies = [run.accuracy for run in self._scores]
            told = {"accuracy": fmean(accuracies), "loss": fmean(run.loss for run in self._scores)}
            self._device.record("evaluate", step=self._training.steps, **told, deviation=pstdev(accuracies))

    def _score(self, begin: int, end: int) -> int:
        """Count the results of test batches from ``begin`` up to but without ``end``, which is returned."""
        each = len(self._tests)
        for test in range(begin, end):
            labels = self._tests.labels(test % each)
            results = self._exchange.outputs(self._output, self._training.steps + test, len(labels))
            self._scores[test // each].add(results.together(), labels)
        return end

    async def _begins(self, slot: int) -> bool:
        """Sleep until a slot begins; False where it is over, since the device stood still."""
        await self._device.sleep(max(0.0, slot * self._slot - self._device.now()))
        return self._device.now() < (slot + 1) * self._slot

    async def _train(self, action: LayerAction) -> None:
        if action.kind == "backward":
            await self._backward(action.layer, action.batch)
        elif action.layer == 0:
            await self._feed(self._training.batch(action.batch)[0], action.batch)
        else:
            await self._forward(action.layer, action.batch)

    async def _feed(self, images: torch.Tensor, batch: int) -> None:
        """Cast the own values of the samples: what the input layer does."""
        own = self._placement.of(self._device.name, 0)
        await self._share(0, batch, pick(images.flatten(1), 1, own))

    async def _forward(self, layer: int, batch: int) -> None:
        inputs = self._missing.inputs(self._exchange.outputs(layer - 1, batch, self._training.samples))
        if inputs is not None:
            await self._share(layer, batch, await self._neurons.forward(layer, batch, inputs))

    async def _infer(self, layer: int, test: int) -> None:
        """Forward a test batch; they count on from the last training batch."""
        request, batch = test % len(self._tests), self._training.steps + test
        if layer == 0:
            await self._feed(self._tests.images(request), batch)
            return
        arrived = self._exchange.outputs(layer - 1, batch, len(self._tests.samples(request)))
        await self._share(layer, batch, await self._neurons.infer(layer, batch, arrived.together()))

    async def _share(self, layer: int, batch: int, outputs: torch.Tensor) -> None:
        await self._exchange.cast(min(layer + 1, self._output), Outputs(batch, layer, outputs))

    async def _backward(self, layer: int, batch: int) -> None:
        """Learn, and cast what the own neurons add to the losses of the layer before."""
        samples = self._training.samples
        if layer == self._output:
            gradient = self._loss(batch)
        else:
            gradient = self._missing.losses(self._exchange.losses(layer, batch, samples))
        before = await self._neurons.backward(layer, batch, samples, gradient)
        if layer > 1 and before is not None:
            await self._exchange.cast(layer - 1, Losses(batch, layer, before))

    def _loss(self, batch: int) -> torch.Tensor | None:
        """Return the gradient of the mean cross-entropy by the own outputs, if the results allow it."""
        results = self._missing.results(self._exchange.outputs(self._output, batch, self._training.samples))
        if results is None:
            return None
        results.requires_grad_()
        _, labels = self._training.batch(batch)
        loss = functional.cross_entropy(results, labels)
        (gradient,) = torch.autograd.grad(loss, [results])
        if self._leads:
            self._device.record("step", step=batch, loss=float(loss.detach()), samples=len(labels))
        return pick(gradient, 1, self._placement.of(self._device.name, self._output))


def testing(table: Timetable) -> Timetable:
    """Return the timetable of batches that are only forwarded."""
    period = max(len(group) for group in table.groups)
    return Timetable(table.groups, period, table.forward, (None,) * len(table.forward))
