"""Metrics of outputs beside the loss: metrics of torchmetrics by name, or functions in a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from testbed.common.errors import InputError
from testbed.common.lazy import require_extra
from testbed.common.usercode import Code
from testbed.ml.lazy import torch
from testbed.ml.training import named
from testbed.ml.training.schema import MetricPart

KEY = ("training", "metrics")


class Metric(Protocol):
    """Accumulates outputs and labels piece by piece, like torchmetrics."""

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add outputs, (samples, ...), and labels, (samples, ...)."""

    def compute(self) -> Any:
        """Return the value over all added outputs."""


class _FunctionMetric:
    """A metric by a function of a file, which is called with all outputs and labels together."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = options
        self._outputs: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._outputs.append(outputs)
        self._labels.append(labels)

    def compute(self) -> Any:
        outputs = torch.cat(self._outputs)
        labels = torch.cat(self._labels)
        return self._function(outputs, labels, **self._options)


def aligned(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return outputs in the layout torch's losses want for labels, (samples, ...), integers or others.

    Classes of tokens, (samples, length, classes), move to the second axis. A single number per sample, (samples, 1),
    loses its last axis if the labels lack that axis.

    >>> tokens = torch.zeros(2, 7, dtype=torch.long)
    >>> aligned(torch.zeros(2, 7, 100), tokens).shape
    torch.Size([2, 100, 7])
    """
    if outputs.ndim != labels.ndim + 1:
        return outputs
    if labels.is_floating_point():
        return outputs.squeeze(-1)
    if outputs.ndim == 2:
        # (samples, classes): the classes are the second axis already.
        return outputs
    return outputs.movedim(-1, 1)


def make_metric(
    part: MetricPart,
    codes: Mapping[str, Code],
    loss: str,
    classes: int,
) -> Metric:
    """Return a new metric; raises `InputError` for an unknown one, or without an installed torchmetrics.

    ``classes`` are the model's outputs. Unless the part gives a ``task``, the loss name decides between single classes
    and several labels.
    """
    if part.file is not None:
        # The module and the base class serve names of a library alone.
        function = named.find_definition(part, codes, KEY, inspect, object)
        return _FunctionMetric(function, part.options())
    torchmetrics = require_extra(
        "torchmetrics", "metrics", f"the metric '{part.name}'", KEY
    )
    factory = named.find_definition(
        part, codes, KEY, torchmetrics, torchmetrics.Metric, "Score"
    )
    defaults = {
        "task": _task_of(loss, classes),
        "num_classes": classes,
        "num_labels": classes,
    }
    accepted = inspect.signature(factory).parameters
    options = {}
    for key, value in defaults.items():
        if key in accepted:
            options[key] = value
    options |= part.options()
    if options.get("task") == "multilabel":
        # torchmetrics rejects both numbers together.
        options.pop("num_classes", None)
    made: Metric = named.call_definition(factory, part, KEY, **options)
    return made


def _task_of(loss: str, classes: int) -> str:
    """Return the task of torchmetrics for a loss: binary losses take several labels for each sample."""
    if not loss.lower().startswith(("bce", "multi-label", "multilabel")):
        return "multiclass"
    return "multilabel" if classes > 1 else "binary"


def update_metric(
    metric: Metric,
    name: str,
    outputs: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Add outputs and labels, both (samples, ...), to a metric; raises `InputError` if the metric rejects them.

    Token classes stay last for the perplexity, which expects this layout, and come second for all others; binary labels
    of several classes become integers.
    """
    kind = type(metric).__name__
    is_binary = kind.startswith(("Multilabel", "Binary"))
    keeps_layout = isinstance(metric, _FunctionMetric) or kind.endswith("Perplexity")
    try:
        if not keeps_layout:
            # Each label of a binary metric has a value of its own, as if the labels were numbers.
            layout_labels = labels.float() if is_binary else labels
            outputs = aligned(outputs, layout_labels)
        if is_binary:
            labels = labels.long()
        metric.update(outputs, labels)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"'{name}' does not take outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)}: {error}"
        raise InputError(text, KEY) from error
