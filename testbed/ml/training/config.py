"""The configuration of training as planners and programs use it, with all names resolved in torch or a user's file.

A scenario names an optimizer, a loss, schedules and metrics; `TrainingConfig` creates the objects with these names, and
reports the state and the computation of the optimizer for each weight. Planning with plain SGD and cross-entropy needs
no torch. Other optimizers are looked up in torch, and their state and computation are measured on a small weight.
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
    Optimizer,
    OptimizerMeasurement,
    Sgd,
    StateShapes,
    TorchOptimizer,
    measure_optimizer,
)
from testbed.ml.training.schedules import Schedule
from testbed.ml.training.schema import TrainingPart

_OPTIMIZER_KEY = ("training", "optimizer")
_LOSS_KEY = ("training", "loss")
_UNSUPPORTED = ("LBFGS", "SparseAdam", "Muon")
"""Optimizers of torch that need, in this order, a closure, sparse gradients, and matrices as the only parameters."""
_PROBE_SHAPE = (64, 64)
"""Shape of the weight for measuring an optimizer's state and computation: large compared to single counters."""
_MEASUREMENTS: dict[tuple[str, str, tuple[int, ...]], OptimizerMeasurement] = {}
"""Measurements by the optimizer's part as JSON, the module of its file, and the shape of a weight."""


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of training: optimizer, schedule, loss, metrics and clipping.

    Names are resolved when they are first needed; `check` resolves all of them to report errors early.
    """

    part: TrainingPart = field(default_factory=TrainingPart)
    """The keys of the scenario."""
    codes: Mapping[str, Code] = field(default_factory=dict)
    """The text of the user's files, by `NamedPart.title`."""
    steps: int | None = None
    """Training steps of the workload; None if unknown."""
    classes: int = 0
    """Number of outputs of the model for a sample, or for each token of a sample."""
    frozen_travels: bool = False
    """Whether messages and checkpoints include weights that are not trained."""

    def check(self) -> None:
        """Resolve all names; raises `InputError` naming the wrong key of the workload."""
        # Each statement resolves the names of one part: optimizer, loss, schedule and metrics.
        _ = self.update_flops
        _ = self._loss_function
        _ = self.settings(0)
        _ = self.metrics()

    def optimizer(self) -> Optimizer:
        """Return a new optimizer, which receives the parameters in each step."""
        if self.part.optimizer.is_plain:
            return Sgd(self.part.optimizer)
        return TorchOptimizer(self._make_optimizer)

    def settings(self, step: int) -> Mapping[str, Any]:
        """Return the optimizer's settings in a step, counted from 0, such as ``lr``; empty without a schedule."""
        schedule = self._schedule
        return {} if schedule is None else schedule.settings_at(step)

    def state_shapes(self, shape: tuple[int, ...]) -> StateShapes:
        """Return shape and type of the tensors added by training to a weight of ``shape``: optimizer state, average.

        >>> TrainingConfig(TrainingPart(ema=0.99)).state_shapes((10, 4))
        {'average:': ((10, 4), torch.float32)}
        """
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if not self.part.optimizer.is_plain:
            shapes |= self._measure_optimizer(shape).state_shapes
        elif self.part.optimizer.momentum:
            shapes[MOMENTUM] = (shape, torch.float32)
        if self.part.ema:
            shapes[AVERAGE] = (shape, torch.float32)
        return shapes

    @cached_property
    def state_values(self) -> float:
        """State values for each trained value: 1 with momentum, 2 with Adam; 1 more with a moving average of weights.

        >>> TrainingConfig(TrainingPart(ema=0.99)).state_values
        1
        """
        optimizer = self.part.optimizer
        values: float = 1 if optimizer.momentum else 0
        if not optimizer.is_plain:
            values = self._measure_optimizer(_PROBE_SHAPE).values
        if self.part.ema is not None:
            values += 1
        return values

    @cached_property
    def update_flops(self) -> float:
        """FLOPs of an optimizer step for each trained value.

        A step of SGD has 2, and each of momentum and weight decay adds 2. Other optimizers have 2 for each of their
        operations on all values. Clipping and a moving average add 2 each.

        >>> TrainingConfig(TrainingPart(ema=0.99)).update_flops
        4.0
        """
        optimizer = self.part.optimizer
        if not optimizer.is_plain:
            flops = self._measure_optimizer(_PROBE_SHAPE).flops
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
        """Return the weight of labels, (samples, ...), in the mean loss of a batch, as a number of samples.

        Without ignored labels and class weights this is the number of samples. A sample with two tokens, one of them
        ignored, has a weight of one half. With class weights, each label counts by the weight of its class.

        >>> TrainingConfig().weight(torch.tensor([[3, 1], [2, -100]]))
        1.5
        """
        samples = len(labels)
        criterion = self._loss_function
        # Only labels of classes can be ignored: neither numbers, nor the labels of timing-only runs.
        if labels.is_meta or labels.is_floating_point():
            return samples
        # The CTC loss divides by the length of each label sequence first, so all samples count equally.
        if isinstance(criterion, torch.nn.CTCLoss):
            return samples
        is_counted = labels != _ignored_label(criterion)
        label_weights = is_counted
        weighted_losses = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
        if isinstance(criterion, weighted_losses) and criterion.weight is not None:
            # An ignored label is no index of a class weight: class 0 replaces it, and its weight is multiplied by 0.
            classes = labels.where(is_counted, 0)
            label_weights = criterion.weight[classes] * is_counted
        mean_weight = float(label_weights.sum()) / labels.numel()
        return samples * mean_weight

    def loss(
        self,
        outputs: torch.Tensor,
        labels: torch.Tensor,
        total_weight: float | None,
    ) -> torch.Tensor:
        """Return the part of these samples in the mean loss of a batch, without axes; arguments are (samples, ...).

        ``total_weight`` is the `weight` of all labels of the batch; None if these samples are the whole batch, of which
        at least one label must not be ignored.

        >>> outputs, labels = torch.zeros(2, 4), torch.tensor([0, 3])
        >>> TrainingConfig().loss(outputs, labels, total_weight=4.0)
        tensor(0.6931)
        """
        weight = None if total_weight is None else self.weight(labels)
        if weight == 0:
            # The mean over no labels would be NaN, and so would its gradients. This zero depends on the outputs, so
            # that a backward pass gives all weights a gradient of zero.
            return (outputs * 0.0).sum()
        criterion = self._loss_function
        if criterion is None and labels.ndim == 1:
            return _mean_cross_entropy(aligned(outputs, labels), labels, total_weight)
        value = _call_loss(criterion, outputs, labels)
        # Losses with reduction "sum" add up without weights.
        is_sum = getattr(criterion, "reduction", "mean") == "sum"
        if weight is None or weight == total_weight or is_sum:
            return value
        assert total_weight is not None
        return value * (weight / total_weight)

    def count_correct(
        self, outputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[int, int]:
        """Return the number of correct and of all answers in outputs and labels, both (samples, ...).

        An answer is the most probable class of a sample, or of each token of a sample. Ignored labels do not count.

        >>> outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> TrainingConfig().count_correct(outputs, torch.tensor([1, 1]))
        (1, 2)
        """
        criterion = self._loss_function
        if isinstance(criterion, torch.nn.CTCLoss):
            return count_decoded(criterion.blank, outputs, labels), len(labels)
        # Ignored labels are negative.
        is_counted = labels >= 0
        # Aligned outputs have the classes on the second axis.
        answers = aligned(outputs, labels).argmax(dim=1)
        is_correct = (answers == labels) & is_counted
        return int(is_correct.sum()), int(is_counted.sum())

    def clip_gradients(
        self, gradients: Mapping[str, torch.Tensor], norms: torch.Tensor | None
    ) -> None:
        """Clip gradients in place, if the scenario asks for clipping.

        ``norms`` are the gradient norms of the whole model, (tensors,); None if ``gradients`` are the whole model's.
        """
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
        # A stage may have no trained weights, and torch cannot stack an empty list.
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
            part, self.codes, _LOSS_KEY, torch.nn, torch.nn.Module, suffix="Loss"
        )
        if part.file is not None and not isinstance(factory, type):
            # The user's function is the loss itself; a class makes the loss.
            return partial(factory, **part.options())
        options = {}
        for name, value in part.options().items():
            if isinstance(value, tuple):
                # Class weights, for example, which torch wants as a tensor.
                value = torch.tensor(value)
            options[name] = value
        return named.call_definition(factory, part, _LOSS_KEY, **options)

    def _make_optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return a new optimizer of torch or of a file; raises `InputError` for unknown names and options."""
        part = self.part.optimizer
        factory = named.find_definition(
            part,
            self.codes,
            _OPTIMIZER_KEY,
            torch.optim,
            torch.optim.Optimizer,
            unsupported=_UNSUPPORTED,
        )
        optimizer: torch.optim.Optimizer = named.call_definition(
            factory, part, _OPTIMIZER_KEY, parameters, **part.arguments()
        )
        return optimizer

    def _measure_optimizer(self, shape: tuple[int, ...]) -> OptimizerMeasurement:
        """Return the state and the computation of the optimizer for a weight of ``shape``."""
        part = self.part.optimizer
        # The module's name follows from the text of the file, so an edited file is measured again.
        module = self.codes[part.title].module if part.file is not None else ""
        # The cache outlives this object, since a sweep creates a configuration for each of its runs.
        key = (part.model_dump_json(), module, shape)
        if key not in _MEASUREMENTS:
            optimizer = TorchOptimizer(self._make_optimizer)
            _MEASUREMENTS[key] = measure_optimizer(optimizer, shape)
        return _MEASUREMENTS[key]

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
    """Return the label ignored by a loss; torch's default is -100."""
    if isinstance(criterion, partial):
        # A function of a user's file with its options.
        if "ignore_index" in criterion.keywords:
            return int(criterion.keywords["ignore_index"])
        criterion = criterion.func
    return int(getattr(criterion, "ignore_index", -100))


def _mean_cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, total_weight: float | None
) -> torch.Tensor:
    """Return the summed cross-entropy of samples divided by ``total_weight``; None means the samples not ignored."""
    # The sum is divided once; weighting the mean of these samples would round twice.
    total = torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
    if total_weight is None:
        return total / (labels != _ignored_label(None)).sum()
    return total / total_weight


def temporal_loss(
    criterion: torch.nn.CTCLoss, outputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the CTC loss of outputs, (samples, time steps, classes), for labels, (samples, length).

    The length is that of the longest sequence of labels; shorter sequences are padded with negative values.
    """
    # torch expects the time steps on the first axis.
    log_probabilities = outputs.log_softmax(-1).movedim(1, 0)
    samples, time_steps, _ = outputs.shape
    output_lengths = torch.full((samples,), time_steps, dtype=torch.int64)
    label_lengths = (labels >= 0).sum(1)
    value: torch.Tensor = criterion(
        log_probabilities, labels.clamp(min=0), output_lengths, label_lengths
    )
    return value


def count_decoded(blank: int, outputs: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the number of samples whose decoded sequence equals their labels; shapes are as in `temporal_loss`.

    ``blank`` is the class without a label.
    """
    correct = 0
    for classes, padded_labels in zip(outputs.argmax(-1), labels, strict=True):
        # A label that lasts for several time steps is read once; blanks separate equal labels.
        decoded = classes.unique_consecutive()
        decoded = decoded[decoded != blank]
        expected = padded_labels[padded_labels >= 0]
        if decoded.tolist() == expected.tolist():
            correct += 1
    return correct
