"""Connectionist temporal classification (Graves et al., 2006): labels are shorter than outputs, and say not where."""

from __future__ import annotations

from testbed.common.lazy import torch


def temporal_loss(criterion: torch.nn.CTCLoss, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of outputs, (samples, length, classes), for labels, (samples, most labels): below 0 is none."""
    chances = outputs.log_softmax(-1).movedim(1, 0)
    steps = torch.full((len(outputs),), outputs.shape[1], dtype=torch.int64)
    found: torch.Tensor = criterion(chances, labels.clamp(min=0), steps, (labels >= 0).sum(1))
    return found


def read_right(blank: int, outputs: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many samples are read as labelled, the most probable class at each place; shapes as for the loss."""
    right = 0
    for likely, wanted in zip(outputs.argmax(-1), labels, strict=True):
        read = likely.unique_consecutive()
        right += read[read != blank].tolist() == wanted[wanted >= 0].tolist()
    return right
