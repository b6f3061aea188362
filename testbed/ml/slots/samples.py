"""Inputs of the network: micro-batches of training, and test batches with their scores.

Test results can be gathered reliably: devices of the output layer send their outputs and scores to the coordinator.
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
    """Each step's batch in nearly equal micro-batches, numbered through all steps; a single one except with GPipe."""

    def __init__(self, training: Training, parts: int) -> None:
        self.parts = parts
        self.steps = training.steps
        self.whole = training.samples
        """Samples of a whole batch."""
        self._training = training
        self._cuts = cut_batch(training.samples, parts)

    def samples(self, number: int) -> int:
        """Return the number of samples of a micro-batch."""
        cut = self._cuts[number % self.parts]
        return int(cut.stop - cut.start)

    def images(self, number: int, own: Channels) -> torch.Tensor:
        """Return the selected values of a micro-batch's samples, (samples, own values)."""
        step, part = divmod(number, self.parts)
        cut = self._cuts[part]
        if isinstance(own, range):
            # A range of values is read without copying the others.
            own_values = self._training.images(step, slice(own.start, own.stop))
            return own_values[cut]
        samples = self._training.images(step)[cut]
        return pick(samples.flatten(1), 1, own)

    def labels(self, number: int) -> torch.Tensor:
        """Return the labels of a micro-batch, (samples,)."""
        step, part = divmod(number, self.parts)
        labels = self._training.labels(step)
        return labels[self._cuts[part]]


class TestRuns:
    """The test runs of an evaluation: all test samples pass ``runs`` times, each time over the links as they are then.

    Batches are numbered from 0 through all runs.
    """

    def __init__(self, dataset: Dataset, batch_size: int, runs: int) -> None:
        self._requests = Requests(dataset, batch_size)
        self._scores = [Score() for _ in range(runs)]
        self._scored = 0
        self._images: dict[int, torch.Tensor] = {}
        """Values of the samples by the batch's index in its run: all runs read the same samples."""
        self._own: Channels | None = None
        """The values selected in `_images`."""

    def __len__(self) -> int:
        return len(self._scores) * len(self._requests)

    def index_in_run(self, test: int) -> int:
        """Return the index of a test batch within a run, from 0."""
        return test % len(self._requests)

    def images(self, test: int, own: Channels) -> torch.Tensor:
        """Return the selected values of a test batch's samples, (samples, own values)."""
        if self._own != own:
            # Neurons of the input layer have moved.
            self._own = own
            self._images = {}
        index = self.index_in_run(test)
        if index not in self._images:
            samples = self._requests.images(index).flatten(1)
            # Contiguous, so that the values of others are freed.
            self._images[index] = pick(samples, 1, own).contiguous()
        return self._images[index]

    def samples(self, test: int) -> int:
        """Return the number of samples of a test batch."""
        return len(self._requests.samples(self.index_in_run(test)))

    def labels(self, test: int) -> npt.NDArray[Any]:
        """Return the labels of a test batch, (samples,)."""
        return self._requests.labels(self.index_in_run(test))

    def unscored_batches(self, before: int) -> range:
        """Return the numbers of the unscored test batches below ``before``."""
        return range(self._scored, before)

    def score(self, test: int, results: torch.Tensor) -> None:
        """Count the results of a test batch, (samples, classes); tests are scored in order."""
        run = test // len(self._requests)
        self._scores[run].add(results, self.labels(test))
        self._scored = test + 1

    def finish(self) -> dict[str, Any]:
        """Return mean accuracy and loss over the runs, standard deviation and each run's accuracy, and reset."""
        accuracies = []
        losses = []
        for run in self._scores:
            # A run without scored batches has neither.
            accuracies.append(run.accuracy or 0.0)
            losses.append(run.loss or 0.0)
        self._scores = [Score() for _ in accuracies]
        self._scored = 0
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
    results: torch.Tensor
    """Outputs of the sender's neurons, (samples, classes), with zeros for all other neurons."""
    right: torch.Tensor
    """Mask, (samples,), of the samples classified correctly from the results that the sender received."""


class Gathering:
    """The reliable collection of test results: one device's side, and the aggregation on the coordinator."""

    def __init__(self, mailbox: Mailbox, coordinator: str, scores: TestRuns) -> None:
        """``scores`` counts gathered results, one call per complete test batch."""
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._scores = scores
        self._computed: dict[int, tuple[Channels, torch.Tensor]] = {}
        """By test batch: the own neurons and their outputs."""
        self._own: dict[int, Tested] = {}
        """The coordinator's own messages by test batch, which need no transmission."""
        self._sent: list[asyncio.Future[None]] = []

    def keep_outputs(self, test: int, own: Channels, outputs: torch.Tensor) -> None:
        """Keep the outputs, (samples, own neurons), of a test batch."""
        self._computed[test] = own, outputs

    def send_results(self, step: int, test: int, results: torch.Tensor) -> None:
        """Send the own outputs of a test batch, together with the score of ``results`` as received here.

        ``results`` is (samples, classes).
        """
        labels = torch.from_numpy(self._scores.labels(test))
        right = results.argmax(dim=1) == labels
        computed = torch.zeros_like(results)
        if test in self._computed:
            own, outputs = self._computed.pop(test)
            computed[:, list(own)] = outputs
        message = Tested(step, test, computed, right)
        if self._mailbox.device.name == self._coordinator:
            self._own[test] = message
        else:
            sending = self._mailbox.post(self._coordinator, message)
            self._sent.append(sending)

    async def wait_until_sent(self, until: float) -> None:
        """Return once all sent results have arrived, or at the instant ``until``, in seconds."""
        if self._sent:
            timeout = max(0.0, until - self._mailbox.device.now())
            await asyncio.wait(self._sent, timeout=timeout)

    async def collect_scores(
        self, step: int, devices: Collection[str], until: float
    ) -> dict[str, Any]:
        """Return accuracy, loss and more of the tests after a step, as in `TestRuns.finish`, from gathered results.

        ``devices`` are those of the output layer. The field ``any_device_accuracy`` is the fraction of samples that at
        least one device has classified correctly from the results it received. Results missing at the instant
        ``until``, in seconds, count as zeros.
        """
        right_anywhere: list[bool] = []
        for test in sorted(self._own):
            messages = await self._results_of(step, test, devices, until)
            results = torch.stack([message.results for message in messages])
            # Each device sends zeros for the neurons of the others, so the sum has all neurons.
            self._scores.score(test, results.sum(dim=0))
            right = torch.stack([message.right for message in messages])
            right_anywhere += right.any(dim=0).tolist()
        self._own.clear()
        scores = self._scores.finish()
        scores["any_device_accuracy"] = fmean(right_anywhere)
        return scores

    async def _results_of(
        self, step: int, test: int, devices: Collection[str], until: float
    ) -> list[Tested]:
        """Return the messages about a test batch: the coordinator's own, and those that arrive in time."""
        messages = [self._own[test]]
        for name in devices:
            if name == self._coordinator:
                continue
            key = (step, test, name)
            message = await self._mailbox.take(Tested, key, deadline=until)
            if message is not None:
                messages.append(message)
        return messages
