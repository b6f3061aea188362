"""Accuracy and loss over outputs that come in piece by piece."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def loss_fields(loss: float) -> dict[str, float]:
    """Return the fields of an event for a loss; none for nan, the loss of what was not computed."""
    return {} if math.isnan(loss) else {"loss": loss}


class Score:
    """Adds up correct answers and cross-entropy."""

    def __init__(self) -> None:
        self.samples = 0
        self._correct = 0
        self._loss = 0.0

    def add(self, outputs: torch.Tensor, labels: npt.NDArray[np.int64]) -> None:
        """Count outputs of shape (samples, classes); those without numbers leave nothing to score."""
        import torch

        if outputs.is_meta:
            return
        wanted = torch.from_numpy(labels)
        self.samples += len(labels)
        self._correct += int((outputs.argmax(dim=1) == wanted).sum())
        self._loss += float(torch.nn.functional.cross_entropy(outputs, wanted, reduction="sum"))

    @property
    def accuracy(self) -> float:
        """Fraction of samples whose largest output is their label."""
        return self._correct / self.samples

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self._loss / self.samples

    def fields(self) -> dict[str, float]:
        """Return accuracy and loss as an event has them; nothing where there was nothing to score."""
        return {"accuracy": self.accuracy, "loss": self.loss} if self.samples else {}
