"""The program of one device: sleep until a slot begins, use the received casts, compute, cast.

The program never waits for another device: each slot begins by the clock, and values that have not arrived by then are
missing. Methods differ in four hooks: `AssignmentPolicy` below, `testbed.ml.slots.missing.MissingDataPolicy`, and
`Transmit` and `Notes` of `testbed.ml.slots.casts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.feed import Training
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.method import ProgramContext
from testbed.ml.models.slices import Channels, pick
from testbed.ml.slots import weights
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.casts import (
    CASTS,
    AcknowledgedCasts,
    CastExchange,
    Losses,
    Notes,
    Outputs,
    RepeatedCasts,
    Transmit,
)
from testbed.ml.slots.missing import BackwardWork, MissingDataPolicy, UsableValues
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import (
    SlotDetails,
    SlotOptions,
    samples_per_test_batch,
    timetable_of,
    values_per_neuron,
)
from testbed.ml.slots.samples import (
    RESULT_WAIT_SLOTS,
    Gathering,
    MicroBatches,
    Tested,
    TestRuns,
)
from testbed.ml.slots.timeslots import (
    LayerAction,
    SlotSegment,
    make_segments,
    work_slots,
)

SlotContext = ProgramContext[SlotOptions, SlotDetails]
KINDS = (*CASTS, Tested, *weights.KINDS)
"""Kinds of messages between the devices."""


class MissedTestsError(TestbedError):
    """Raised if the run has no result because the coordinator has not scored the last tests."""


class AssignmentPolicy(Protocol):
    """Hook: the assignment of neurons, which may change between slots."""

    @property
    def assignment(self) -> NeuronAssignment:
        """The current assignment of neurons to devices, in which this device has neurons."""

    async def wait_for_group(self, until: float) -> int | None:
        """Return the number of this device's group of layers, once the device has neurons.

        Returns None if the device has no neurons at the instant ``until``, in seconds, or will never receive any.
        """

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """React to the start of a slot; ``action`` is None at the end of a segment.

        Returns whether the device now belongs to another group, whose devices work in other slots.
        """


class FixedAssignment:
    """The assignment of a plan, which stays the same for the whole run."""

    def __init__(
        self, assignment: NeuronAssignment, neurons: Neurons, device: str
    ) -> None:
        self.assignment = assignment
        self._device = device
        for layer, holders in enumerate(assignment.layers):
            # The input layer has no weights.
            if layer and device in holders:
                neurons.add(layer, holders[device])

    async def wait_for_group(self, until: float) -> int | None:
        """Return the group of the device."""
        return self.assignment.group_of(self._device)

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Do nothing."""
        return False


def answering_time(mailbox: Mailbox, details: SlotDetails) -> float:
    """Return the seconds from the end of the device's cast until all acknowledgements have normally arrived."""
    index = details.devices.index(mailbox.device.name)
    return details.acknowledgement_seconds[index]


def make_transmit(mailbox: Mailbox, context: SlotContext) -> Transmit:
    """Return the transmission strategy for the option ``recovery``."""
    options = context.problem.options
    if options.recovery == "ack":
        return AcknowledgedCasts(mailbox, answering_time(mailbox, context.plan.details))
    if options.recovery == "r-tx":
        return RepeatedCasts(mailbox, options.transmissions)
    return RepeatedCasts(mailbox)


def gradient_of_cross_entropy(
    logarithms: torch.Tensor, labels: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return the gradient of ``weight`` times the summed cross-entropy with respect to the results, (samples, classes).

    ``logarithms`` is `torch.log_softmax` of the results, (samples, classes), and ``labels`` (samples,). The gradient is
    bitwise equal to autograd's, in a third of the time.

    >>> logarithms = torch.log_softmax(torch.zeros(1, 2), dim=1)
    >>> gradient_of_cross_entropy(logarithms, torch.tensor([0]), 1.0)
    tensor([[-0.5000,  0.5000]])
    """
    # The derivative of the negative log-likelihood: -weight at the right class of each sample.
    logarithm_gradient = torch.zeros_like(logarithms)
    logarithm_gradient.scatter_(1, labels[:, None], -weight)
    gradient: torch.Tensor = torch.ops.aten._log_softmax_backward_data(
        logarithm_gradient, logarithms, 1, logarithms.dtype
    )
    return gradient


def _make_test_runs(context: SlotContext) -> TestRuns:
    problem = context.problem
    assert context.dataset is not None
    return TestRuns(
        context.dataset, samples_per_test_batch(problem), problem.options.test_runs
    )


class SlotProgram:
    """The work of one device in each slot, with a method's hooks.

    In each slot of the timetable a device does the work of one batch in one layer: the device uses the parts that have
    arrived, computes, and casts its values to the devices of the next layer. The hook `AssignmentPolicy` moves neurons,
    `MissingDataPolicy` treats incomplete batches, `Transmit` repeats casts, and `Notes` annotates casts.

    Batches have two numbers: ``batch`` counts the micro-batches of training, or the test batches of an evaluation, and
    ``number`` counts the batches of training and tests together, to tell their casts apart.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        context: SlotContext,
        neurons: Neurons,
        assignments: AssignmentPolicy,
        missing_data: MissingDataPolicy,
        transmit: Transmit,
        notes: Notes | None = None,
    ) -> None:
        assert context.dataset is not None
        problem = context.problem
        details = context.plan.details
        table = timetable_of(details)
        self._mailbox = mailbox
        self._device = mailbox.device
        self._table = table
        self._is_coordinator = context.plan.coordinator == mailbox.device.name
        training = Training(context.dataset, problem.workload, problem.seed)
        self._training = MicroBatches(training, table.micro_batches)
        self._tests = _make_test_runs(context)
        # The option `training_time` may allow fewer steps than the workload.
        steps = min(training.steps, context.plan.steps or training.steps)
        self._context = context
        # Called for each pass over the segments: a device that changes its group begins again with the first segment,
        # and skips the segments that are over.
        self._make_segments = partial(
            make_segments,
            table,
            slot=details.timeslot,
            steps=steps,
            test_slot=details.test_timeslot,
            tests=len(self._tests),
            every=problem.options.evaluate_every,
            start_time=details.start_time or 0.0,
        )
        self._neurons = neurons
        self._assignments = assignments
        self._missing_data = missing_data
        self._exchange = CastExchange(
            mailbox,
            assignment=lambda: assignments.assignment,
            transmit=transmit,
            batches_in_flight=table.staleness(1) * table.micro_batches,
            values=values_per_neuron(problem),
            notes=notes,
        )
        self._losses: list[float] = []
        """Losses of the current step's micro-batches so far."""
        self._evaluated_step = 0
        """Steps trained before the newest evaluation; 0 before the first one."""
        self._gathering: Gathering | None = None
        if problem.options.test_results == "gathered":
            # `_tests` has the scores by received results, and this object the scores by gathered results.
            gathered_scores = _make_test_runs(context)
            self._gathering = Gathering(
                mailbox, context.plan.coordinator, gathered_scores
            )
        self._evaluations: list[asyncio.Task[None]] = []
        """Collections of gathered results under way."""

    async def run(self) -> None:
        """Train, and test over the same links, starting in the current slot.

        Raises `MissedTestsError` on the coordinator if it was off, or had no neurons, when the last slot ended.
        """
        # The end of the last segment bounds every wait, so that a lost device cannot make the others wait forever.
        *_, last = self._make_segments()
        is_over = False
        group = await self._assignments.wait_for_group(last.end)
        while group is not None and not is_over:
            is_over = await self._work_slots(group)
            if not is_over:
                # The group has changed, or the device has lost its neurons.
                group = await self._assignments.wait_for_group(last.end)
        until = last.end + RESULT_WAIT_SLOTS * last.slot
        if self._gathering is not None:
            await self._gathering.wait_until_sent(until)
            await asyncio.gather(*self._evaluations)
        if self._context.problem.options.final_weights and group is not None:
            await weights.send_final_weights(
                self._mailbox,
                self._context,
                self._neurons,
                self._assignments.assignment,
                until,
            )
        if self._is_coordinator and self._evaluated_step < last.trained_steps:
            raise MissedTestsError(
                f"the evaluation after step {last.trained_steps} is lost: the coordinator {self._device.name} was off "
                f"or had no neurons when the last timeslot ended at {last.end:.1f} s: train more, or end the fault "
                "earlier"
            )

    async def _work_slots(self, group: int) -> bool:
        """Work in the slots of a group; return True when all slots are over, and False as soon as the group changes."""
        slots = work_slots(self._device, group, self._make_segments())
        # Closed explicitly: an abandoned generator would be closed some time later, while the next one is in use.
        async with aclosing(slots) as work:
            async for segment, action in work:
                if self._assignments.on_slot_start(segment, action):
                    return False
                # Receivers use a cast in the next slot, so later repetitions come too late.
                self._exchange.slot_end = segment.next_start(self._device.now())
                if action is None:
                    self._end_segment(segment)
                    continue
                number = segment.batch_number(action.batch)
                if segment.is_test:
                    await self._test_batch(segment, action, number)
                else:
                    await self._train_batch(action, number)
        return True

    @property
    def _assignment(self) -> NeuronAssignment:
        """The current assignment, which changes between slots only."""
        return self._assignments.assignment

    async def _train_batch(self, action: LayerAction, number: int) -> None:
        """Train a batch in one layer."""
        layer = action.layer
        batch = action.batch
        if action.kind == "backward":
            await self._backward_layer(layer, batch, number)
            return
        if layer:
            values = await self._train_outputs(layer, batch, number)
            # The backward slots of older batches have passed: losses that have not arrived are useless now.
            batches_in_flight = self._table.staleness(layer) * self._table.micro_batches
            self._neurons.forget_before(layer, batch - batches_in_flight + 1)
        else:
            values = self._training.images(batch, self._own_neurons(0))
        await self._cast_outputs(layer, number, values)

    async def _train_outputs(
        self, layer: int, batch: int, number: int
    ) -> torch.Tensor | None:
        """Return the outputs of the device's neurons, (samples, values); None if the batch stops here."""
        samples = self._training.samples(batch)
        received = self._exchange.take_outputs(layer - 1, number, samples)
        missing_inputs = None
        # Layer 1 sends no losses, so it needs no mask: the input layer has no weights.
        if layer > 1 and self._missing_data.masks_missing_outputs:
            missing_inputs = received.missing_mask()
        inputs = self._missing_data.inputs(received)
        if inputs is None:
            return None
        return await self._neurons.forward(layer, batch, inputs, missing_inputs)

    async def _test_batch(
        self, segment: SlotSegment, action: LayerAction, number: int
    ) -> None:
        """Test a batch in one layer; in the output layer, also score the previous batches."""
        layer = action.layer
        batch = action.batch
        is_output = layer == self._assignment.output_layer
        if is_output:
            # The slot in which the results of the previous batch were shared is over, so they have arrived or are lost.
            self._score_tests(segment, batch)
        if layer:
            values = await self._test_outputs(layer, batch, number)
        else:
            values = self._tests.images(batch, self._own_neurons(0))
        await self._cast_outputs(layer, number, values)
        if is_output and values is not None and self._gathering is not None:
            self._gathering.keep_outputs(batch, self._own_neurons(layer), values)

    async def _test_outputs(
        self, layer: int, batch: int, number: int
    ) -> torch.Tensor | None:
        """Return the outputs of the device's neurons, (samples, values); None if the batch stops here."""
        samples = self._tests.samples(batch)
        received = self._exchange.take_outputs(layer - 1, number, samples)
        usable = self._missing_data.test_values(received)
        if usable is None:
            return None
        cache_key = None
        # The input layer casts the samples, which are the same in each test run. Equal patterns of arrival thus give
        # equal outputs, unless the method has replaced missing values.
        pattern = received.arrival_pattern if layer == 1 else None
        if pattern and usable is received:
            cache_key = (self._tests.index_in_run(batch), pattern)
        return await self._neurons.infer(layer, batch, usable, cache_key)

    def _own_neurons(self, layer: int) -> Channels:
        return self._assignment.neurons_of(self._device.name, layer)

    async def _cast_outputs(
        self, layer: int, number: int, values: torch.Tensor | None
    ) -> None:
        """Cast the outputs of the device's neurons of a layer, (samples, values), to the next layer.

        For the input layer, these are values of the samples. The output layer casts its results to itself.
        """
        if values is None and not self._missing_data.casts_empty_messages:
            return
        # Result sharing: each device of the output layer needs all outputs for the cross-entropy.
        receiving_layer = min(layer + 1, self._assignment.output_layer)
        message = Outputs(number, layer, values, sender=self._device.name)
        await self._exchange.cast(receiving_layer, message)

    async def _backward_layer(self, layer: int, batch: int, number: int) -> None:
        """Learn from a batch, and cast the device's contribution to the losses of the previous layer."""
        samples = self._training.samples(batch)
        if layer == self._assignment.output_layer:
            usable = await self._result_gradient(layer, batch, number)
        else:
            received = self._exchange.take_losses(layer, number, samples)
            usable = await self._missing_data.usable_losses(received)

        def learn(
            shard: LayerShard, gradient: torch.Tensor | None
        ) -> BackwardWork | None:
            return self._missing_data.learn(shard, layer, batch, gradient, usable)

        losses = await self._neurons.backward(
            layer, batch, samples, usable.values, learn
        )
        # The previous layer is the input layer, which has no weights and needs no losses.
        if layer == 1:
            return
        if losses is not None or self._missing_data.casts_empty_messages:
            message = Losses(number, layer, losses, sender=self._device.name)
            await self._exchange.cast(layer - 1, message)

    async def _result_gradient(
        self, layer: int, batch: int, number: int
    ) -> UsableValues:
        """Return the gradient of a batch's cross-entropy by the device's outputs, if the results are usable."""
        samples = self._training.samples(batch)
        received = self._exchange.take_outputs(layer, number, samples)
        usable = await self._missing_data.usable_results(received)
        is_usable = usable.values is not None
        if not is_usable and not self._is_coordinator:
            return usable
        results = usable.values
        if results is None:
            # The coordinator records a loss of every step, also of one without learning.
            results = received.joined_values()
        batch_size = self._training.batch_size
        logarithms = torch.log_softmax(results, dim=1)
        labels = self._training.labels(batch)
        if self._is_coordinator:
            summed_loss = functional.nll_loss(logarithms, labels, reduction="sum")
            loss = float(summed_loss / batch_size)
            self._record_loss(batch, loss, is_exact=is_usable)
        if not is_usable:
            return usable
        gradient = gradient_of_cross_entropy(logarithms, labels, 1 / batch_size)
        own_gradient = pick(gradient, 1, self._own_neurons(layer))
        return usable._replace(values=own_gradient)

    def _record_loss(self, batch: int, loss: float, *, is_exact: bool) -> None:
        """Add the loss of a micro-batch, and record the step after its last micro-batch, on the coordinator.

        The coordinator computes the loss from the results that it has received: missing results count as zeros, even if
        the method excludes them from learning. ``is_exact``: the results were usable for learning.
        """
        self._losses.append(loss)
        step, part = divmod(batch, self._training.parts)
        if part + 1 < self._training.parts:
            return
        total = sum(self._losses)
        self._losses = []
        self._device.record(
            "step", step=step, loss=total, samples=self._training.batch_size
        )
        if is_exact:
            self._missing_data.observe_loss(step, total)

    def _score_tests(self, segment: SlotSegment, before: int) -> None:
        """Score the test batches up to ``before`` (exclusive) by the results that this device has received.

        Missing results count as zeros, as in `_record_loss`.
        """
        if not self._is_coordinator and self._gathering is None:
            return
        output = self._assignment.output_layer
        for test in self._tests.unscored_batches(before):
            number = segment.batch_number(test)
            samples = self._tests.samples(test)
            received = self._exchange.take_outputs(output, number, samples)
            usable = self._missing_data.test_values(received)
            results = received.zeros()
            if usable is not None:
                results = usable.joined_values()
            self._tests.score(test, results)
            if self._gathering is not None:
                self._gathering.send_results(segment.trained_steps, test, results)

    def _end_segment(self, segment: SlotSegment) -> None:
        """Record the received casts at the end of training, and the scores at the end of tests."""
        if segment.is_test:
            self._evaluate_tests(segment)
            return
        for purpose, tally in self._exchange.tally.items():
            self._device.record(
                "parts_received",
                purpose=purpose,
                expected=tally.expected,
                received=tally.received,
            )
        if self._is_coordinator:
            self._device.record("test_start", step=segment.trained_steps)

    def _evaluate_tests(self, segment: SlotSegment) -> None:
        """Score the last test batches on the coordinator and, if results are gathered, on the peers.

        Peers are the other devices with neurons of the output layer.
        """
        gathering = self._gathering
        holders = self._assignment.holders(self._assignment.output_layer)
        is_peer = gathering is not None and self._device.name in holders
        if not self._is_coordinator and not is_peer:
            return
        self._score_tests(segment, len(self._tests))
        scores = self._tests.finish()
        if not self._is_coordinator:
            return
        self._evaluated_step = segment.trained_steps
        if gathering is None:
            self._device.record("evaluate", step=segment.trained_steps, **scores)
            return
        # In a task, since the next training segment begins while results are still arriving.
        gather = self._gather_scores(segment, gathering, holders, scores)
        self._evaluations.append(self._mailbox.start(gather))

    async def _gather_scores(
        self,
        segment: SlotSegment,
        gathering: Gathering,
        devices: Sequence[str],
        received_scores: Mapping[str, Any],
    ) -> None:
        """Record the scores by gathered results, and the accuracy by the results received by the coordinator.

        ``devices`` are the devices of the output layer, and ``received_scores`` the coordinator's scores by received
        results.
        """
        until = segment.end + RESULT_WAIT_SLOTS * segment.slot
        scores = await gathering.collect_scores(segment.trained_steps, devices, until)
        self._device.record(
            "evaluate",
            step=segment.trained_steps,
            coordinator_accuracy=received_scores["accuracy"],
            **scores,
        )
