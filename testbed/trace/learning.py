"""Metrics of learning: losses, accuracy, and whether training has diverged."""

from __future__ import annotations

import math
from typing import Any

from testbed.common import formats
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView


def _last_evaluation(record: RunView) -> dict[str, Any]:
    evaluations = record.of("evaluate")
    return dict(evaluations[-1].fields) if evaluations else {}


def _is_not_finite(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _has_diverged(record: RunView) -> bool | None:
    """Return True if the last training loss or the last test loss is not finite, otherwise None."""
    test_loss = _last_evaluation(record).get("loss")
    training_loss = record.steps[-1].loss if record.steps else None
    if _is_not_finite(test_loss) or _is_not_finite(training_loss):
        return True
    # None instead of False, so that the metric is absent from runs that have not diverged.
    return None


def _describe_divergence(record: RunView) -> str | None:
    """Return device and step, or round, of the first non-finite numbers in a diverged run; None for other runs."""
    if not _has_diverged(record):
        return None
    # `min` returns the first of equal times. So the server's check, which names the device that sent the numbers,
    # precedes a report of the same time.
    divergences = list(record.of("diverged").rows("time", "target", "step"))
    reports = record.events.of("step", "evaluate")
    for time, device, step, loss in reports.rows("time", "device", "step", "loss"):
        if _is_not_finite(loss):
            divergences.append((time, device, step))
    _, device, step = min(divergences, key=lambda divergence: divergence[0])
    unit = "round" if record.of("round") else "step"
    return f"{device}, {unit} {step}"


METRICS = (
    Metric(
        "accuracy",
        "share",
        "of the test data at the last evaluation",
        lambda record: _last_evaluation(record).get("accuracy"),
        brief=True,
        compared=True,
    ),
    Metric(
        "test_loss",
        "number",
        "on the test data, at the last evaluation",
        lambda record: _last_evaluation(record).get("loss"),
        compared=True,
    ),
    Metric(
        "metrics.<metric>",
        "number",
        "metrics of `training.metrics`, of the test data at the last evaluation",
        lambda record: _last_evaluation(record).get("metrics"),
        compared=True,
    ),
    Metric(
        "diverged",
        "bool",
        "whether the training loss or the test loss is not finite at the end",
        _has_diverged,
    ),
    Metric(
        "divergence",
        "text",
        "device and step, or round, of the first loss that is not finite",
        _describe_divergence,
    ),
    Metric(
        "loss",
        "number",
        "training loss of the last step",
        lambda record: record.steps[-1].loss if record.steps else None,
        brief=True,
        compared=True,
    ),
    Metric(
        "loss_first",
        "number",
        "training loss of the first step",
        lambda record: record.steps[0].loss if record.steps else None,
    ),
)


def _describe_metrics(metrics: Metrics) -> str:
    values = metrics["metrics"].items()
    return ", ".join(f"{name} {formats.number(value)}" for name, value in values)


ROWS = (
    Row("Accuracy", "{accuracy}", "on the test data"),
    Row(
        "Metrics",
        _describe_metrics,
        "on the test data",
        when=lambda metrics: metrics.get("metrics"),
    ),
    Row(
        "Diverged",
        "{divergence}",
        "the loss is not a finite number: try a smaller learning_rate",
    ),
    Row("Loss", "{loss}", "at first {loss_first}"),
)
