"""Decisions after evaluations: early stopping, and the choice of the final weights.

An evaluation has the values accuracy, test_loss and metrics.NAME. One of them is watched: a better value resets the
count of evaluations without improvement, and its weights may become the final ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testbed.ml.lazy import torch
from testbed.ml.training.config import TrainingConfig

State = Mapping[str, "torch.Tensor"]


class Stopping:
    """Processes consecutive evaluations on the evaluating device.

    >>> from testbed.ml.training.schema import TrainingPart
    >>> stopping = Stopping(TrainingConfig(TrainingPart(patience=1)))
    >>> stopping.judge(10, {"loss": 0.5}, weights=dict)
    >>> stopping.judge(20, {"loss": 0.6}, weights=dict)
    >>> stopping.reason
    '1 evaluations in a row were no better'
    """

    def __init__(self, training: TrainingConfig) -> None:
        part = training.part
        self.reason = ""
        """Reason for the end of training; empty while training continues."""
        self._watched = part.best or "test_loss"
        self._is_lower_better = self._watched == "test_loss"
        if self._watched.startswith("metrics."):
            metric = training.metrics()[self._watched.removeprefix("metrics.")]
            # torchmetrics leaves this None where neither is better; functions of a file have no such attribute.
            higher_is_better = getattr(metric, "higher_is_better", True)
            self._is_lower_better = higher_is_better is False
        self._until = part.conditions()
        self._patience = part.patience
        self._keeps_best = part.best is not None
        self._best: tuple[float, State | None] | None = None
        """Rank of the best value so far, and the weights of its evaluation if kept."""
        self._worse = 0
        """Number of consecutive evaluations without improvement."""
        self._judged = -1
        """The last step with an evaluation."""

    def judge(
        self,
        step: int,
        fields: Mapping[str, Any],
        weights: Callable[[], State],
    ) -> None:
        """Process an evaluation, once for each step; ``weights`` returns the evaluated weights."""
        # After a restart, steps are evaluated again.
        if step <= self._judged:
            return
        self._judged = step
        values = {"accuracy": fields.get("accuracy"), "test_loss": fields.get("loss")}
        for name, value in fields.get("metrics", {}).items():
            values[f"metrics.{name}"] = value
        watched = values[self._watched]
        # A run without classes has no accuracy, for example.
        if watched is not None:
            self._compare_value(watched, weights)
        if self._until and self._meets_conditions(values):
            self.reason = "what `until` asks for holds"
        elif self._patience is not None and self._worse >= self._patience:
            self.reason = f"{self._worse} evaluations in a row were no better"

    def _meets_conditions(self, values: Mapping[str, Any]) -> bool:
        """Return whether an evaluation meets all conditions of `until`."""
        return all(
            condition.holds(values[name]) for name, condition in self._until.items()
        )

    def _compare_value(self, value: float, weights: Callable[[], State]) -> None:
        """Record the best value so far, with its weights if requested."""
        # A higher rank is better, whatever the value measures.
        rank = -value if self._is_lower_better else value
        if self._best is not None:
            best_rank, _ = self._best
            if rank <= best_rank:
                self._worse += 1
                return
        self._worse = 0
        self._best = (rank, weights() if self._keeps_best else None)

    def result(self, newest: State) -> State:
        """Return the final weights: the best ones if kept, else the newest."""
        if self._best is None:
            return newest
        _, best_weights = self._best
        return newest if best_weights is None else best_weights
