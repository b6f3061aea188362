"""Decisions after evaluations: early stopping, and the choice of the final weights.

An evaluation has the values accuracy, test_loss and metrics.NAME. One of them is the criterion: evaluations are counted
until it improves again, and the weights with its best value may become the final weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testbed.ml.lazy import torch
from testbed.ml.training.config import TrainingConfig

State = Mapping[str, "torch.Tensor"]
"""Weights and buffers of the model by name."""


class Stopping:
    """The decisions of a run: judges consecutive evaluations by the keys ``until``, ``patience`` and ``best``.

    The ``fields`` of an evaluation are those of its event ``evaluate``.

    >>> from testbed.ml.training.schema import TrainingPart
    >>> stopping = Stopping(TrainingConfig(TrainingPart(patience=1)))
    >>> stopping.judge(10, {"loss": 0.5}, weights=dict)
    >>> stopping.judge(20, {"loss": 0.6}, weights=dict)
    >>> stopping.reason
    '1 evaluations in a row without improvement'
    """

    def __init__(self, training: TrainingConfig) -> None:
        part = training.part
        self.reason = ""
        """Reason for the end of training; empty while training continues."""
        self._criterion = part.best or "test_loss"
        self._is_lower_better = self._criterion == "test_loss"
        if self._criterion.startswith("metrics."):
            metric = training.metrics()[self._criterion.removeprefix("metrics.")]
            # The attribute of torchmetrics is None for metrics without a direction; functions of a file lack it. In
            # both cases higher values are taken to be better.
            higher_is_better = getattr(metric, "higher_is_better", True)
            self._is_lower_better = higher_is_better is False
        self._until = part.conditions()
        self._patience = part.patience
        self._keeps_best = part.best is not None
        self._best: tuple[float, State | None] | None = None
        """Rank of the criterion's best value so far, and the weights of its evaluation if kept."""
        self._without_improvement = 0
        """Number of consecutive evaluations without improvement."""
        self._judged_step = -1
        """The newest step whose evaluation has been judged."""

    def judge(
        self,
        step: int,
        fields: Mapping[str, Any],
        weights: Callable[[], State],
    ) -> None:
        """Update `reason` and the best weights by an evaluation, after ``step``, of the weights from ``weights``."""
        # After a restart, steps are evaluated again, and must not count twice.
        if step <= self._judged_step:
            return
        self._judged_step = step
        values = {"accuracy": fields.get("accuracy"), "test_loss": fields.get("loss")}
        for name, value in fields.get("metrics", {}).items():
            values[f"metrics.{name}"] = value
        criterion = values[self._criterion]
        # None, for example, is the accuracy of a run without classes.
        if criterion is not None:
            self._compare_value(criterion, weights)
        count = self._without_improvement
        if self._until and self._meets_conditions(values):
            self.reason = "all conditions of `until` are met"
        elif self._patience is not None and count >= self._patience:
            self.reason = f"{count} evaluations in a row without improvement"

    def _meets_conditions(self, values: Mapping[str, Any]) -> bool:
        """Return whether an evaluation meets all conditions of `until`."""
        return all(
            condition.holds(values[name]) for name, condition in self._until.items()
        )

    def _compare_value(self, value: float, weights: Callable[[], State]) -> None:
        """Compare the criterion's value with the best value so far, which a better value replaces."""
        # Ranks are values with a sign such that higher is better.
        rank = -value if self._is_lower_better else value
        if self._best is not None:
            best_rank, _ = self._best
            if rank <= best_rank:
                self._without_improvement += 1
                return
        self._without_improvement = 0
        self._best = (rank, weights() if self._keeps_best else None)

    def result(self, newest: State) -> State:
        """Return the final weights: the weights of the best evaluation if ``best`` is set, otherwise ``newest``."""
        if self._best is None:
            return newest
        _, best_weights = self._best
        return newest if best_weights is None else best_weights
