"""The interface of methods for training and inference.

A method derives from `Method`. `PlanningProblem` is the input of the method's planner, and `ProgramContext` that of the
method's program on a device. The three classes add models and data to the classes of `testbed.method`.
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
    """The input of a method's planner; the program of a device receives only the facts returned by `Method.facts`."""

    workload: LearningPart
    """The keys of the workload in the scenario."""
    model: Model = field(kw_only=True)
    """The model, without weights."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Training samples by device, for devices with data; empty if all samples are at the coordinator."""
    codes: Mapping[str, Code] = field(default_factory=dict)
    """Source texts of the files that ``workload.training`` and the method's options name, by
    `testbed.ml.training.schema.NamedPart.title`."""
    model_code: Code | None = None
    """Source text of a user's model; None for a catalogue model."""
    frozen_placed: bool = False
    """Whether devices receive the frozen ones of the initial weights before the run, instead of in messages: the method
    supports ``fixed_units``."""

    @cached_property
    def training(self) -> TrainingConfig:
        """Optimizer, schedule, loss and metrics of the training."""
        workload = self.workload
        # Every device draws frozen weights from the seed by itself. Frozen weights of a file are sent in messages,
        # unless every device receives them before the run.
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
    """The input of a device's program."""

    problem: PlanningProblem[ProblemOptions]
    dataset: Dataset | None = field(kw_only=True)
    """The training samples of this device, and on the plan's coordinator the test samples; None without samples.

    If the workload does not split its data, the coordinator has all samples. With a method that supports
    ``all_samples``, every device of the plan has all samples."""
    given: Mapping[str, torch.Tensor] | None = None
    """The value of `weights`, which programs read instead; set by runtimes."""
    on_weights: Callable[[], None] = lambda: None
    """Called at the first read of `weights`, since a run uses initial weights only if its program reads them."""

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor] | None:
        """The scenario's initial weights, by their names in the module of `Model.build`.

        None on other devices than the coordinator, and if weights are drawn from the seed. A method that reads this
        property supports ``initial_weights``.
        """
        if self.given is not None:
            self.on_weights()
        return self.given


class Method(core.Method[MethodOptions, MethodDetails]):
    """A method for training (the task train) or inference (the task infer)."""

    tasks: ClassVar[tuple[str, ...]] = ("train",)
    refuses: ClassVar[Mapping[str, str]] = {}
    """Unsupported keys of ``workload.training``, such as ``ema`` or ``clip.norm``, with the reasons for errors."""

    @abstractmethod
    def plan(self, problem: PlanningProblem[MethodOptions]) -> Plan[MethodDetails]:
        """Assign the work to devices; pure. Raises `InputError` with a remedy if no plan fits."""

    @abstractmethod
    async def program(
        self, device: Device, context: ProgramContext[MethodOptions, MethodDetails]
    ) -> None:
        """Run on one device, in the planned role. After a restart of the device, the program runs again."""

    def facts(
        self,
        problem: PlanningProblem[MethodOptions],
        plan: Plan[MethodDetails],
        device: str,
    ) -> tuple[PlanningProblem[MethodOptions], Plan[MethodDetails]]:
        """Return the facts of the problem and of the plan for the program of a device; pure."""
        return super().facts(problem, plan, device)

    def data_owners(self, problem: PlanningProblem[MethodOptions]) -> tuple[str, ...]:
        """Return the devices owning training samples by ``workload.data.split``; pure.

        By default there are none: the coordinator has all samples, and a split is rejected.
        """
        return ()

    def samples_at_once(self, problem: PlanningProblem[MethodOptions]) -> int:
        """Return how many samples of a batch pass through the model together, such as those of a micro-batch; pure."""
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
        """Return the candidate plans compared by `testbed plan`; pure. Empty if the method has only one plan."""
        return ()

    def advice(
        self, problem: PlanningProblem[MethodOptions], plan: Plan[MethodDetails]
    ) -> tuple[str, ...]:
        """Return texts on probable mistakes in a scenario, with remedies, for `testbed plan` and `validate`; pure."""
        return ()
