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
from testbed.ml.training.metrics import Metric, aligned, make
from testbed.ml.training.optimizers import (
    AVERAGE,
    MOMENTUM,
    Kept,
    Measured,
    Optimizer,
    Sgd,
    TorchOptimizer,
    measure,
)
from testbed.ml.training.schedules import Schedule
from testbed.ml.training.schema import TrainingPart

_OPTIMIZER, _LOSS = ("training", "optimizer"), ("training", "loss")
_WITHOUT = ("LBFGS", "SparseAdam", "Muon")
"""Optimizers that want a closure, sparse gradients, or no weights but matrices."""
_PROBE = (64, 64)
"""Shape of the weight on which it is measured what an optimizer does."""
_MEASURED: dict[tuple[str, str, tuple[int, ...]], Measured] = {}
"""By an optimizer, as JSON, the module of its file, and the shape of a weight."""


@dataclass(frozen=True)
class TrainingConfig:
    """The training configuration; `check` reports its errors."""

    part: TrainingPart = field(default_factory=TrainingPart)
    codes: Mapping[str, Code] = field(default_factory=dict)
    """The text of the user's files, by `NamedPart.title`."""
    steps: int | None = None
    """Training steps of the workload, where they are known."""
    classes: int = 0
    """Outputs of the model for a sample, or for a token of it."""
    frozen_travels: bool = False
    """Whether messages and checkpoints carry weights that are not trained."""

    def check(self) -> None:
        """Resolve all names; raises `InputError` with the key in the workload."""
        _ = self.update_flops, self._loss_function, self.settings(0), self.metrics()

    def optimizer(self) -> Optimizer:
        """Return a new optimizer without parameters."""
        return (
            Sgd(self.part.optimizer)
            if self.part.optimizer.plain
            else TorchOptimizer(self._make_optimizer)
        )

    def settings(self, step: int) -> Mapping[str, Any]:
        """Return the schedule's settings of a step, counted from 0, such as ``lr``; empty without a schedule."""
        return {} if self._make_schedule is None else self._make_schedule.at(step)

    def kept(self, shape: tuple[int, ...]) -> Kept:
        """Return the additional values of a weight of a shape after its first update: optimizer state and moving
        average.
        """
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if not self.part.optimizer.plain:
            shapes |= self._measure_optimizer(shape).kept
        elif self.part.optimizer.momentum:
            shapes[MOMENTUM] = (shape, torch.float32)
        return shapes | ({AVERAGE: (shape, torch.float32)} if self.part.ema else {})

    @cached_property
    def state_values(self) -> float:
        """Additional values per trained value: 1 with momentum, 2 with Adam, and 1 for an average."""
        optimizer = self.part.optimizer
        own = (
            bool(optimizer.momentum)
            if optimizer.plain
            else self._measure_optimizer(_PROBE).values
        )
        return own + (self.part.ema is not None)

    @cached_property
    def update_flops(self) -> float:
        """Cost of an optimizer step per parameter.

        2 FLOPs for the step itself, 2 more with momentum, weight decay, clipping and a moving average, each; optimizers
        other than SGD cost 2 for each operation on all values.
        """
        part = self.part.optimizer
        plain = 2.0 + 2.0 * bool(part.momentum) + 2.0 * bool(part.weight_decay)
        own = plain if part.plain else self._measure_optimizer(_PROBE).flops
        return (
            own + 2.0 * (self.part.clip is not None) + 2.0 * (self.part.ema is not None)
        )

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics by their names in the scenario."""
        part = self.part
        return {
            name: make(each, self.codes, part.loss.name, self.classes)
            for name, each in part.metrics.items()
        }

    def weight(self, labels: torch.Tensor) -> float:
        """Return the weight of labels, (samples, ...), in a batch's mean loss, in samples.

        A loss ignoring labels divides by the counted ones, and a loss with class weights by their sum.
        """
        samples, criterion = len(labels), self._loss_function
        if (
            labels.is_meta
            or labels.is_floating_point()
            or isinstance(criterion, torch.nn.CTCLoss)
        ):
            return samples
        counted: torch.Tensor = labels != _ignored_label(criterion)
        classes = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
        if isinstance(criterion, classes) and criterion.weight is not None:
            counted = criterion.weight[labels.where(counted, 0)] * counted
        return samples * (float(counted.sum()) / labels.numel())

    def loss(
        self, outputs: torch.Tensor, labels: torch.Tensor, whole: float | None
    ) -> torch.Tensor:
        """Return these samples' part of the mean loss of a batch, without axes; arguments are (samples, ...).

        ``whole`` is the `weight` of all labels of the batch; None if these are all, with at least one of them counting.
        """
        weight = whole if whole is None else self.weight(labels)
        if weight == 0:
            return (
                outputs * 0.0
            ).sum()  # the mean of no labels would be NaN, and so would its gradients
        if isinstance(self._loss_function, torch.nn.CTCLoss):
            value = temporal_loss(self._loss_function, outputs, labels)
        else:
            outputs = aligned(outputs, labels)
            if self._loss_function is None and labels.ndim == 1:
                counted = (
                    (labels != _ignored_label(None)).sum() if whole is None else whole
                )
                return (
                    torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
                    / counted
                )
            value = (self._loss_function or torch.nn.functional.cross_entropy)(
                outputs, labels
            )
        if (
            weight is None
            or weight == whole
            or getattr(self._loss_function, "reduction", "mean") == "sum"
        ):
            return value
        assert whole is not None
        return value * (weight / whole)

    def right(self, outputs: torch.Tensor, labels: torch.Tensor) -> tuple[int, int]:
        """Return the number of correct answers and of all answers: samples, (samples, ...), or their tokens."""
        if isinstance(self._loss_function, torch.nn.CTCLoss):
            return read_right(self._loss_function.blank, outputs, labels), len(labels)
        counted = labels >= 0
        return int(
            ((aligned(outputs, labels).argmax(dim=1) == labels) & counted).sum()
        ), int(counted.sum())

    def prepare(
        self, gradients: Mapping[str, torch.Tensor], norms: torch.Tensor | None
    ) -> None:
        """Clip gradients in place; ``norms`` are those of the whole model, (tensors,), if these are only a part."""
        clip = self.part.clip
        if clip is None or not gradients:
            return
        if clip.value is not None:
            for gradient in gradients.values():
                gradient.clamp_(-clip.value, clip.value)
            return
        assert clip.norm is not None
        total = torch.linalg.vector_norm(
            self.norms(list(gradients.values())) if norms is None else norms
        )
        scale = torch.clamp(clip.norm / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(scale)

    @staticmethod
    def norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of each gradient, (tensors,), as torch's ``clip_grad_norm_`` takes them."""
        # A stage may hold nothing that is trained.
        return (
            torch.stack([torch.linalg.vector_norm(each) for each in gradients])
            if gradients
            else torch.zeros(0)
        )

    @cached_property
    def _loss_function(self) -> Any:
        """Return the loss as a function of outputs and labels; None for plain cross-entropy."""
        part = self.part.loss
        if part.plain:
            return None
        factory = named.find(part, self.codes, _LOSS, torch.nn, torch.nn.Module, "Loss")
        if part.file is not None and not isinstance(factory, type):
            return partial(factory, **part.options())
        given = part.options().items()
        options = {
            name: torch.tensor(value) if isinstance(value, tuple) else value
            for name, value in given
        }
        return named.make(factory, part, _LOSS, **options)

    def _make_optimizer(
        self, parameters: list[torch.nn.Parameter]
    ) -> torch.optim.Optimizer:
        part = self.part.optimizer
        factory = named.find(
            part,
            self.codes,
            _OPTIMIZER,
            torch.optim,
            torch.optim.Optimizer,
            without=_WITHOUT,
        )
        made: torch.optim.Optimizer = named.make(
            factory, part, _OPTIMIZER, parameters, **part.arguments()
        )
        return made

    def _measure_optimizer(self, shape: tuple[int, ...]) -> Measured:
        part = self.part.optimizer
        # A file that was edited is another module.
        module = self.codes[part.title].module if part.file is not None else ""
        key = (part.model_dump_json(), module, shape)
        if key not in _MEASURED:
            _MEASURED[key] = measure(TorchOptimizer(self._make_optimizer), shape)
        return _MEASURED[key]

    @cached_property
    def _make_schedule(self) -> Schedule | None:
        return (
            Schedule(self.part.schedules, self.codes, self.steps, self._make_optimizer)
            if self.part.schedules
            else None
        )


def _ignored_label(criterion: Any) -> int:
    """Return the label ignored by a loss, by default torch's."""
    options = getattr(criterion, "keywords", {})  # of a function with its options
    label = options.get(
        "ignore_index",
        getattr(getattr(criterion, "func", criterion), "ignore_index", -100),
    )
    return int(label)


def temporal_loss(
    criterion: torch.nn.CTCLoss, outputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss of outputs, (samples, length, classes), for labels, (samples, most labels), padded below 0."""
    chances = outputs.log_softmax(-1).movedim(1, 0)
    steps = torch.full((len(outputs),), outputs.shape[1], dtype=torch.int64)
    value: torch.Tensor = criterion(
        chances, labels.clamp(min=0), steps, (labels >= 0).sum(1)
    )
    return value


def read_right(blank: int, outputs: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the number of samples decoded exactly as labelled, by the most probable class; shapes as for the loss."""
    right = 0
    for likely, wanted in zip(outputs.argmax(-1), labels, strict=True):
        read = likely.unique_consecutive()
        right += read[read != blank].tolist() == wanted[wanted >= 0].tolist()
    return right
