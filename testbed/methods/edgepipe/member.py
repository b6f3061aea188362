"""One super neuron at work: sleep until a slot begins, take what has arrived, compute, cast."""

from __future__ import annotations

from functools import partial
from statistics import fmean, pstdev

import torch
from torch.nn import functional

from testbed.device import Cost, Device, Span
from testbed.methods.base import Job
from testbed.methods.edgepipe.messages import KINDS, Losses, Outputs
from testbed.methods.edgepipe.planner import (
    EdgePipeDetails,
    EdgePipeOptions,
    dense_layers,
    division_of,
    slice_of,
    timetable_of,
    work,
)
from testbed.methods.edgepipe.timeslots import LayerAction, Timetable
from testbed.methods.parts.feed import Requests, Training
from testbed.methods.parts.layer_shard import LayerShard
from testbed.methods.parts.mailbox import Mailbox
from testbed.methods.parts.score import Score
from testbed.models.sliced import draw

EdgePipeJob = Job[EdgePipeOptions, EdgePipeDetails]


async def run(device: Device, job: EdgePipeJob) -> None:
    """Train and test, slot by slot, from the slot that it is."""
    async with Mailbox(device, job.problem.links, KINDS) as mailbox:
        await Member(mailbox, job).run()


class Member:
    """The neurons of one device, and what it does with them in each slot."""

    def __init__(self, mailbox: Mailbox, job: EdgePipeJob) -> None:
        assert job.dataset is not None
        problem, details = job.problem, job.plan.details
        self._mailbox, self._device, self._problem = mailbox, mailbox.device, problem
        self._division = division_of(problem)
        self._devices = details.devices
        self._part = self._division.super_neurons[details.devices.index(self._device.name)]
        self._slot = details.slot
        self._table = timetable_of(details)
        self._training = Training(job.dataset, problem.workload, problem.seed)
        self._tests = Requests(job.dataset, problem.workload.batch_size)
        self._output = len(self._division.neurons) - 1
        self._leads = job.plan.lead == self._device.name
        self._layers = dense_layers(problem)
        self._scores = [Score() for _ in range(problem.options.test_runs)]
        self._forwarded: set[tuple[int, int]] = set()
        """Layers and batches that wait for their losses."""
        self.shards = {layer: self._shard(layer) for layer in self._part.layers if layer}

    def _shard(self, layer: int) -> LayerShard:
        whole = self._layers[layer - 1]
        part = slice_of(whole, self._part.of(layer))
        state = draw(self._problem.model, [(whole, part)], self._problem.seed)
        return LayerShard(whole, part, state, self._problem.workload.optimizer)

    async def run(self) -> None:
        """Train, then test over the same links; slots that are over are left out."""
        steps = self._training.steps
        count = self._table.slots(steps)
        for slot in range(count):
            action = self._table.action(self._part.group, slot)
            if await self._begins(slot) and action is not None and action.batch < steps:
                await self._train(action)
        await self._test(count, testing(self._table))

    async def _test(self, first: int, table: Timetable) -> None:
        count = self._problem.options.test_runs * len(self._tests)
        scored = 0
        for slot in range(table.slots(count)):
            action = table.action(self._part.group, slot)
            if await self._begins(first + slot) and action is not None and action.batch < count:
                if self._leads and action.layer == self._output:
                    # The results of the batch before were shared in a slot that is over.
                    scored = self._score(scored, action.batch)
                await self._forward(action.layer, self._training.steps + action.batch)
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
            results = self._arrived(self._output, self._training.steps + test)
            self._scores[test // each].add(results, self._tests.labels(test % each))
        return end

    async def _begins(self, slot: int) -> bool:
        """Sleep until a slot begins; False where it is over, since the device stood still."""
        await self._device.sleep(max(0.0, slot * self._slot - self._device.now()))
        return self._device.now() < (slot + 1) * self._slot

    async def _train(self, action: LayerAction) -> None:
        if action.kind == "forward":
            if action.layer:
                # Whatever its losses were, their slot is past.
                self._forget(action.layer, action.batch - self._table.staleness(action.layer))
            await self._forward(action.layer, action.batch)
        else:
            await self._backward(action.layer, action.batch)

    async def _forward(self, layer: int, batch: int) -> None:
        """Compute a layer's own neurons with zeros for what is missing, and cast them."""
        if layer == 0:
            neurons = self._part.of(0)
            outputs = self._images(batch)[:, neurons.start : neurons.stop]
        else:
            inputs = self._arrived(layer - 1, batch)
            trains = batch < self._training.steps
            shard = self.shards[layer]
            compute = partial(shard.forward, batch, inputs) if trains else partial(shard.infer, inputs)
            flops, _ = work(self._layers[layer - 1], self._part.of(layer), len(inputs), self._problem)
            outputs = await self._device.compute(compute, Cost(flops), Span("forward" if trains else "evaluate", batch))
            if trains:
                self._forwarded.add((layer, batch))
        await self._cast(min(layer + 1, self._output), Outputs(batch, layer, outputs))

    async def _backward(self, layer: int, batch: int) -> None:
        """Update a layer's own neurons and cast what they add to the losses of the layer before.

        Without all losses of the layer behind, nothing is updated, here and in all layers before.
        """
        gradient = self._loss(batch) if layer == self._output else self._losses(layer, batch)
        if gradient is None or (layer, batch) not in self._forwarded:
            self._forget(layer, batch)
            return
        shard = self.shards[layer]

        def learn() -> torch.Tensor:
            before = shard.backward(batch, gradient)
            shard.update()
            return before

        _, flops = work(self._layers[layer - 1], self._part.of(layer), len(gradient), self._problem)
        before = await self._device.compute(learn, Cost(flops), Span("backward", batch))
        self._forwarded.discard((layer, batch))
        if layer > 1:
            await self._cast(layer - 1, Losses(batch, layer, before))

    def _loss(self, batch: int) -> torch.Tensor:
        """Return the gradient of the mean cross-entropy by the own outputs; results that are missing count as zero."""
        results = self._arrived(self._output, batch).requires_grad_()
        _, labels = self._training.batch(batch)
        loss = functional.cross_entropy(results, labels)
        (gradient,) = torch.autograd.grad(loss, [results])
        if self._leads:
            self._device.record("step", step=batch, loss=float(loss.detach()), samples=len(labels))
        own = self._part.of(self._output)
        return gradient[:, own.start : own.stop]

    def _losses(self, layer: int, batch: int) -> torch.Tensor | None:
        """Return the gradient of the own outputs, if everyone's part of it has arrived."""
        senders = [self._devices[index] for index in self._division.holders(layer + 1)]
        parts = [self._mailbox.pop(Losses, (batch, layer + 1, sender)) for sender in senders]
        self._mailbox.expire(Losses, (batch,))
        own = self._part.of(layer)
        if not all(parts):
            return None
        return torch.stack([part.tensor[:, own.start : own.stop] for part in parts if part]).sum(dim=0)

    def _arrived(self, layer: int, batch: int) -> torch.Tensor:
        """Return the outputs of a whole layer, (samples, neurons), with zeros for what has not arrived."""
        found = torch.zeros(self._samples(batch), self._division.neurons[layer])
        for index in self._division.holders(layer):
            message = self._mailbox.pop(Outputs, (batch, layer, self._devices[index]))
            if message is not None:
                neurons = self._division.super_neurons[index].of(layer)
                found[:, neurons.start : neurons.stop] = message.tensor
        self._mailbox.expire(Outputs, (batch - self._table.staleness(1) - 1,))
        return found

    async def _cast(self, layer: int, message: Outputs | Losses) -> None:
        """Transmit to all that hold a layer; what a device has for itself costs nothing."""
        receivers = [self._devices[index] for index in self._division.holders(layer)]
        if self._device.name in receivers:
            self._mailbox.post(self._device.name, message)
        others = [name for name in receivers if name != self._device.name]
        if others:
            for _ in range(self._problem.options.transmissions):
                await self._mailbox.cast(others, message)

    def _forget(self, layer: int, batch: int) -> None:
        self._forwarded.discard((layer, batch))
        self.shards[layer].forget(batch)

    def _images(self, batch: int) -> torch.Tensor:
        steps = self._training.steps
        images = (
            self._training.batch(batch)[0] if batch < steps else self._tests.images((batch - steps) % len(self._tests))
        )
        return images.flatten(1)

    def _samples(self, batch: int) -> int:
        steps = self._training.steps
        return self._training.samples if batch < steps else len(self._tests.samples((batch - steps) % len(self._tests)))


def testing(table: Timetable) -> Timetable:
    """Return the timetable of batches that are only forwarded."""
    period = max(len(group) for group in table.groups)
    return Timetable(table.groups, period, table.forward, (None,) * len(table.forward))
