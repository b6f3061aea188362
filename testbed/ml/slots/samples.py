"""Inputs of the network: micro-batches of training, and test batches with their scores.

The coordinator scores tests by the results that it has received. In addition, results can be gathered reliably
(`Gathering`): the other devices of the output layer send their outputs and scores to the coordinator after the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy.typing as npt
import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.data.batches import cut_batch
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers.feed import Requests, Score, Training
from testbed.ml.models.slices import Channels, pick

RESULT_WAIT_SLOTS = 10
"""Number of slots after the tests in which the coordinator waits for results: a device that is off sends none."""


class MicroBatches:
    """The batches of training, each cut into nearly equal micro-batches: a single one except with GPipe.

    Micro-batches are numbered from 0 through all steps.
    """

    def __init__(self, training: Training, parts: int) -> None:
        """``parts`` is the number of micro-batches of a batch."""
        self.parts = parts
        self.batch_size = training.samples
        """Samples of a whole batch."""
        self._training = training
        self._slices = cut_batch(training.samples, parts)

    def samples(self, number: int) -> int:
        """Return the number of samples of a micro-batch."""
        rows = self._slices[number % self.parts]
        return int(rows.stop - rows.start)

    def images(self, number: int, input_neurons: Channels) -> torch.Tensor:
        """Return a micro-batch's values of some neurons of the input layer, (samples, these neurons)."""
        step, part = divmod(number, self.parts)
        rows = self._slices[part]
        if isinstance(input_neurons, range):
            # A range of values is read without copying the others.
            columns = slice(input_neurons.start, input_neurons.stop)
            return self._training.images(step, columns)[rows]
        samples = self._training.images(step)[rows]
        return pick(samples.flatten(1), 1, input_neurons)

    def labels(self, number: int) -> torch.Tensor:
        """Return the labels of a micro-batch, (samples,)."""
        step, part = divmod(number, self.parts)
        labels = self._training.labels(step)
        return labels[self._slices[part]]


class TestRuns:
    """The test runs of an evaluation: all test samples pass ``runs`` times, each time over the links as they are then.

    Batches are numbered from 0 through all runs.
    """

    def __init__(self, dataset: Dataset, batch_size: int, runs: int) -> None:
        self._requests = Requests(dataset, batch_size)
        self._scores = [Score() for _ in range(runs)]
        self._next_unscored = 0
        """The first test batch without a score; test batches are scored in order."""
        self._images: dict[int, torch.Tensor] = {}
        """Values of the neurons `_input_neurons`, by the batch's index in its run: all runs read the same samples."""
        self._input_neurons: Channels | None = None

    def __len__(self) -> int:
        return len(self._scores) * len(self._requests)

    def index_in_run(self, test: int) -> int:
        """Return the index of a test batch within a run, from 0."""
        return test % len(self._requests)

    def images(self, test: int, input_neurons: Channels) -> torch.Tensor:
        """Return a test batch's values of some neurons of the input layer, (samples, these neurons)."""
        if self._input_neurons != input_neurons:
            # Neurons of the input layer have moved.
            self._input_neurons = input_neurons
            self._images = {}
        index = self.index_in_run(test)
        if index not in self._images:
            samples = self._requests.images(index).flatten(1)
            # Contiguous: a view would keep the values of all other neurons in memory.
            self._images[index] = pick(samples, 1, input_neurons).contiguous()
        return self._images[index]

    def samples(self, test: int) -> int:
        """Return the number of samples of a test batch."""
        return len(self._requests.samples(self.index_in_run(test)))

    def labels(self, test: int) -> npt.NDArray[Any]:
        """Return the labels of a test batch, (samples,)."""
        return self._requests.labels(self.index_in_run(test))

    def unscored_batches(self, before: int) -> range:
        """Return the numbers of the unscored test batches below ``before``."""
        return range(self._next_unscored, before)

    def score(self, test: int, results: torch.Tensor) -> None:
        """Add the results of a test batch, (samples, classes), to the score of its run."""
        run = test // len(self._requests)
        self._scores[run].add(results, self.labels(test))
        self._next_unscored = test + 1

    def finish(self) -> dict[str, Any]:
        """Return all scores as the fields of an evaluation, and reset the scores.

        The fields are the mean accuracy and loss over the runs, the standard deviation of the accuracy, and the
        accuracy of each run.
        """
        accuracies = []
        losses = []
        for run in self._scores:
            # The score of a run without scored batches has neither.
            accuracies.append(run.accuracy or 0.0)
            losses.append(run.loss or 0.0)
        self._scores = [Score() for _ in accuracies]
        self._next_unscored = 0
        return {
            "accuracy": fmean(accuracies),
            "loss": fmean(losses),
            "deviation": pstdev(accuracies),
            "run_accuracies": accuracies,
        }


@dataclass(frozen=True)
class Tested(TypedMessage, kind="tested", key=("step", "test", "sender")):
    """To the coordinator: outputs and score of one test batch on another device of the output layer."""

    step: int
    """Steps that were trained before."""
    test: int
    """Number of the test batch."""
    results: torch.Tensor
    """Outputs of the sender's neurons, (samples, classes), with zeros for all other neurons."""
    right: torch.Tensor
    """Mask, (samples,), of the samples classified correctly from the results that the sender received."""


class Gathering:
    """The reliable collection of test results: sending on each device, and the aggregation on the coordinator."""

    def __init__(self, mailbox: Mailbox, coordinator: str, scores: TestRuns) -> None:
        """``scores`` are the scores by gathered results, kept apart from the scores by received results."""
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._scores = scores
        self._outputs: dict[int, tuple[Channels, torch.Tensor]] = {}
        """Test batch -> this device's neurons of the output layer, and their outputs."""
        self._coordinator_messages: dict[int, Tested] = {}
        """Test batch -> the coordinator's message to itself, which needs no transmission."""
        self._sends: list[asyncio.Future[None]] = []
        """Messages to the coordinator; each future completes when its message has arrived."""

    def keep_outputs(self, test: int, neurons: Channels, outputs: torch.Tensor) -> None:
        """Keep the outputs of the device's neurons for a test batch, (samples, neurons)."""
        self._outputs[test] = neurons, outputs

    def send_results(self, step: int, test: int, results: torch.Tensor) -> None:
        """Send the kept outputs of a test batch, together with the score of ``results``.

        ``results`` are the results that this device has received, (samples, classes).
        """
        labels = torch.from_numpy(self._scores.labels(test))
        right = results.argmax(dim=1) == labels
        own_results = torch.zeros_like(results)
        if test in self._outputs:
            neurons, outputs = self._outputs.pop(test)
            own_results[:, list(neurons)] = outputs
        message = Tested(step, test, own_results, right)
        if self._mailbox.device.name == self._coordinator:
            self._coordinator_messages[test] = message
        else:
            sending = self._mailbox.post(self._coordinator, message)
            self._sends.append(sending)

    async def wait_until_sent(self, until: float) -> None:
        """Return once all sent results have arrived, or at the instant ``until``, in seconds."""
        if self._sends:
            timeout = max(0.0, until - self._mailbox.device.now())
            await asyncio.wait(self._sends, timeout=timeout)

    async def collect_scores(
        self, step: int, devices: Collection[str], until: float
    ) -> dict[str, Any]:
        """Return the fields of `TestRuns.finish` by gathered results, and ``any_device_accuracy``.

        The latter is the fraction of samples that at least one device has classified correctly from the results it
        received. ``devices`` are the devices of the output layer. Results missing at the instant ``until``, in seconds,
        count as zeros.
        """
        right_anywhere: list[bool] = []
        for test in sorted(self._coordinator_messages):
            messages = await self._results_of(step, test, devices, until)
            results = torch.stack([message.results for message in messages])
            # A device sends zeros for the neurons of other devices, so the sum has the outputs of all neurons.
            self._scores.score(test, results.sum(dim=0))
            right = torch.stack([message.right for message in messages])
            right_anywhere += right.any(dim=0).tolist()
        self._coordinator_messages.clear()
        scores = self._scores.finish()
        scores["any_device_accuracy"] = fmean(right_anywhere)
        return scores

    async def _results_of(
        self, step: int, test: int, devices: Collection[str], until: float
    ) -> list[Tested]:
        """Return the messages about a test batch: the coordinator's message, and others arriving in time."""
        messages = [self._coordinator_messages[test]]
        for name in devices:
            if name == self._coordinator:
                continue
            key = (step, test, name)
            message = await self._mailbox.take(Tested, key, deadline=until)
            if message is not None:
                messages.append(message)
        return messages
