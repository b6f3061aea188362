"""The samples of a run on the coordinator: batches to train on, requests to answer, and the evaluation of outputs.

Outputs are evaluated by a `Score`, which counts correct outputs, or by the boxes of objects that a detector finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from testbed.device import Device
from testbed.ml.data.batches import (
    batch,
    batch_length,
    leftover_samples,
    steps_per_epoch,
)
from testbed.ml.data.dataset import Dataset
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.models.detection import Detector
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.metrics import update_metric
from testbed.ml.workload import LearningPart

_PLAIN = TrainingConfig()
"""Cross-entropy without further metrics."""


def loss_fields(loss: float, *, computed: bool) -> dict[str, float]:
    """Return the event fields of a loss; empty in timing-only runs, whose loss is not ``computed``.

    >>> loss_fields(0.25, computed=True)
    {'loss': 0.25}
    """
    if not computed:
        return {}
    return {"loss": loss}


class Score:
    """Accuracy, loss and the configured metrics over all outputs added so far.

    >>> import numpy as np
    >>> score = Score()
    >>> score.add(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 0]))
    >>> score.samples, score.accuracy
    (2, 0.5)
    """

    def __init__(self, training: TrainingConfig = _PLAIN) -> None:
        self.samples = 0
        self._training = training
        self._correct = 0
        self._answers = 0
        """Number of scored answers: samples, or tokens of samples."""
        self._summed_loss = 0.0
        self._loss_weight = 0.0
        """Number of samples that the loss counts; a sample counts in part if the loss ignores some of its labels."""
        self._metrics = training.metrics()

    def add(self, outputs: torch.Tensor, labels: npt.NDArray[Any]) -> None:
        """Add outputs, (samples, ...), with their labels, (samples, ...); outputs of timing-only runs are ignored."""
        if outputs.is_meta:
            return
        label_tensor = torch.from_numpy(labels)
        self.samples += len(labels)
        if not label_tensor.is_floating_point():
            correct, answers = self._training.count_correct(outputs, label_tensor)
            self._correct += correct
            self._answers += answers
        # With a total weight of 1 the result is the sum of the losses, which the property `loss` divides.
        summed_loss = self._training.loss(outputs, label_tensor, total_weight=1)
        self._summed_loss += float(summed_loss)
        self._loss_weight += self._training.weight(label_tensor)
        for name, metric in self._metrics.items():
            update_metric(metric, name, outputs, label_tensor)

    @property
    def accuracy(self) -> float | None:
        """Fraction of samples, or tokens, whose largest output is their label; None for labels other than classes."""
        if not self._answers:
            return None
        return self._correct / self._answers

    @property
    def loss(self) -> float | None:
        """Mean loss; None if the loss counts no label."""
        if not self._loss_weight:
            return None
        return self._summed_loss / self._loss_weight

    def fields(self) -> dict[str, Any]:
        """Return accuracy, loss and metrics as event fields; empty without scored samples."""
        if not self.samples:
            return {}
        fields: dict[str, Any] = {}
        if self.accuracy is not None:
            fields["accuracy"] = self.accuracy
        if self.loss is not None:
            fields["loss"] = self.loss
        if self._metrics:
            metrics = {}
            for name, metric in self._metrics.items():
                metrics[name] = float(metric.compute())
            fields["metrics"] = metrics
        return fields


def record_left_out(device: Device, samples: int, of: int) -> None:
    """Record an event if each epoch leaves out some training samples: ``samples`` out of ``of`` samples."""
    if samples:
        device.record("left_out", samples=samples, of=of)


class Training:
    """The batches of all training steps; a step repeated after a failure sees the same samples again."""

    def __init__(self, dataset: Dataset, workload: LearningPart, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = workload.batch_size
        # Without a seed the samples keep their order.
        self._seed = seed if workload.data.shuffle else None
        self._samples = len(dataset.train_labels)
        """Number of training samples of the data set."""
        self._drop_last = workload.drop_last
        """Whether an epoch leaves out its last samples if they do not fill a batch."""
        self._steps_per_epoch = steps_per_epoch(
            self._samples, self._batch_size, drop_last=self._drop_last
        )
        self.steps = (workload.epochs or 0) * self._steps_per_epoch
        """Training steps of the whole workload."""
        if workload.steps is not None:
            self.steps = workload.steps

    @property
    def samples(self) -> int:
        """Number of samples of a full batch; the last batch of an epoch may have fewer."""
        return min(self._batch_size, self._samples)

    def count(self, step: int) -> int:
        """Return the number of samples of a step."""
        return batch_length(
            self._samples, self._batch_size, step, drop_last=self._drop_last
        )

    def record_left_out(self, device: Device) -> None:
        """Record the number of samples left out by each epoch, if any."""
        samples = leftover_samples(
            self._samples, self._batch_size, drop_last=self._drop_last
        )
        record_left_out(device, samples, of=self._samples)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples, (samples, ...), and labels, (samples,), of a step counted from 0."""
        return self.images(step), self.labels(step)

    def images(self, step: int, values: slice | None = None) -> torch.Tensor:
        """Return the samples of a step, (samples, ...).

        With ``values``, each sample is flattened and reduced to this range of its values: (samples, values).
        """
        # The epoch decides the augmentation of the samples.
        epoch = step // self._steps_per_epoch
        indices = self._sample_indices(step)
        images = self._dataset.batch(indices, epoch, values)
        return torch.from_numpy(images)

    def labels(self, step: int) -> torch.Tensor:
        """Return the labels of a step, (samples,)."""
        indices = self._sample_indices(step)
        return torch.from_numpy(self._dataset.train_labels[indices])

    def _sample_indices(self, step: int) -> npt.NDArray[np.int64]:
        """Return the places of a step's samples in the data set, (samples,)."""
        return batch(
            self._samples,
            self._batch_size,
            self._seed,
            step,
            drop_last=self._drop_last,
        )


class Requests:
    """Batches of test samples in their order.

    With ``count`` there are as many full batches, which start again with the first sample after the last one; without
    ``count`` one pass over all test samples.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, count: int | None = None
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._is_cyclic = count is not None
        if count is None:
            count = math.ceil(len(dataset.test_labels) / batch_size)
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def labelled(self) -> bool:
        """Whether labels exist for the samples."""
        return self._dataset.classes > 0

    def samples(self, index: int) -> Sequence[int]:
        """Return the indices of one request's test samples."""
        total = len(self._dataset.test_labels)
        start = index * self._batch_size
        stop = start + self._batch_size
        if self._is_cyclic:
            return [number % total for number in range(start, stop)]
        # The last request of one pass may have fewer samples.
        return range(start, min(stop, total))

    def images(self, index: int) -> torch.Tensor:
        """Return the test samples of one request, (samples, ...); for images (samples, channels, height, width)."""
        images = self._dataset.test_batch(self.samples(index))
        return torch.from_numpy(images)

    def labels(self, index: int) -> npt.NDArray[Any]:
        """Return the labels of one request, (samples, ...)."""
        return self._dataset.test_labels[self.samples(index)]


class Answers:
    """The evaluation of all requests on the requesting device: a score against labels, or the objects in each image."""

    def __init__(
        self, device: Device, problem: PlanningProblem, requests: Requests
    ) -> None:
        self._device = device
        self._detector = problem.model.detector
        self._requests = requests
        self._score = Score(problem.training)

    def add(self, index: int, outputs: torch.Tensor) -> None:
        """Evaluate the outputs, (samples, ...), of request ``index``.

        The evaluation takes no time of the device, and the caller has recorded the latency of the request before.
        """
        if outputs.is_meta:
            return
        if self._detector is not None:
            self._record_objects(self._detector, index, outputs)
        elif self._requests.labelled:
            labels = self._requests.labels(index)
            self._score.add(outputs, labels)

    def _record_objects(
        self, detector: Detector, index: int, outputs: torch.Tensor
    ) -> None:
        samples = self._requests.samples(index)
        for sample, output in zip(samples, outputs, strict=True):
            boxes = detector.boxes(output.numpy())
            self._device.record(
                "objects",
                request=index,
                sample=sample,
                boxes=[box.to_json() for box in boxes],
            )

    def finish(self) -> None:
        """Record the score of all requests, if labels exist."""
        if not self._requests.labelled:
            return
        fields = self._score.fields()
        self._device.record("evaluate", step=len(self._requests), **fields)
