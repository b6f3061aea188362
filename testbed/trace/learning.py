"""How well the model learned."""

from __future__ import annotations

import math
from typing import Any

from testbed.common import formats
from testbed.trace.figures import Figure, Metrics, Row
from testbed.trace.record import Record


def _last_evaluation(record: Record) -> dict[str, Any]:
    evaluations = record.of("evaluate")
    return dict(evaluations[-1].fields) if evaluations else {}


def _diverged(record: Record) -> bool | None:
    """Return True where the last test loss is infinite or no number, None elsewhere."""
    return None if math.isfinite(_last_evaluation(record).get("loss") or 0.0) else True


FIGURES = (
    Figure(
        "accuracy",
        "share",
        "of the test data, at the last evaluation",
        lambda record: _last_evaluation(record).get("accuracy"),
        brief=True,
        compared=True,
    ),
    Figure(
        "test_loss",
        "number",
        "on the test data, at the last evaluation",
        lambda record: _last_evaluation(record).get("loss"),
        compared=True,
    ),
    Figure(
        "metrics.<metric>",
        "number",
        "what `training.metrics` names, of the test data, at the last evaluation",
        lambda record: _last_evaluation(record).get("metrics"),
        compared=True,
    ),
    Figure("diverged", "bool", "the test loss is infinite or no number at the end", _diverged),
    Figure(
        "loss",
        "number",
        "training loss of the last step",
        lambda record: record.steps[-1].loss if record.steps else None,
        brief=True,
        compared=True,
    ),
    Figure(
        "loss_first",
        "number",
        "training loss of the first step",
        lambda record: record.steps[0].loss if record.steps else None,
    ),
)


def _metrics(metrics: Metrics) -> str:
    return ", ".join(f"{name} {formats.number(value)}" for name, value in metrics["metrics"].items())


ROWS = (
    Row("Accuracy", "{accuracy}", "on the test data"),
    Row("Metrics", _metrics, "on the test data", when=lambda metrics: metrics.get("metrics")),
    Row("Diverged", "{diverged}", "the loss is no number any more: try a smaller learning_rate"),
    Row("Loss", "{loss}", "at first {loss_first}"),
)
