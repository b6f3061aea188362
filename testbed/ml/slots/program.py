"""The program of one device: sleep until a slot begins, receive casts, compute, cast."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.feed import Training
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.method import Job
from testbed.ml.models.slices import Channels, pick
from testbed.ml.slots import weights
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import (
    CASTS,
    Acknowledged,
    CastExchange,
    Losses,
    Notes,
    Outputs,
    Repeated,
    Transmit,
)
from testbed.ml.slots.missing import MissingDataPolicy, Usable, Work
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import (
    SlotDetails,
    SlotOptions,
    neuron_values,
    test_batch,
    timetable_of,
)
from testbed.ml.slots.samples import PATIENCE, Gathering, MicroBatches, Tested, TestRuns
from testbed.ml.slots.timeslots import (
    LayerAction,
    SlotSegment,
    make_segments,
    work_slots,
)

SlotJob = Job[SlotOptions, SlotDetails]
KINDS = (*CASTS, Tested, *weights.KINDS)
"""Kinds of messages between the devices."""


class MissedTestsError(TestbedError):
    """Raised if the coordinator was off at the end of the last test, so the run's result is unknown."""


class Arranging(Protocol):
    """Hook: the arrangement of neurons, and its changes between slots."""

    @property
    def now(self) -> NeuronAssignment:
        """The current arrangement, which includes this device."""

    async def wait_for_group(self, until: float) -> int | None:
        """Return the own group once the device has neurons; None if the device has none before an instant, or never
        will.
        """

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Act at the start of a slot or, without an action, at the end of a segment; return whether the
        group changed.
        """


class FixedAssignment:
    """A plan's constant arrangement."""

    def __init__(
        self, arrangement: NeuronAssignment, neurons: Neurons, device: str
    ) -> None:
        self.now = arrangement
        self._device = device
        for layer, holders in enumerate(arrangement.layers):
            if layer and device in holders:
                neurons.take(layer, holders[device])

    async def wait_for_group(self, until: float) -> int | None:
        """Return the own group at once."""
        return self.now.group(self._device)

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Do nothing."""
        return False


def answering_time(mailbox: Mailbox, details: SlotDetails) -> float:
    """Return the seconds a device waits for acknowledgements of its casts."""
    return details.answered[details.devices.index(mailbox.device.name)]


def transmit_of(mailbox: Mailbox, job: SlotJob) -> Transmit:
    """Return the transmission strategy named by the options."""
    options = job.problem.options
    if options.recovery == "ack":
        return Acknowledged(mailbox, answering_time(mailbox, job.plan.details))
    return Repeated(mailbox, options.transmissions if options.recovery == "r-tx" else 1)


def gradient_of_cross_entropy(
    logarithms: torch.Tensor, labels: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return the gradient of ``weight`` times the summed cross-entropy by the results, (samples, classes).

    ``logarithms`` is `torch.log_softmax` of the results. The gradient is bitwise equal to autograd's, in a third of the
    time.
    """
    added = torch.zeros_like(logarithms).scatter_(1, labels[:, None], -weight)
    gradient: torch.Tensor = torch.ops.aten._log_softmax_backward_data(
        added, logarithms, 1, logarithms.dtype
    )
    return gradient


class SlotProgram:
    """The work of one device in each slot, parameterised by hooks."""

    def __init__(
        self,
        mailbox: Mailbox,
        job: SlotJob,
        neurons: Neurons,
        arranging: Arranging,
        on_missing: MissingDataPolicy,
        transmit: Transmit,
        notes: Notes | None = None,
    ) -> None:
        assert job.dataset is not None
        problem, details = job.problem, job.plan.details
        self._mailbox = mailbox
        self._device = mailbox.device
        self._table = table = timetable_of(details)
        self._leads = job.plan.lead == mailbox.device.name
        self._training = MicroBatches(
            Training(job.dataset, problem.workload, problem.seed), table.micro
        )
        self._tests = TestRuns(
            job.dataset, test_batch(problem), problem.options.test_runs
        )
        steps = min(self._training.steps, job.plan.steps or self._training.steps)
        self._job = job
        self._segments = partial(
            make_segments,
            table,
            details.slot,
            steps,
            details.test_slot,
            len(self._tests),
            problem.options.evaluate_every,
            details.begin or 0.0,
        )
        self._under_way = table.staleness(1) * table.micro
        self._neurons = neurons
        self._arranging = arranging
        self._on_missing = on_missing
        self._exchange = CastExchange(
            mailbox,
            lambda: arranging.now,
            transmit,
            self._under_way,
            neuron_values(problem),
            notes,
        )
        self._losses: list[float] = []
        """Losses of the micro-batches of the present step."""
        self._evaluated = 0
        """Steps that were trained before the last evaluation."""
        self._gathering: Gathering | None = None
        if problem.options.test_results == "gathered":
            scores = TestRuns(
                job.dataset, test_batch(problem), problem.options.test_runs
            )
            self._gathering = Gathering(mailbox, job.plan.lead, scores)
        self._evaluations: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Train, and test over the same links, starting in the current slot.

        Raises `MissedTestsError` on the coordinator if it was off until the end of the last slot.
        """
        *_, last = self._segments()
        while (group := await self._arranging.wait_for_group(last.end)) is not None:
            if await self._work_slots(group):
                break
        if self._gathering is not None:
            await self._gathering.wait_until_sent(last.end + PATIENCE * last.slot)
            await asyncio.gather(*self._evaluations)
        if self._job.problem.options.final_weights and group is not None:
            until = last.end + PATIENCE * last.slot
            await weights.send_final_weights(
                self._mailbox, self._job, self._neurons, self._arranging.now, until
            )
        if self._leads and self._evaluated < last.trained:
            text = f"the evaluation after step {last.trained} is lost: {self._device.name}, which leads, was off or "
            text += f"had no neurons when the last timeslot ended at {last.end:.1f} s: "
            text += "train more, or end the fault earlier"
            raise MissedTestsError(text)

    async def _work_slots(self, group: int) -> bool:
        """Work in the slots of a group; return whether all slots are over, with the group unchanged."""
        async with aclosing(work_slots(self._device, group, self._segments())) as work:
            async for segment, action in work:
                if self._arranging.on_slot_start(segment, action):
                    return False
                self._exchange.until = segment.next_start(self._device.now())
                if action is None:
                    self._end_segment(segment)
                elif segment.tests:
                    await self._test_segment(segment, action)
                else:
                    await self._train_segment(
                        action, segment.batch_number(action.batch)
                    )
        return True

    async def _train_segment(self, action: LayerAction, number: int) -> None:
        _, layer, batch = action
        if action.kind == "backward":
            await self._backward_layer(layer, batch, number)
            return

        async def outputs() -> torch.Tensor | None:
            arrived = self._exchange.take_outputs(
                layer - 1, number, self._training.samples(batch)
            )
            unheard = (
                arrived.missing_mask() if layer > 1 and self._on_missing.masks else None
            )
            inputs = self._on_missing.inputs(arrived)
            return (
                None
                if inputs is None
                else await self._neurons.forward(layer, batch, inputs, unheard)
            )

        await self._forward_layer(
            layer, number, partial(self._training.images, batch), outputs
        )
        if layer:
            # Of older ones the losses did not come, and their slots are past.
            self._neurons.forget_before(
                layer, batch - self._table.staleness(layer) * self._table.micro + 1
            )

    async def _test_segment(self, segment: SlotSegment, action: LayerAction) -> None:
        layer, batch, number = (
            action.layer,
            action.batch,
            segment.batch_number(action.batch),
        )
        last = layer == self._arranging.now.output
        if last:
            # The results of the batch before were shared in a slot that is over.
            self._score_tests(segment, batch)

        async def outputs() -> torch.Tensor | None:
            arrived = self._exchange.take_outputs(
                layer - 1, number, self._tests.samples(batch)
            )
            entering = self._on_missing.test_values(arrived)
            if entering is None:
                return None
            # What arrives of the input layer are the samples themselves, in each run the same.
            alike = (
                arrived.arrival_pattern if layer == 1 and entering is arrived else None
            )
            return await self._neurons.infer(
                layer,
                batch,
                entering,
                alike and (self._tests.index_in_run(batch), alike),
            )

        values = await self._forward_layer(
            layer, number, partial(self._tests.images, batch), outputs
        )
        if last and values is not None and self._gathering is not None:
            self._gathering.keep_outputs(
                batch, self._arranging.now.of(self._device.name, layer), values
            )

    async def _forward_layer(
        self,
        layer: int,
        number: int,
        images: Callable[[Channels], torch.Tensor],
        outputs: Callable[[], Awaitable[torch.Tensor | None]],
    ) -> torch.Tensor | None:
        """Cast the own values of the samples for the input layer, otherwise the outputs of the own neurons.

        Returns the values, (samples, own values).
        """
        held = self._arranging.now
        values = await outputs() if layer else images(held.of(self._device.name, 0))
        if values is not None or self._on_missing.announces:
            await self._exchange.cast(
                min(layer + 1, held.output),
                Outputs(number, layer, values, sender=self._device.name),
            )
        return values

    async def _backward_layer(self, layer: int, batch: int, number: int) -> None:
        """Learn, and cast the own neurons' contribution to the losses of the previous layer."""
        samples = self._training.samples(batch)
        if layer == self._arranging.now.output:
            usable = await self._of_results(layer, batch, number)
        else:
            usable = await self._on_missing.usable_losses(
                self._exchange.take_losses(layer, number, samples)
            )

        def learn(shard: LayerShard, gradient: torch.Tensor | None) -> Work | None:
            return self._on_missing.learn(shard, layer, batch, gradient, usable)

        before = await self._neurons.backward(
            layer, batch, samples, usable.values, learn
        )
        if layer > 1 and (before is not None or self._on_missing.announces):
            await self._exchange.cast(
                layer - 1, Losses(number, layer, before, sender=self._device.name)
            )

    async def _of_results(self, layer: int, batch: int, number: int) -> Usable:
        """Return the gradient of a batch's cross-entropy by the own outputs, if the results are usable."""
        arrived = self._exchange.take_outputs(
            layer, number, self._training.samples(batch)
        )
        usable = await self._on_missing.usable_results(arrived)
        if usable.values is None and not self._leads:
            return usable
        logarithms = torch.log_softmax(
            arrived.joined_values() if usable.values is None else usable.values, dim=1
        )
        labels = self._training.labels(batch)
        if self._leads:
            loss = (
                functional.nll_loss(logarithms, labels, reduction="sum")
                / self._training.whole
            )
            self._note_loss(batch, float(loss), exact=usable.values is not None)
        if usable.values is None:
            return usable
        gradient = gradient_of_cross_entropy(
            logarithms, labels, 1 / self._training.whole
        )
        return usable._replace(
            values=pick(gradient, 1, self._arranging.now.of(self._device.name, layer))
        )

    def _note_loss(self, batch: int, loss: float, exact: bool) -> None:
        """Record the loss of a step after its last micro-batch, on the coordinator.

        The loss is this device's view: missing results count as zeros, even if they are excluded from learning.
        """
        self._losses.append(loss)
        if (batch + 1) % self._training.parts:
            return
        step, loss, self._losses = batch // self._training.parts, sum(self._losses), []
        self._device.record("step", step=step, loss=loss, samples=self._training.whole)
        if exact:
            self._on_missing.observe_loss(step, loss)

    def _score_tests(self, segment: SlotSegment, before: int) -> None:
        """Score the test batches before this one by the results received here, as in `_note_loss`."""
        for test in (
            self._tests.unscored_batches(before)
            if self._leads or self._gathering is not None
            else ()
        ):
            output = self._arranging.now.output
            arrived = self._exchange.take_outputs(
                output, segment.batch_number(test), self._tests.samples(test)
            )
            there = self._on_missing.test_values(arrived)
            results = arrived.zeros() if there is None else there.joined_values()
            self._tests.score(test, results)
            if self._gathering is not None:
                self._gathering.send_results(segment.trained, test, results)

    def _end_segment(self, segment: SlotSegment) -> None:
        """Record the received casts at the end of training, and the scores at the end of tests."""
        if segment.tests:
            self._evaluate_tests(segment)
            return
        for passing, tally in self._exchange.tally.items():
            self._device.record("passed", to=passing, due=tally.due, came=tally.came)
        if self._leads:
            self._device.record("tests", step=segment.trained)

    def _evaluate_tests(self, segment: SlotSegment) -> None:
        """Score the last test batches on the coordinator and, if results are gathered, on its peers."""
        now, gathering = self._arranging.now, self._gathering
        if not (
            self._leads
            or (gathering is not None and self._device.name in now.holders(now.output))
        ):
            return
        self._score_tests(segment, len(self._tests))
        one = self._tests.finish()
        if not self._leads:
            return
        self._evaluated = segment.trained
        if gathering is None:
            self._device.record("evaluate", step=segment.trained, **one)
            return

        async def gather() -> None:
            until = segment.end + PATIENCE * segment.slot
            scores = await gathering.collect_scores(
                segment.trained, now.holders(now.output), until
            )
            self._device.record(
                "evaluate", step=segment.trained, one=one["accuracy"], **scores
            )

        self._evaluations.append(self._mailbox.start(gather()))
