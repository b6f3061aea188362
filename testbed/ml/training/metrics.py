"""Evaluation metrics beside accuracy and loss: classes of torchmetrics by name, or functions in a user's file.

Losses and metrics of torch expect outputs in different layouts; `aligned` converts the outputs of a model.
"""

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
"""Key of metrics in the workload, for errors."""


class Metric(Protocol):
    """A value over outputs and labels added batch by batch; the interface of torchmetrics."""

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add outputs, (samples, ...), and labels, (samples, ...)."""

    def compute(self) -> Any:
        """Return the value over all added outputs."""


class _FunctionMetric:
    """A metric by a function of a user's file, which is called once with all outputs and all labels."""

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
    """Return outputs, (samples, ...), in the layout expected by torch's losses for labels, (samples, ...).

    With labels of classes, which are integers, classes of tokens, (samples, length, classes), move to the second axis.
    With other labels, a single number per sample, (samples, 1), loses its last axis if the labels lack this axis.

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
    """Return a new metric; raises `InputError` if the name is unknown, or if torchmetrics is not installed.

    ``classes`` is the number of the model's outputs. Unless the part has an option ``task``, the name of the ``loss``
    decides whether a sample has one class or several labels.
    """
    if part.file is not None:
        # The module and the base class are unused for a part with a file.
        function = named.find_definition(part, codes, KEY, inspect, object)
        return _FunctionMetric(function, part.options())
    torchmetrics = require_extra(
        "torchmetrics", "metrics", f"the metric '{part.name}'", KEY
    )
    factory = named.find_definition(
        part, codes, KEY, torchmetrics, torchmetrics.Metric, suffix="Score"
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
        # torchmetrics rejects num_classes together with num_labels.
        options.pop("num_classes", None)
    metric: Metric = named.call_definition(factory, part, KEY, **options)
    return metric


def _task_of(loss: str, classes: int) -> str:
    """Return torchmetrics' ``task`` for the name of a loss and the number of the model's outputs."""
    # Losses with these names compare each output with a label of its own, 0 or 1.
    if not loss.lower().startswith(("bce", "multi-label", "multilabel")):
        return "multiclass"
    return "multilabel" if classes > 1 else "binary"


def update_metric(
    metric: Metric,
    name: str,
    outputs: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Add outputs and labels, both (samples, ...), to a metric; raises `InputError` if rejected by the metric.

    ``name`` is the metric's name in the scenario. Outputs are passed as `aligned` returns them, except to functions of
    the user and to the perplexity, which expects the classes of tokens on the last axis. Binary labels, which are
    numbers for the loss, become integers.
    """
    class_name = type(metric).__name__
    is_binary = class_name.startswith(("Multilabel", "Binary"))
    has_user_function = isinstance(metric, _FunctionMetric)
    try:
        if not has_user_function and not class_name.endswith("Perplexity"):
            # The outputs of a binary metric correspond to labels one by one, as they do for labels that are numbers.
            layout_labels = labels.float() if is_binary else labels
            outputs = aligned(outputs, layout_labels)
        if is_binary:
            labels = labels.long()
        metric.update(outputs, labels)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"'{name}' does not take outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)}: {error}"
        raise InputError(text, KEY) from error
