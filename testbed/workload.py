"""The contract of a workload: scenario keys, the inputs and programs of devices, and report sections.

A workload is a kind of work, such as training. Its class is registered under the entry points `testbed.workloads`;
docs/extending.md has a complete example.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from testbed.common.errors import Diagnostic, InputError, reject_former_names
from testbed.experiment import Experiment
from testbed.method import Method, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.trace.metrics_spec import NOTHING, MetricsSpec
from testbed.trace.outcome import Outcome
from testbed.work import WorkloadPart, find_workload

if TYPE_CHECKING:
    from testbed.scenario.schema import Scenario, Trial


@dataclass(frozen=True)
class Prepared:
    """A validated and planned trial, ready for a runtime.

    ::

        prepared = testbed.prepare.prepare(testbed.scenario.expand.trials(scenario)[0])
        outcome = testbed.simulation.run.simulate(prepared)
    """

    trial: Trial
    method: Method
    problem: PlanningProblem
    plan: Plan
    division: Any = None
    """Result of `Workload.divide` for use by `Workload.inputs`; the type belongs to the workload."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of the trial, without other trials."""
        return self.trial.scenario

    @property
    def experiment(self) -> Experiment:
        """The facts of the trial for a runtime."""
        return self.trial.experiment

    @property
    def workload(self) -> Workload:
        """The kind of work."""
        return workload_of(self.problem.workload)


class Inputs:
    """Per-device inputs besides problem and plan. Empty by default."""

    begins_with_weights: bool = False
    """Whether the coordinator's program has to load initial weights."""

    def program_context(
        self,
        device: str,
        problem: PlanningProblem,
        plan: Plan,
        on_weights: Callable[[], None],
        shared: Any = None,
    ) -> ProgramContext:
        """Return the input of a device's program in a simulation."""
        return ProgramContext(problem, plan, shared)

    def data(self, device: str) -> bytes | None:
        """Return the data for a device as bytes; the device parses them with `Workload.read_data`."""
        return None

    def weights(self, device: str) -> bytes | None:
        """Return the initial state for a device as safetensors."""
        return None

    def complete(self, weights: bytes) -> bytes:
        """Add weights that were never sent to the final weights of a run; both as safetensors."""
        return weights


_FORMER = {
    "posed": "rebuild_problem",
    "computing": "simulation_context",
    "owned": "sample_counts",
    "exported": "export_outcome",
    "described": "library_versions",
    "problem": "extend_problem",
    "job": "program_context",
}
"""Methods of version 1.0 and their present names."""


class Workload(ABC):
    """A kind of work. Stateless, as methods are."""

    name: ClassVar[str]
    """The `task` of a scenario."""
    Part: ClassVar[type[WorkloadPart]]
    """Schema of the workload's scenario keys."""
    arrays: ClassVar[str] = "numpy"
    """The library whose arrays programs receive in messages (`testbed.wire.arrays`)."""
    declared: ClassVar[MetricsSpec] = NOTHING
    """Metrics, events, rows, tables and charts of every run of this workload, in addition to the method's."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Reject methods under a former name, which nothing would call."""
        super().__init_subclass__(**keywords)
        remedies = {}
        for former, present in _FORMER.items():
            remedies[former] = f"rename the method to {present}"
        reject_former_names(cls, remedies)

    def problems(
        self, scenario: Scenario, method: Method | None
    ) -> Iterator[Diagnostic]:
        """Yield all problems of the workload's keys and files; ``method`` is None for an unknown method."""
        return iter(())

    def extend_problem(
        self, base_problem: PlanningProblem, scenario: Scenario, method: Method
    ) -> PlanningProblem:
        """Extend the generic ``base_problem`` by the facts of the workload. Pure.

        Reads code that the scenario names, but no data. Raises `InputError` with keys below `workload`.
        """
        return base_problem

    def divide(
        self, scenario: Scenario, method: Method, problem: PlanningProblem
    ) -> tuple[PlanningProblem, Any]:
        """Return the problem for the planner, and the value of `Prepared.division`.

        May read data, for example to decide who owns which samples. Raises `InputError`.
        """
        return problem, None

    def check(self, method: Method, problem: PlanningProblem, plan: Plan) -> None:
        """Raise `InputError` for a plan not supported by the workload."""
        return

    def hint(self, problem: PlanningProblem, error: InputError) -> str:
        """Return an addition to the error of a failed plan; empty by default."""
        return ""

    def total(self, scenario: Scenario) -> int | None:
        """Return the number of units of work of a run; None if unknown before the run."""
        return scenario.workload.total

    def facts(self, problem: PlanningProblem) -> Mapping[str, Any]:
        """Return the facts of the problem shared by all devices, as JSON values."""
        return {}

    def own_facts(self, problem: PlanningProblem) -> Mapping[str, Any]:
        """Return the facts of one device's problem (`Method.facts`), as JSON values."""
        return {}

    def rebuild_problem(
        self, base_problem: PlanningProblem, method: Method, facts: Mapping[str, Any]
    ) -> PlanningProblem:
        """Rebuild the problem on a device from the generic problem and the facts. Raises `InputError`."""
        return base_problem

    def begin(self, workload: WorkloadPart) -> None:
        """Set process-wide state before a scenario's code is imported. Raises `InputError`."""
        return

    def load(self, prepared: Prepared) -> Any:
        """Read the data of a run, for `inputs`; raises `InputError`."""
        return None

    def inputs(
        self, prepared: Prepared, data: Any, weights: Mapping[str, Any] | None
    ) -> Inputs:
        """Return the inputs of the devices; ``weights`` is an optional initial state."""
        return Inputs()

    def prepare_device(self, problem: PlanningProblem) -> dict[str, Any] | None:
        """Import libraries before a device's program starts; return the versions relevant to numerics."""
        return None

    def read_data(self, body: bytearray) -> Any:
        """Parse data from `Inputs.data`. Raises `testbed.wire.tensors.TensorError` for invalid bytes."""
        return None

    def program_context(
        self,
        device: str,
        problem: PlanningProblem,
        plan: Plan,
        data: Any,
        weights: Mapping[str, Any] | None,
        on_weights: Callable[[], None],
    ) -> ProgramContext:
        """Return the input of a device's program in a container."""
        return ProgramContext(problem, plan)

    def simulation_context(
        self, problem: PlanningProblem
    ) -> AbstractContextManager[None]:
        """Return a context manager with seeds and library settings for a simulation."""
        return nullcontext()

    def initial_weights(self, prepared: Prepared) -> Mapping[str, Any] | str | None:
        """Return the manifest entry for the initial state."""
        return None

    def sample_counts(self, prepared: Prepared) -> Mapping[str, Mapping[int, int]]:
        """Return the number of samples by device and class; empty for work without data owners."""
        return {}

    def export_outcome(self, prepared: Prepared, outcome: Outcome) -> Outcome:
        """Return the outcome to record, for example with weights under names known to users."""
        return outcome

    def library_versions(self) -> dict[str, Any] | None:
        """Return the library versions relevant to numerics, for the manifest; None if irrelevant."""
        return None


def workload_of(part: WorkloadPart) -> Workload:
    """Return the kind of work of a scenario's workload."""
    # `testbed.work` cannot name the type: this module imports it.
    workload: Workload = find_workload(part.task)
    return workload
