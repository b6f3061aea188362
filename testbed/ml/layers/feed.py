"""Input batches and requests on the coordinator, and evaluation of the outputs: scores and boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from testbed.device import Device
from testbed.ml.data.batches import batch, batch_length, left_out, steps_per_epoch
from testbed.ml.data.dataset import Dataset
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.models.detection import Detector
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.metrics import update_metric
from testbed.ml.workload import LearningPart


def loss_fields(loss: float, *, computed: bool) -> dict[str, float]:
    """Return the event fields of a loss; empty in timing-only runs, whose loss is not ``computed``.

    >>> loss_fields(0.25, computed=True)
    {'loss': 0.25}
    """
    if not computed:
        return {}
    return {"loss": loss}


_PLAIN = TrainingConfig()
"""Cross-entropy without further metrics."""


class Score:
    """Accumulates correct answers, loss and the configured metrics.

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
        self._loss = 0.0
        self._weight = 0.0
        """Number of samples counted by the loss."""
        self._metrics = training.metrics()

    def add(self, outputs: torch.Tensor, labels: npt.NDArray[Any]) -> None:
        """Count outputs, (samples, ...), against labels, (samples, ...); a no-op in timing-only runs."""
        if outputs.is_meta:
            return
        wanted = torch.from_numpy(labels)
        self.samples += len(labels)
        if not wanted.is_floating_point():
            correct, answers = self._training.count_correct(outputs, wanted)
            self._correct += correct
            self._answers += answers
        # A weight of 1 leaves the sum, which is divided at the end.
        summed_loss = self._training.loss(outputs, wanted, 1)
        self._loss += float(summed_loss)
        self._weight += self._training.weight(wanted)
        for name, metric in self._metrics.items():
            update_metric(metric, name, outputs, wanted)

    @property
    def accuracy(self) -> float | None:
        """Fraction of samples, or tokens, whose largest output is their label; None for labels other than classes."""
        if not self._answers:
            return None
        return self._correct / self._answers

    @property
    def loss(self) -> float | None:
        """Mean loss; None if the loss counts no label."""
        if not self._weight:
            return None
        return self._loss / self._weight

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
    """Record the number of training samples that each epoch leaves out, if any, ``of`` all samples."""
    if samples:
        device.record("left_out", samples=samples, of=of)


class Training:
    """The batches of all training steps; a repeated step sees the same samples."""

    def __init__(self, dataset: Dataset, workload: LearningPart, seed: int) -> None:
        self._dataset = dataset
        self._size = workload.batch_size
        # Without a seed the samples keep their order.
        self._seed = seed if workload.data.shuffle else None
        self._samples = len(dataset.train_labels)
        self._drop_last = workload.drop_last
        self._per_epoch = steps_per_epoch(
            self._samples, self._size, drop_last=self._drop_last
        )
        self.steps = (workload.epochs or 0) * self._per_epoch
        """Training steps of the whole workload."""
        if workload.steps is not None:
            self.steps = workload.steps

    @property
    def samples(self) -> int:
        """Samples of one batch; the last batch of an epoch may have fewer."""
        return min(self._size, self._samples)

    def count(self, step: int) -> int:
        """Return the number of samples of a step."""
        return batch_length(self._samples, self._size, step, drop_last=self._drop_last)

    def record_left_out(self, device: Device) -> None:
        """Record the number of samples each epoch leaves out, if any."""
        samples = left_out(self._samples, self._size, drop_last=self._drop_last)
        record_left_out(device, samples, self._samples)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples, (samples, ...), and labels, (samples,), of a step counted from 0."""
        return self.images(step), self.labels(step)

    def images(self, step: int, values: slice | None = None) -> torch.Tensor:
        """Return the samples of a step, (samples, ...); with ``values`` only these values, (samples, values)."""
        # The epoch decides the augmentation of the samples.
        epoch = step // self._per_epoch
        chosen = self._chosen_samples(step)
        images = self._dataset.batch(chosen, epoch, values)
        return torch.from_numpy(images)

    def labels(self, step: int) -> torch.Tensor:
        """Return the labels of a step, (samples,)."""
        chosen = self._chosen_samples(step)
        return torch.from_numpy(self._dataset.train_labels[chosen])

    def _chosen_samples(self, step: int) -> npt.NDArray[np.int64]:
        """Return the indices of a step's samples, (samples,)."""
        return batch(
            self._samples,
            self._size,
            self._seed,
            step,
            drop_last=self._drop_last,
        )


class Requests:
    """Batches of test samples in order: ``count`` full batches, cyclically, or one pass over all test samples."""

    def __init__(
        self, dataset: Dataset, batch_size: int, count: int | None = None
    ) -> None:
        self._dataset = dataset
        self._size = batch_size
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
        existing = len(self._dataset.test_labels)
        first = index * self._size
        end = first + self._size
        if self._is_cyclic:
            return [number % existing for number in range(first, end)]
        # The last request of one pass over all samples may have fewer.
        return range(first, min(end, existing))

    def images(self, index: int) -> torch.Tensor:
        """Return the samples of one request, (samples, ...); for images (samples, channels, height, width)."""
        images = self._dataset.test_batch(self.samples(index))
        return torch.from_numpy(images)

    def labels(self, index: int) -> npt.NDArray[Any]:
        """Return the labels of one request, (samples, ...)."""
        return self._dataset.test_labels[self.samples(index)]


class Answers:
    """Evaluates and records the output of every request on the requesting device."""

    def __init__(
        self, device: Device, problem: PlanningProblem, requests: Requests
    ) -> None:
        self._device = device
        self._detector = problem.model.detector
        self._requests = requests
        self._score = Score(problem.training)

    def add(self, index: int, outputs: torch.Tensor) -> None:
        """Record the outputs, (samples, ...), of one request, whose latency has ended before this call."""
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
            objects = detector.boxes(output.numpy())
            self._device.record(
                "objects",
                request=index,
                sample=sample,
                boxes=[box.to_json() for box in objects],
            )

    def finish(self) -> None:
        """Record the score of all requests, if labels exist."""
        if not self._requests.labelled:
            return
        fields = self._score.fields()
        self._device.record("evaluate", step=len(self._requests), **fields)
