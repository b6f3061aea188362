"""How well the model learned."""

from __future__ import annotations

import math
from typing import Any

from testbed.common import formats
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView


def _last_evaluation(record: RunView) -> dict[str, Any]:
    evaluations = record.of("evaluate")
    return dict(evaluations[-1].fields) if evaluations else {}


def _is_lost(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _has_diverged(record: RunView) -> bool | None:
    """Return True where the last training loss or test loss is not a finite number, None elsewhere."""
    last = [
        _last_evaluation(record).get("loss"),
        record.steps[-1].loss if record.steps else None,
    ]
    return True if any(map(_is_lost, last)) else None


def _describe_divergence(record: RunView) -> str | None:
    """Return device and time of the first non-finite numbers in a diverged run."""
    if not _has_diverged(record):
        return None
    lost = list(record.of("diverged").rows("time", "target", "step"))
    reported = record.events.of("step", "evaluate").rows(
        "time", "device", "step", "loss"
    )
    lost += [
        (time, device, step) for time, device, step, loss in reported if _is_lost(loss)
    ]
    _, device, step = min(lost, key=lambda each: each[0])
    return f"{device}, {'round' if record.of('round') else 'step'} {step}"


FIGURES = (
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
    return ", ".join(
        f"{name} {formats.number(value)}" for name, value in metrics["metrics"].items()
    )


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
