"""The keys below ``workload.training`` of a scenario.

Optimizer, schedule, loss and metrics are a `NamedPart` each: the name of a torch class, or of a class or function in a
user's file, with its options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from testbed.common.conditions import Condition, parse_condition
from testbed.common.errors import Key
from testbed.common.part import ConfigModel

FILE = "Python file that defines it, relative to the scenario file; it is sent to the devices"
"""Description of the key ``file``."""
SGD = "sgd"
"""Default optimizer, which the testbed implements itself."""
CROSS_ENTROPY = "cross-entropy"
"""Default loss."""


class NamedPart(ConfigModel):
    """A torch name or a definition in a file, with options."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    name: str = Field(description="name of the class")
    file: str | None = Field(None, description=FILE)

    @property
    def title(self) -> str:
        """The name for display, with the file if any; source texts of files have this key in dictionaries."""
        return self.name if self.file is None else f"{self.file}:{self.name}"

    def options(self) -> dict[str, Any]:
        """Return the keys not declared by the class, which are options of the torch class or user's function.

        Lists become tuples, as torch expects.

        >>> NamedPart(name="adamw", betas=[0.9, 0.95]).options()
        {'betas': (0.9, 0.95)}
        """
        options = dict(self.model_extra or {})
        for key, value in options.items():
            if isinstance(value, list):
                options[key] = tuple(value)
        return options


def named_in(part: BaseModel, key: Key) -> Iterator[tuple[Key, NamedPart]]:
    """Yield key and value of each named part within ``part``; ``key`` is the key of ``part``."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, NamedPart):
            yield (*key, name), value
        elif isinstance(value, BaseModel):
            yield from named_in(value, (*key, name))


class OptimizerPart(NamedPart):
    """Stochastic gradient descent, or another optimizer of torch or of a file."""

    name: str = Field(
        SGD,
        description=(
            "a class of torch.optim, such as adamw, in lower case or as in torch; "
            "or a class of `file`; further keys are its options in torch, such as "
            "betas"
        ),
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description=(
            "learning rate; default: 0.05 for sgd, otherwise the default of the class"
        ),
    )
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="momentum; default: 0 for sgd",
    )
    weight_decay: float | None = Field(
        None, ge=0, description="L2 penalty; default: 0 for sgd"
    )

    @model_validator(mode="after")
    def _refuse_torch_key(self) -> Self:
        if "lr" in self.options():
            raise ValueError("use 'learning_rate' instead of 'lr'")
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer is stochastic gradient descent with options of this class only."""
        return self._is_sgd and not self.model_extra

    @property
    def _is_sgd(self) -> bool:
        return self.file is None and self.name.lower() == SGD

    @property
    def rate(self) -> float:
        """The learning rate of plain SGD; 0.05 by default."""
        return 0.05 if self.learning_rate is None else self.learning_rate

    def arguments(self) -> dict[str, Any]:
        """Return the scenario's arguments for the torch class, by torch's names.

        >>> OptimizerPart(name="adam", learning_rate=0.001).arguments()
        {'lr': 0.001}
        """
        # SGD has the testbed's default rate, also if its options need torch's class.
        rate = self.rate if self._is_sgd else self.learning_rate
        declared = {
            "lr": rate,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }
        arguments = {}
        for key, value in declared.items():
            # Without a value, the default of the torch class applies.
            if value is not None:
                arguments[key] = value
        return arguments | self.options()


class SchedulePart(NamedPart):
    """Learning rate schedule."""

    name: str = Field(
        description=(
            "a class of torch.optim.lr_scheduler, such as CosineAnnealingLR, one- "
            "cycle or linear; or a function of `file` that takes the step, from 0, "
            "and returns a factor; further keys are its options in torch; T_max and "
            "total_steps default to the steps of the workload"
        )
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="in a list: length in steps until the next schedule; omitted for the last",
    )
    every: int = Field(
        1,
        ge=1,
        description=(
            "training steps for each step of the schedule, for example those of an "
            "epoch; in a list, that of the first schedule"
        ),
    )


class LossPart(NamedPart):
    """Loss function."""

    name: str = Field(
        CROSS_ENTROPY,
        description=(
            "a loss of torch.nn, such as cross-entropy, mse, l1 or bce-with-logits; "
            "or a function of `file` that takes outputs and labels and returns "
            "their mean loss; further keys are its options in torch"
        ),
    )

    @property
    def is_plain(self) -> bool:
        """Whether the loss is cross-entropy without options."""
        return self.file is None and self.name == CROSS_ENTROPY and not self.model_extra


class MetricPart(NamedPart):
    """Evaluation metric."""

    name: str = Field(
        "",
        description=(
            "a class of torchmetrics (extra metrics), such as f1-score, auroc or "
            "mean-absolute-error; or a function of `file` that takes all outputs "
            "and labels and returns a number; default: the key of the metric; "
            "further keys are its options in torchmetrics, such as average"
        ),
    )


class ClipPart(ConfigModel):
    """Gradient clipping."""

    norm: float | None = Field(
        None,
        gt=0,
        description=(
            "maximum norm of all gradients together; larger gradients are scaled "
            "down. The stages of a pipeline, and device and server in split "
            "learning, exchange their norms"
        ),
    )
    value: float | None = Field(
        None, gt=0, description="maximum absolute value of each gradient entry"
    )

    @model_validator(mode="after")
    def _require_one_limit(self) -> Self:
        if (self.norm is None) == (self.value is None):
            raise ValueError("takes exactly one of 'norm' and 'value'")
        return self


class LoraPart(ConfigModel):
    """Low-rank adapters of linear layers (LoRA; Hu et al., 2021): the network stays unchanged, adapters are trained."""

    model_config = ConfigDict(frozen=True)
    rank: int = Field(
        8,
        ge=1,
        description="rank: number of values between the two matrices of an adapter",
    )
    alpha: float = Field(
        16.0,
        gt=0,
        description="scale: the output of an adapter is multiplied by alpha / rank",
    )
    modules: tuple[str, ...] = Field(
        (),
        description=(
            "linear layers with adapters, by name or by the last part of the name, "
            "such as q_proj; default: all"
        ),
    )


class TrainingPart(ConfigModel):
    """How a model is trained."""

    optimizer: OptimizerPart = Field(
        default_factory=lambda: OptimizerPart(), description="optimizer"
    )
    schedule: tuple[SchedulePart, ...] | SchedulePart | None = Field(
        None,
        description=(
            "schedule of the learning rate, a function of the step; a list: one "
            "schedule after the other"
        ),
    )
    loss: LossPart = Field(
        default_factory=lambda: LossPart(), description="loss function"
    )
    clip: ClipPart | None = Field(None, description="gradient clipping; default: none")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "decay of an exponential moving average of the weights, which is "
            "evaluated and stored; each update (with rounds: each round) keeps this "
            "share of the average"
        ),
    )
    lora: LoraPart | None = Field(
        None,
        description="for your own network: train low-rank adapters instead of the weights; default: train all weights",
    )
    exchange: Literal["trained", "all"] = Field(
        "trained",
        description=(
            "weights that devices send, average and checkpoint: trained weights "
            "only, or also frozen ones (without `requires_grad`); buffers such as "
            "running statistics are always included"
        ),
    )
    until: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "early end of training: the first evaluation that meets all conditions "
            "on accuracy, test_loss and metrics.<name>, such as '>= 0.95'"
        ),
    )
    patience: int | None = Field(
        None,
        ge=1,
        description=(
            "early stopping: training ends after this number of successive "
            "evaluations without improvement"
        ),
    )
    best: str | None = Field(
        None,
        description=(
            "accuracy, test_loss or metrics.<name>: the run stores the weights of "
            "the best evaluation instead of the last; `patience` uses this metric, "
            "by default test_loss"
        ),
    )
    metrics: dict[str, MetricPart] = Field(
        default_factory=dict,
        description=(
            "further metrics of the test data, by a name of your own or the name of "
            "the metric; `expect`, sweeps and reports call them `metrics.<name>`"
        ),
    )

    @field_validator("metrics", mode="before")
    @classmethod
    def _name_metrics_by_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        metrics: dict[Any, Any] = {}
        for key, part in value.items():
            if not re.fullmatch(r"[\w-]+", str(key)):
                raise ValueError(
                    f"'{key}' is not a valid metric name: use letters, digits and dashes"
                )
            metrics[key] = part
            # Values of other types stay as they are, so that pydantic rejects them.
            if part is None or isinstance(part, Mapping):
                metrics[key] = {"name": key, **(part or {})}
        return metrics

    @property
    def schedules(self) -> tuple[SchedulePart, ...]:
        """The schedules in order, also if the scenario has one schedule instead of a list."""
        if self.schedule is None:
            return ()
        if isinstance(self.schedule, SchedulePart):
            return (self.schedule,)
        return self.schedule

    def parts(self) -> list[tuple[str, NamedPart]]:
        """Return all named parts, which may come from a file, with their keys."""
        parts: list[tuple[str, NamedPart]] = [
            ("optimizer", self.optimizer),
            ("loss", self.loss),
        ]
        for schedule in self.schedules:
            parts.append(("schedule", schedule))
        for metric in self.metrics.values():
            parts.append(("metrics", metric))
        return parts

    @property
    def uses_evaluations(self) -> bool:
        """Whether evaluations decide the end of training or the final weights."""
        return bool(self.until or self.patience or self.best)

    @model_validator(mode="after")
    def _check_evaluated_names(self) -> Self:
        known = ["accuracy", "test_loss"]
        for name in self.metrics:
            known.append(f"metrics.{name}")
        used = list(self.until)
        if self.best:
            used.append(self.best)
        for name in used:
            if name not in known:
                raise ValueError(
                    f"an evaluation has no '{name}'; available: {', '.join(known)}"
                )
        # Called for its ValueError if a condition cannot be parsed.
        self.conditions()
        return self

    def conditions(self) -> dict[str, Condition]:
        """Return the stopping conditions of `until` by the name of a value; raises ValueError for invalid ones."""
        conditions = {}
        for name, text in self.until.items():
            if name == "accuracy":
                # A share may be written as a percentage.
                conditions[name] = parse_condition(text, "share")
            else:
                conditions[name] = parse_condition(text, "number")
        return conditions

    def used_keys(self) -> set[str]:
        """Return the used keys beyond plain SGD on cross-entropy, which a method may not support.

        >>> sorted(TrainingPart(clip={"norm": 1.0}, ema=0.99).used_keys())
        ['clip', 'clip.norm', 'ema']
        """
        value_of_key = {
            "optimizer": not self.optimizer.is_plain,
            "schedule": self.schedules,
            "loss": not self.loss.is_plain,
            "clip": self.clip,
            "clip.norm": self.clip is not None and self.clip.norm,
            "ema": self.ema,
            "metrics": self.metrics,
        }
        return {key for key, value in value_of_key.items() if value}
