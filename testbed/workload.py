"""The contract of a kind of work: its keys in the scenario, what each device gets and runs, and what reports show.

A kind is a class registered under the entry points `testbed.workloads`; docs/extending.md has a complete example.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from testbed.common.errors import Diagnostic
from testbed.experiment import Experiment
from testbed.method import Job, Method, Problem
from testbed.plan import Plan
from testbed.trace.metrics_spec import NOTHING, MetricsSpec
from testbed.trace.outcome import Outcome
from testbed.work import WorkloadPart, kind

if TYPE_CHECKING:
    from testbed.scenario.schema import Scenario, Trial


@dataclass(frozen=True)
class Prepared:
    """A trial that a runtime can start."""

    trial: Trial
    method: Method
    problem: Problem
    plan: Plan
    division: Any = None
    """What `Workload.divide` has found out for `Workload.inputs`; of the kind's own type."""

    @property
    def scenario(self) -> Scenario:
        """The scenario of this trial alone."""
        return self.trial.scenario

    @property
    def experiment(self) -> Experiment:
        """The same as a runtime needs it."""
        return self.trial.experiment

    @property
    def workload(self) -> Workload:
        """The kind of work."""
        return kind_of(self.problem.workload)


class Inputs:
    """What the devices of a run are given beside the problem and the plan. By default nothing."""

    begins_with_weights: bool = False
    """Whether the run begins with weights that the lead's program has to read."""

    def job(self, device: str, problem: Problem, plan: Plan, on_weights: Callable[[], None], shared: Any = None) -> Job:
        """Return what a device's program is started with, in the process of a simulation."""
        return Job(problem, plan, shared)

    def data(self, device: str) -> bytes | None:
        """Return the data that are sent to a device; `Workload.job` reads them there."""
        return None

    def weights(self, device: str) -> bytes | None:
        """Return the state that is sent to a device as safetensors."""
        return None

    def complete(self, weights: bytes) -> bytes:
        """Return the weights that a run leaves with those that no message has carried; both safetensors."""
        return weights


class Workload(ABC):
    """A kind of work. Stateless, as methods are."""

    name: ClassVar[str]
    """The `task` of a scenario."""
    Part: ClassVar[type[WorkloadPart]]
    """Its keys."""
    arrays: ClassVar[str] = "numpy"
    """The library whose arrays programs receive in messages (`testbed.wire.arrays`)."""
    declared: ClassVar[MetricsSpec] = NOTHING
    """Metrics, events, rows, tables and curves of all runs of this kind, beside those of the method."""

    def problems(self, scenario: Scenario, method: Method | None) -> Iterator[Diagnostic]:
        """Yield what is wrong with the keys and the files that they name; no method where there is no such method."""
        return iter(())

    def problem(self, given: Problem, scenario: Scenario, method: Method) -> Problem:
        """Return what planners and programs know of the work, from what they know of any; pure.

        Reads code that the scenario names, but no data. Raises `InputError` with keys below `workload`.
        """
        return given

    def divide(self, scenario: Scenario, method: Method, problem: Problem) -> tuple[Problem, Any]:
        """Return the problem as the planner is to see it, and the value of `Prepared.division`.

        May read data, for example to decide who owns which samples. Raises `InputError`.
        """
        return problem, None

    def check(self, method: Method, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` for a plan that this kind of work does not allow."""
        return

    def total(self, scenario: Scenario) -> int | None:
        """Return how many units of work a run has; None where it is not known before the run."""
        return scenario.workload.total

    def facts(self, problem: Problem) -> Mapping[str, Any]:
        """Return what all devices are told of the problem, as JSON values."""
        return {}

    def own_facts(self, problem: Problem) -> Mapping[str, Any]:
        """Return what one device is told of its problem (`Method.facts`), as JSON values."""
        return {}

    def posed(self, given: Problem, method: Method, facts: Mapping[str, Any]) -> Problem:
        """Return the problem on a device, from what any problem has and its facts; raises `InputError`."""
        return given

    def begin(self, workload: WorkloadPart) -> None:
        """Set what has to be set in a process before code that a scenario names is imported; raises `InputError`."""
        return

    def load(self, prepared: Prepared) -> Any:
        """Read the data of a run, for `inputs`; raises `InputError`."""
        return None

    def inputs(self, prepared: Prepared, data: Any, weights: Mapping[str, Any] | None) -> Inputs:
        """Return what the devices are given; ``weights`` is a state to begin with."""
        return Inputs()

    def prepare_device(self, problem: Problem) -> dict[str, Any] | None:
        """Import libraries before the program of a device starts; return what numerics depend on there."""
        return None

    def read_data(self, body: bytearray) -> Any:
        """Return what `Inputs.data` has sent; raises `testbed.wire.tensors.TensorError` for anything else."""
        return None

    def job(
        self,
        device: str,
        problem: Problem,
        plan: Plan,
        data: Any,
        weights: Mapping[str, Any] | None,
        on_weights: Callable[[], None],
    ) -> Job:
        """Return what a device's program is started with in its container."""
        return Job(problem, plan)

    def computing(self, problem: Problem) -> AbstractContextManager[None]:
        """Return a context for a simulation: seeds and settings of libraries that compute."""
        return nullcontext()

    def initial_weights(self, prepared: Prepared) -> Mapping[str, Any] | str | None:
        """Return what the manifest says about the state that the run begins with."""
        return None

    def owned(self, prepared: Prepared) -> Mapping[str, Mapping[int, int]]:
        """Return how many samples of which classes each device owns; empty where the work has no such owners."""
        return {}

    def exported(self, prepared: Prepared, outcome: Outcome) -> Outcome:
        """Return the outcome as it is recorded, for example with weights under the names that users know."""
        return outcome

    def described(self) -> dict[str, Any] | None:
        """Return what numerics depend on in this process, for the manifest; None: nothing."""
        return None


def kind_of(part: WorkloadPart) -> Workload:
    """Return the kind of work of a scenario's workload."""
    found: Workload = kind(part.task)
    return found
