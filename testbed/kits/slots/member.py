"""One super neuron at work: sleep until a slot begins, take what has arrived, compute, cast."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import torch
from torch.nn import functional

from testbed.device import Device
from testbed.kits.layers.feed import Training
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.exchange import CastExchange, Placement, Planned
from testbed.kits.slots.messages import KINDS, Losses, Outputs
from testbed.kits.slots.microbatches import MicroBatches, update_after
from testbed.kits.slots.missing import EDGEPIPE, Arrived, Missing
from testbed.kits.slots.neurons import Neurons
from testbed.kits.slots.planner import (
    EdgePipeDetails,
    EdgePipeOptions,
    answering_time,
    division_of,
    neuron_values,
    test_batch,
    timetable_of,
)
from testbed.kits.slots.recovery import Acknowledged, Repeated, Transmit
from testbed.kits.slots.slots import slots
from testbed.kits.slots.testing import TestRuns
from testbed.kits.slots.timeslots import LayerAction, SlotSegment, Timetable, segments
from testbed.method import Job
from testbed.models.slices import pick

EdgePipeJob = Job[EdgePipeOptions, EdgePipeDetails]


async def run(device: Device, job: EdgePipeJob) -> None:
    """Train and test, slot by slot, from the slot that it is."""
    async with Mailbox(device, job.problem.links, KINDS) as mailbox:
        problem, details = job.problem, job.plan.details
        division, table = division_of(problem), timetable_of(details)
        part = division.super_neurons[details.devices.index(device.name)]
        placement = Planned(division, details.devices)
        under_way = table.staleness(1) * table.micro
        exchange = CastExchange(mailbox, placement, recovery(mailbox, job), under_way, neuron_values(problem))
        missing = replace(EDGEPIPE, learn=update_after(table.micro))
        neurons = Neurons(device, problem, {layer: part.of(layer) for layer in part.layers if layer}, missing.learn)
        await Member(device, job, placement, exchange, neurons, missing).run(part.group, table)


def recovery(mailbox: Mailbox, job: EdgePipeJob) -> Transmit:
    """Return the way to cast that the options name."""
    options = job.problem.options
    if options.recovery == "ack":
        return Acknowledged(mailbox, answering_time(job.problem, mailbox.device.name))
    return Repeated(mailbox, options.transmissions if options.recovery == "r-tx" else 1)


class Member:
    """What one device does in each slot."""

    # Six parts, each of which another method may have its own of.
    def __init__(
        self,
        device: Device,
        job: EdgePipeJob,
        placement: Placement,
        exchange: CastExchange,
        neurons: Neurons,
        missing: Missing,
    ) -> None:
        assert job.dataset is not None
        problem = job.problem
        self._device = device
        self._details = job.plan.details
        self._leads = job.plan.lead == device.name
        self._most = job.plan.steps
        self._every = problem.options.evaluate_every
        training = Training(job.dataset, problem.workload, problem.seed)
        self._training = MicroBatches(training, timetable_of(job.plan.details).micro)
        self._losses: list[float] = []
        """Of the micro-batches of the present step."""
        self._tests = TestRuns(job.dataset, test_batch(problem), problem.options.test_runs)
        self._output = placement.layers - 1
        self._placement = placement
        self._exchange = exchange
        self._neurons = neurons
        self._missing = missing

    async def run(self, group: int, table: Timetable) -> None:
        """Train, and test over the same links."""
        async for segment, action in self.slots(group, table):
            await self.work(segment, action)

    def slots(self, group: int, table: Timetable) -> AsyncGenerator[tuple[SlotSegment, LayerAction | None], None]:
        """Yield the work of a group's device, slot by slot, from the slot that it is."""
        slot, test_slot = self._details.slot, self._details.test_slot
        steps = self._training.steps if self._most is None else min(self._training.steps, self._most)
        ahead = segments(table, slot, steps, test_slot, len(self._tests), self._every)
        return slots(self._device, group, ahead)

    async def work(self, segment: SlotSegment, action: LayerAction | None) -> None:
        """Do the work of a slot; None: the segment has ended."""
        self._exchange.until = segment.next(self._device.now())
        if segment.tests:
            await self._test(segment, action)
        elif action is None:
            self._report(segment)
        else:
            await self._train(action, segment.number(action.batch))
            if action.kind == "forward" and action.layer:
                # Of older ones the losses did not come, and their slots are past.
                oldest = action.batch - segment.table.staleness(action.layer) * segment.table.micro + 1
                self._neurons.forget_before(action.layer, oldest)

    def _report(self, segment: SlotSegment) -> None:
        """Tell at the end of training what has arrived, and that tests begin."""
        for passing, tally in self._exchange.tally.items():
            self._device.record("passed", to=passing, due=tally.due, came=tally.came)
        if self._leads:
            self._device.record("tests", step=segment.trained)

    async def _train(self, action: LayerAction, number: int) -> None:
        if action.kind == "backward":
            await self._backward(action.layer, action.batch, number)
        elif action.layer == 0:
            await self._feed(self._training.images(action.batch), number)
        else:
            arrived = self._exchange.outputs(action.layer - 1, number, self._training.samples(action.batch))
            inputs, unheard = self._missing.inputs(arrived), self._missing.unheard(arrived)
            outputs = (
                None if inputs is None else await self._neurons.forward(action.layer, action.batch, inputs, unheard)
            )
            await self._share(action.layer, number, outputs)

    async def _test(self, segment: SlotSegment, action: LayerAction | None) -> None:
        """Forward a test batch, or have done with the test runs."""
        if self._leads and (action is None or action.layer == self._output):
            # The results of the batch before were shared in a slot that is over.
            for test in self._tests.unscored(len(self._tests) if action is None else action.batch):
                results = self._exchange.outputs(self._output, segment.number(test), self._tests.samples(test))
                known = self._missing.tests(results)
                self._tests.score(test, torch.zeros_like(results.together()) if known is None else known)
        if action is None:
            if self._leads:
                self._device.record("evaluate", step=segment.trained, **self._tests.finish())
            return
        layer, number = action.layer, segment.number(action.batch)
        if layer == 0:
            await self._feed(self._tests.images(action.batch), number)
        else:
            arrived = self._exchange.outputs(layer - 1, number, self._tests.samples(action.batch))
            inputs = self._missing.tests(arrived)
            outputs = None if inputs is None else await self._neurons.infer(layer, action.batch, inputs)
            await self._share(layer, number, outputs)

    async def _feed(self, values: torch.Tensor, number: int) -> None:
        """Cast the own values of the samples: what the input layer does."""
        await self._share(0, number, pick(values, 1, self._placement.of(self._device.name, 0)))

    async def _share(self, layer: int, number: int, outputs: torch.Tensor | None) -> None:
        if outputs is not None or self._missing.absent:
            await self._exchange.cast(min(layer + 1, self._output), Outputs(number, layer, outputs))

    async def _backward(self, layer: int, step: int, number: int) -> None:
        """Learn, and cast what the own neurons add to the losses of the layer before."""
        samples = self._training.samples(step)
        results = layer == self._output
        arrived = (self._exchange.outputs if results else self._exchange.losses)(layer, number, samples)
        if self._missing.confirm is not None:
            arrived = await self._missing.confirm(layer, arrived)
        gradient = self._loss(step, arrived) if results else self._missing.losses(arrived)
        before = await self._neurons.backward(layer, step, samples, gradient)
        if layer > 1 and (before is not None or self._missing.absent):
            await self._exchange.cast(layer - 1, Losses(number, layer, before))

    def _loss(self, batch: int, arrived: Arrived) -> torch.Tensor | None:
        """Return the gradient by the own outputs of what a batch adds to the cross-entropy, if results allow it."""
        training = self._training
        usable = self._missing.results(arrived)
        if usable is None and not self._leads:
            return None
        results = (arrived.together() if usable is None else usable).requires_grad_()
        loss = functional.cross_entropy(results, training.labels(batch), reduction="sum") / training.whole
        if self._leads:
            # With zeros for what is missing, also where nothing is learnt from it.
            self._losses.append(float(loss.detach()))
            if (batch + 1) % training.parts == 0:
                self._record_step(batch // training.parts, observed=usable is not None)
        if usable is None:
            return None
        (gradient,) = torch.autograd.grad(loss, [results])
        return pick(gradient, 1, self._placement.of(self._device.name, self._output))

    def _record_step(self, step: int, observed: bool) -> None:
        loss, self._losses = sum(self._losses), []
        self._device.record("step", step=step, loss=loss, samples=self._training.whole)
        if observed:
            self._missing.observe(step, loss)
