"""Decisions after evaluations: early stopping, and the choice of the final weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testbed.ml.lazy import torch
from testbed.ml.training.config import TrainingConfig

State = Mapping[str, "torch.Tensor"]


class Stopping:
    """Processes consecutive evaluations on the evaluating device."""

    def __init__(self, training: TrainingConfig) -> None:
        part = training.part
        self.reason = ""
        """Reason for the end of training; empty while training continues."""
        self._watched = part.best or "test_loss"
        self._lower = self._watched == "test_loss"
        if self._watched.startswith("metrics."):
            metric = training.metrics()[self._watched.removeprefix("metrics.")]
            self._lower = getattr(metric, "higher_is_better", True) is False
        self._until = part.conditions()
        self._patience = part.patience
        self._keeps = part.best is not None
        self._best: tuple[float, State | None] | None = None
        self._worse = 0
        """Number of consecutive evaluations without improvement."""
        self._judged = -1

    def judge(
        self, step: int, fields: Mapping[str, Any], weights: Callable[[], State]
    ) -> None:
        """Process an evaluation, once for each step; ``weights`` returns the evaluated weights."""
        if step <= self._judged:
            return
        self._judged = step
        figures = {"accuracy": fields.get("accuracy"), "test_loss": fields.get("loss")}
        figures |= {
            f"metrics.{name}": value
            for name, value in fields.get("metrics", {}).items()
        }
        value = figures[self._watched]
        if value is not None:
            self._compare_value(value, weights)
        if self._until and all(
            condition.holds(figures[name]) for name, condition in self._until.items()
        ):
            self.reason = "what `until` asks for holds"
        elif self._patience is not None and self._worse >= self._patience:
            self.reason = f"{self._worse} evaluations in a row were no better"

    def _compare_value(self, value: float, weights: Callable[[], State]) -> None:
        """Record the best value so far, with its weights if requested."""
        rank = -value if self._lower else value
        if self._best is not None and rank <= self._best[0]:
            self._worse += 1
            return
        self._worse = 0
        self._best = (rank, weights() if self._keeps else None)

    def result(self, newest: State) -> State:
        """Return the final weights: the best ones if kept, else the newest."""
        return newest if self._best is None or self._best[1] is None else self._best[1]
