"""The interface of methods for training and inference.

`PlanningProblem` is the input of a method's planner, `ProgramContext` that of its program on a device, and `Method` the
class to derive from. They extend the classes of `testbed.method`, which know nothing of models and data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from testbed import method as core
from testbed.common.usercode import Code
from testbed.method import (
    Alternative,
    Baselines,
    MethodDetails,
    MethodOptions,
    Options,
    PlannedMessage,
    ProblemOptions,
    StepsOrTime,
)
from testbed.ml.training.config import TrainingConfig
from testbed.ml.workload import LearningPart
from testbed.plan import DetailsType, Plan

if TYPE_CHECKING:
    import torch

    from testbed.device import Device
    from testbed.ml.data.dataset import Dataset
    from testbed.ml.models.chain import Model

__all__ = [
    "Alternative",
    "Baselines",
    "Method",
    "Options",
    "PlannedMessage",
    "PlanningProblem",
    "ProgramContext",
    "StepsOrTime",
]


@dataclass(frozen=True)
class PlanningProblem(core.PlanningProblem[ProblemOptions]):
    """The input of a method's planner; the program of a device receives only the result of `Method.facts`."""

    workload: LearningPart
    """The keys of the workload in the scenario."""
    model: Model = field(kw_only=True)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Training samples by device, for devices with data; empty if all samples are at the coordinator."""
    codes: Mapping[str, Code] = field(default_factory=dict)
    """Texts of files named by ``workload.training``, by `testbed.ml.training.schema.NamedPart.title`."""
    model_code: Code | None = None
    """Source text of a user's model."""
    frozen_placed: bool = False
    """Whether the method supports ``fixed_units``."""

    @cached_property
    def training(self) -> TrainingConfig:
        """Optimizer, schedule, loss and metrics of the training."""
        workload = self.workload
        # Frozen weights of the seed are drawn on every device; those of a file have to be sent, unless they are placed.
        are_sent = workload.model.weights is not None and not self.frozen_placed
        frozen_travels = are_sent or workload.training.exchange == "all"
        return TrainingConfig(
            workload.training,
            self.codes,
            workload.steps,
            self.model.classes,
            frozen_travels,
        )


@dataclass(frozen=True)
class ProgramContext(core.ProgramContext[ProblemOptions, DetailsType]):
    """The start arguments of a device's program."""

    problem: PlanningProblem[ProblemOptions]
    dataset: Dataset | None = field(kw_only=True)
    """The training samples of this device, and on the plan's coordinator the test samples; None without samples.

    If the workload does not split its data, the coordinator has all samples; with a method that supports
    ``all_samples``, every device has."""
    given: Mapping[str, torch.Tensor] | None = None
    """The result of `weights`; set by runtimes."""
    on_weights: Callable[[], None] = lambda: None
    """Called at the first read of `weights`, so runs ignoring given weights are not reported as using them."""

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor] | None:
        """Initial weights instead of those of the seed, by their names in `Model.build`; only on the coordinator.

        None if the scenario names no weights. A method that reads this property supports ``initial_weights``.
        """
        if self.given is not None:
            self.on_weights()
        return self.given


class Method(core.Method[MethodOptions, MethodDetails]):
    """A method of the tasks train and infer."""

    tasks: ClassVar[tuple[str, ...]] = ("train",)
    refuses: ClassVar[Mapping[str, str]] = {}
    """Unsupported keys of ``workload.training``, such as ``ema`` or ``clip.norm``, with the reason."""

    @abstractmethod
    def plan(self, problem: PlanningProblem[MethodOptions]) -> Plan[MethodDetails]:
        """Assign the work to devices; pure. Raises `InputError` with a remedy if no plan fits."""

    @abstractmethod
    async def program(
        self, device: Device, context: ProgramContext[MethodOptions, MethodDetails]
    ) -> None:
        """Run on one device in the role that the plan gives the device; again, without memory, after a restart."""

    def facts(
        self,
        problem: PlanningProblem[MethodOptions],
        plan: Plan[MethodDetails],
        device: str,
    ) -> tuple[PlanningProblem[MethodOptions], Plan[MethodDetails]]:
        """Return the parts of problem and plan that the program of a device receives; pure."""
        return super().facts(problem, plan, device)

    def data_owners(self, problem: PlanningProblem[MethodOptions]) -> tuple[str, ...]:
        """Return the devices sharing training samples by ``workload.data.split``; pure.

        By default no device does: the coordinator has all samples, and a split is rejected.
        """
        return ()

    def samples_at_once(self, problem: PlanningProblem[MethodOptions]) -> int:
        """Return the number of a batch's samples passing through the model together; pure."""
        return problem.workload.batch_size

    def simulation_state(self, problem: PlanningProblem[MethodOptions]) -> Any:
        """Return an object with which the devices of a simulation compute together; None if each computes alone."""
        return None

    def largest_messages(
        self, problem: PlanningProblem[MethodOptions], plan: Plan[MethodDetails]
    ) -> Iterable[PlannedMessage]:
        """Return the largest messages of a run without faults; pure."""
        return ()

    def alternatives(
        self, problem: PlanningProblem[MethodOptions]
    ) -> tuple[Alternative, ...]:
        """Return the alternatives shown by `testbed plan`; pure. Empty if a method has a single variant."""
        return ()

    def advice(
        self, problem: PlanningProblem[MethodOptions], plan: Plan[MethodDetails]
    ) -> tuple[str, ...]:
        """Return probable mistakes with remedies, for `testbed plan` and `validate`; pure."""
        return ()
