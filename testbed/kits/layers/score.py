"""Accuracy, loss and metrics over outputs that come in piece by piece."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

from testbed.common.lazy import torch
from testbed.training.metrics import update
from testbed.training.recipe import Recipe


def loss_fields(loss: float) -> dict[str, float]:
    """Return the fields of an event for a loss; none for nan, the loss of what was not computed."""
    return {} if math.isnan(loss) else {"loss": loss}


_PLAIN = Recipe()


class Score:
    """Adds up correct answers, the loss, and what else the training is measured by."""

    def __init__(self, training: Recipe = _PLAIN) -> None:
        self.samples = 0
        self._training = training
        self._correct = 0
        self._answers = 0
        """Those that are right or wrong: of samples, or of each token of theirs."""
        self._loss = 0.0
        self._metrics = training.metrics()

    def add(self, outputs: torch.Tensor, labels: npt.NDArray[Any]) -> None:
        """Count outputs, (samples, classes), or (samples, ...) as the loss wants them, and labels, (samples, ...).

        Outputs without numbers leave nothing to score.
        """
        if outputs.is_meta:
            return
        wanted = torch.from_numpy(labels)
        self.samples += len(labels)
        if not wanted.is_floating_point():
            right, answers = self._training.right(outputs, wanted)
            self._correct, self._answers = self._correct + right, self._answers + answers
        self._loss += float(self._training.loss(outputs, wanted, 1))
        for name, metric in self._metrics.items():
            update(metric, name, outputs, wanted)

    @property
    def accuracy(self) -> float | None:
        """Fraction of samples, or of tokens, whose largest output is their label; None where labels are no classes."""
        return self._correct / self._answers if self._answers else None

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self._loss / self.samples

    def fields(self) -> dict[str, Any]:
        """Return accuracy, loss and metrics as an event has them; nothing where there was nothing to score."""
        if not self.samples:
            return {}
        metrics = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {**accuracy, "loss": self.loss, **({"metrics": metrics} if metrics else {})}
