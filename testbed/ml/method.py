"""Methods that train a model or infer with one: their problem, job and contract, beside those of any method."""

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
from testbed.ml.training.recipe import Recipe
from testbed.ml.workload import LearningPart
from testbed.plan import Plan, PlanDetails

if TYPE_CHECKING:
    import torch

    from testbed.device import Device
    from testbed.ml.data.dataset import Dataset
    from testbed.ml.models.chain import Model

__all__ = ["Alternative", "Baselines", "Job", "Method", "Options", "PlannedMessage", "Problem", "StepsOrTime"]


@dataclass(frozen=True)
class Problem(core.Problem[ProblemOptions]):
    """Everything a planner may look at; a device's program knows of it what `Method.facts` says."""

    workload: LearningPart
    model: Model = field(kw_only=True)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Training samples by device, of those that own data; none where all samples are the lead's."""
    codes: Mapping[str, Code] = field(default_factory=dict)
    """Text of what ``workload.training`` takes from files, by `testbed.ml.training.schema.NamedPart.title`."""
    model_code: Code | None = None
    """Text of a model that is no part of this code."""
    frozen_placed: bool = False
    """Whether the method supports ``fixed_units``."""

    @cached_property
    def training(self) -> Recipe:
        """How the model is trained."""
        workload = self.workload
        given = workload.model.weights is not None and not self.frozen_placed
        travels = given or workload.training.exchange == "all"
        return Recipe(workload.training, self.codes, workload.steps, self.model.classes, travels)


@dataclass(frozen=True)
class Job(core.Job[ProblemOptions, PlanDetails]):
    """What a device's program is started with."""

    problem: Problem[ProblemOptions]
    dataset: Dataset | None = field(kw_only=True)
    """The training samples that this device owns, and on the plan's lead the test samples; None on a device without
    any. Where the workload does not split its data, all samples are the lead's; or each device's, if the method has
    them everywhere."""
    given: Mapping[str, torch.Tensor] | None = None
    """What `weights` returns; for runtimes."""
    on_weights: Callable[[], None] = lambda: None
    """Called when `weights` is first read, so that a run whose program never does is not reported as begun with it."""

    @cached_property
    def weights(self) -> Mapping[str, torch.Tensor] | None:
        """State to begin with instead of the seeded one, keyed as `Model.build` names it; only on the plan's lead.

        None where the scenario names no weights. A method that reads this supports ``initial_weights``.
        """
        if self.given is not None:
            self.on_weights()
        return self.given


class Method(core.Method[MethodOptions, MethodDetails]):
    """A method of the tasks train and infer."""

    tasks: ClassVar[tuple[str, ...]] = ("train",)
    refuses: ClassVar[Mapping[str, str]] = {}
    """Keys of ``workload.training`` that it does not follow, such as ``ema`` or ``clip.norm``, with the reason."""

    @abstractmethod
    def plan(self, problem: Problem[MethodOptions]) -> Plan[MethodDetails]:
        """Decide who holds what; pure. Raises `InputError` where no plan fits, saying what would."""

    @abstractmethod
    async def program(self, device: Device, job: Job[MethodOptions, MethodDetails]) -> None:
        """Run on one device, whichever role the plan gives it. A device that restarts runs it again, empty."""

    def facts(
        self, problem: Problem[MethodOptions], plan: Plan[MethodDetails], device: str
    ) -> tuple[Problem[MethodOptions], Plan[MethodDetails]]:
        """Return what the program of a device is to know of the problem and of the plan; pure."""
        return super().facts(problem, plan, device)

    def data_owners(self, problem: Problem[MethodOptions]) -> tuple[str, ...]:
        """Return the devices that ``workload.data.split`` shares training samples among; pure.

        None, unless a method says otherwise: all samples are the lead's, and a split is refused.
        """
        return ()

    def samples_at_once(self, problem: Problem[MethodOptions]) -> int:
        """Return how many samples of a batch pass through the model together; pure."""
        return problem.workload.batch_size

    def simulation_state(self, problem: Problem[MethodOptions]) -> Any:
        """Return an object through which the devices of a simulation compute together; None where each is alone."""
        return None

    def largest_messages(self, problem: Problem[MethodOptions], plan: Plan[MethodDetails]) -> Iterable[PlannedMessage]:
        """Return the largest messages of a run without faults; pure."""
        return ()

    def alternatives(self, problem: Problem[MethodOptions]) -> tuple[Alternative, ...]:
        """Return the ways to choose from, for `testbed plan`; pure. None where a method has but one."""
        return ()

    def advice(self, problem: Problem[MethodOptions], plan: Plan[MethodDetails]) -> tuple[str, ...]:
        """Return what is probably not meant, each with what to do, for `testbed plan` and `validate`; pure."""
        return ()
