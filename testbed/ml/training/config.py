"""The training configuration with all names resolved in torch or in the user's files.

Plain descent and cross-entropy need no torch for planning. Other names are looked up in torch, and their state and
computation per weight are measured on a small weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from testbed.common.usercode import Code
from testbed.ml.lazy import torch
from testbed.ml.training import named
from testbed.ml.training.metrics import Metric, aligned, make_metric
from testbed.ml.training.optimizers import (
    AVERAGE,
    MOMENTUM,
    Kept,
    Measured,
    Optimizer,
    Sgd,
    TorchOptimizer,
    measure_optimizer,
)
from testbed.ml.training.schedules import Schedule
from testbed.ml.training.schema import TrainingPart

_OPTIMIZER = ("training", "optimizer")
_LOSS = ("training", "loss")
_WITHOUT = ("LBFGS", "SparseAdam", "Muon")
"""Optimizers that need a closure, sparse gradients, or matrices alone."""
_PROBE = (64, 64)
"""Shape of the weight for measuring an optimizer's state and computation."""
_MEASURED: dict[tuple[str, str, tuple[int, ...]], Measured] = {}
"""Measurements by the optimizer as JSON, the module of its file, and the shape of a weight."""


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of training: optimizer, schedule, loss, metrics and clipping. `check` reports errors."""

    part: TrainingPart = field(default_factory=TrainingPart)
    codes: Mapping[str, Code] = field(default_factory=dict)
    """The text of the user's files, by `NamedPart.title`."""
    steps: int | None = None
    """Training steps of the workload; None if unknown."""
    classes: int = 0
    """Outputs of the model for a sample, or for each token of a sample."""
    frozen_travels: bool = False
    """Whether messages and checkpoints carry weights that are not trained."""

    def check(self) -> None:
        """Resolve all names; raises `InputError` with the key in the workload."""
        # Each of these resolves the names of one part: optimizer, loss, schedule and metrics.
        _ = self.update_flops
        _ = self._loss_function
        _ = self.settings(0)
        _ = self.metrics()

    def optimizer(self) -> Optimizer:
        """Return a new optimizer without parameters."""
        if self.part.optimizer.is_plain:
            return Sgd(self.part.optimizer)
        return TorchOptimizer(self._make_optimizer)

    def settings(self, step: int) -> Mapping[str, Any]:
        """Return the schedule's settings of a step, counted from 0, such as ``lr``; empty without a schedule."""
        schedule = self._schedule
        return {} if schedule is None else schedule.settings_at(step)

    def kept_shapes(self, shape: tuple[int, ...]) -> Kept:
        """Return shape and type of the tensors kept beside a weight of ``shape``: optimizer state, moving average.

        Keys are kinds with a colon, such as ``momentum:``.

        >>> TrainingConfig(TrainingPart(ema=0.99)).kept_shapes((10, 4))
        {'average:': ((10, 4), torch.float32)}
        """
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if not self.part.optimizer.is_plain:
            shapes |= self._measure_optimizer(shape).kept
        elif self.part.optimizer.momentum:
            shapes[MOMENTUM] = (shape, torch.float32)
        if self.part.ema:
            shapes[AVERAGE] = (shape, torch.float32)
        return shapes

    @cached_property
    def state_values(self) -> float:
        """Additional values per trained value: 1 with momentum, 2 with Adam, and 1 for an average.

        >>> TrainingConfig(TrainingPart(ema=0.99)).state_values
        1
        """
        optimizer = self.part.optimizer
        values: float = 1 if optimizer.momentum else 0
        if not optimizer.is_plain:
            values = self._measure_optimizer(_PROBE).values
        if self.part.ema is not None:
            values += 1
        return values

    @cached_property
    def update_flops(self) -> float:
        """Cost of an optimizer step per parameter.

        2 FLOPs for the step itself, 2 more with momentum, weight decay, clipping and a moving average, each; optimizers
        other than SGD cost 2 for each operation on all values.

        >>> TrainingConfig(TrainingPart(ema=0.99)).update_flops
        4.0
        """
        optimizer = self.part.optimizer
        if not optimizer.is_plain:
            flops = self._measure_optimizer(_PROBE).flops
        else:
            flops = 2.0
            if optimizer.momentum:
                flops += 2.0
            if optimizer.weight_decay:
                flops += 2.0
        if self.part.clip is not None:
            flops += 2.0
        if self.part.ema is not None:
            flops += 2.0
        return flops

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics by their names in the scenario."""
        metrics = {}
        for name, part in self.part.metrics.items():
            metrics[name] = make_metric(
                part, self.codes, self.part.loss.name, self.classes
            )
        return metrics

    def weight(self, labels: torch.Tensor) -> float:
        """Return the weight of labels, (samples, ...), in a batch's mean loss, in samples.

        A loss ignoring labels divides by the counted ones, and a loss with class weights by their sum.

        >>> TrainingConfig().weight(torch.tensor([[3, 1], [2, -100]]))
        1.5
        """
        samples = len(labels)
        criterion = self._loss_function
        # Labels without values, in timing-only runs, and numbers: none of them is ignored.
        if labels.is_meta or labels.is_floating_point():
            return samples
        # Its labels are sequences of different lengths, and its mean is that of the samples.
        if isinstance(criterion, torch.nn.CTCLoss):
            return samples
        counted: torch.Tensor = labels != _ignored_label(criterion)
        classes = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
        if isinstance(criterion, classes) and criterion.weight is not None:
            # Ignored labels have no class weight: 0 stands in for them, and is multiplied by 0.
            counted = criterion.weight[labels.where(counted, 0)] * counted
        share = float(counted.sum()) / labels.numel()
        return samples * share

    def loss(
        self,
        outputs: torch.Tensor,
        labels: torch.Tensor,
        whole: float | None,
    ) -> torch.Tensor:
        """Return these samples' part of the mean loss of a batch, without axes; arguments are (samples, ...).

        ``whole`` is the `weight` of all labels of the batch; None if these are all, with at least one of them counting.

        >>> outputs, labels = torch.zeros(2, 4), torch.tensor([0, 3])
        >>> TrainingConfig().loss(outputs, labels, whole=4.0)
        tensor(0.6931)
        """
        weight = None if whole is None else self.weight(labels)
        if weight == 0:
            # The mean of no labels would be NaN, and so would its gradients. Zero depends on the outputs, so that the
            # backward pass reaches all weights.
            return (outputs * 0.0).sum()
        criterion = self._loss_function
        if criterion is None and labels.ndim == 1:
            return _mean_cross_entropy(aligned(outputs, labels), labels, whole)
        value = _call_loss(criterion, outputs, labels)
        # A sum is no mean that would have to be weighted.
        is_sum = getattr(criterion, "reduction", "mean") == "sum"
        if weight is None or weight == whole or is_sum:
            return value
        assert whole is not None
        return value * (weight / whole)

    def count_correct(
        self, outputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[int, int]:
        """Return the number of correct answers and of all answers: samples, (samples, ...), or their tokens.

        >>> outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> TrainingConfig().count_correct(outputs, torch.tensor([1, 1]))
        (1, 2)
        """
        criterion = self._loss_function
        if isinstance(criterion, torch.nn.CTCLoss):
            return count_decoded(criterion.blank, outputs, labels), len(labels)
        # Ignored labels are negative.
        is_counted = labels >= 0
        # Classes are the second axis.
        answers = aligned(outputs, labels).argmax(dim=1)
        is_correct = (answers == labels) & is_counted
        return int(is_correct.sum()), int(is_counted.sum())

    def clip_gradients(
        self, gradients: Mapping[str, torch.Tensor], norms: torch.Tensor | None
    ) -> None:
        """Clip gradients in place; ``norms`` are the norms of the whole model, (tensors,), None for these gradients."""
        clip = self.part.clip
        if clip is None or not gradients:
            return
        if clip.value is not None:
            for gradient in gradients.values():
                gradient.clamp_(-clip.value, clip.value)
            return
        assert clip.norm is not None
        if norms is None:
            norms = self.norms(list(gradients.values()))
        total = torch.linalg.vector_norm(norms)
        # 1e-6 and the bound of 1 are those of torch's ``clip_grad_norm_``.
        scale = torch.clamp(clip.norm / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(scale)

    @staticmethod
    def norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of each gradient, (tensors,), as torch's ``clip_grad_norm_`` does."""
        # A stage may hold nothing that is trained.
        if not gradients:
            return torch.zeros(0)
        return torch.stack([torch.linalg.vector_norm(each) for each in gradients])

    @cached_property
    def _loss_function(self) -> Any:
        """The loss as a function of outputs and labels; None for plain cross-entropy."""
        part = self.part.loss
        if part.is_plain:
            return None
        factory = named.find_definition(
            part, self.codes, _LOSS, torch.nn, torch.nn.Module, "Loss"
        )
        if part.file is not None and not isinstance(factory, type):
            return partial(factory, **part.options())
        options = {}
        for name, value in part.options().items():
            if isinstance(value, tuple):
                # Class weights, for example, which torch wants as a tensor.
                value = torch.tensor(value)
            options[name] = value
        return named.call_definition(factory, part, _LOSS, **options)

    def _make_optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return a new optimizer of torch or of a file; raises `InputError` for unknown names and options."""
        part = self.part.optimizer
        factory = named.find_definition(
            part,
            self.codes,
            _OPTIMIZER,
            torch.optim,
            torch.optim.Optimizer,
            without=_WITHOUT,
        )
        made: torch.optim.Optimizer = named.call_definition(
            factory, part, _OPTIMIZER, parameters, **part.arguments()
        )
        return made

    def _measure_optimizer(self, shape: tuple[int, ...]) -> Measured:
        """Return the state and the operations of the optimizer for a weight of a shape."""
        part = self.part.optimizer
        # A file that was edited is another module.
        module = self.codes[part.title].module if part.file is not None else ""
        # Cached outside of this object, since a sweep makes one for each of its runs.
        key = (part.model_dump_json(), module, shape)
        if key not in _MEASURED:
            optimizer = TorchOptimizer(self._make_optimizer)
            _MEASURED[key] = measure_optimizer(optimizer, shape)
        return _MEASURED[key]

    @cached_property
    def _schedule(self) -> Schedule | None:
        parts = self.part.schedules
        if not parts:
            return None
        return Schedule(parts, self.codes, self.steps, self._make_optimizer)


def _call_loss(
    criterion: Any, outputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return a loss of outputs and labels, (samples, ...) both, in the layout expected by torch's losses.

    ``criterion`` is None for plain cross-entropy.
    """
    if isinstance(criterion, torch.nn.CTCLoss):
        return temporal_loss(criterion, outputs, labels)
    if criterion is None:
        criterion = torch.nn.functional.cross_entropy
    value: torch.Tensor = criterion(aligned(outputs, labels), labels)
    return value


def _ignored_label(criterion: Any) -> int:
    """Return the label ignored by a loss, by default torch's."""
    if isinstance(criterion, partial):
        # A function of a file with its options.
        if "ignore_index" in criterion.keywords:
            return int(criterion.keywords["ignore_index"])
        criterion = criterion.func
    return int(getattr(criterion, "ignore_index", -100))


def _mean_cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, whole: float | None
) -> torch.Tensor:
    """Return the sum of the losses of classes over ``whole``, which is None for the number of counted labels.

    One division: to weight the mean of the part would round twice.
    """
    total = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
    if whole is None:
        return total / (labels != _ignored_label(None)).sum()
    return total / whole


def temporal_loss(
    criterion: torch.nn.CTCLoss, outputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss of outputs, (samples, length, classes), for labels, (samples, most labels).

    Shorter sequences of labels are padded with negative values.
    """
    # torch wants the time steps first.
    log_probabilities = outputs.log_softmax(-1).movedim(1, 0)
    samples = len(outputs)
    length = outputs.shape[1]
    steps = torch.full((samples,), length, dtype=torch.int64)
    lengths = (labels >= 0).sum(1)
    value: torch.Tensor = criterion(
        log_probabilities, labels.clamp(min=0), steps, lengths
    )
    return value


def count_decoded(blank: int, outputs: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the number of samples decoded exactly as labelled, by the most probable class; shapes as for the loss."""
    correct = 0
    for classes, wanted in zip(outputs.argmax(-1), labels, strict=True):
        # A label that lasts for several time steps is read once; blanks separate equal labels.
        decoded = classes.unique_consecutive()
        decoded = decoded[decoded != blank]
        if decoded.tolist() == wanted[wanted >= 0].tolist():
            correct += 1
    return correct
