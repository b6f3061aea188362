"""The contract of a method: options, a planner, and a program that runs on every device."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeVar

from testbed.common.errors import nearest, reject_former_names
from testbed.common.part import ConfigModel
from testbed.common.quantities import Duration
from testbed.device import Device
from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.plan import DetailsType, Plan, PlanDetails
from testbed.trace.metrics_spec import MetricsSpec
from testbed.work import MOST_STEPS, WorkloadPart

Baselines = Mapping[str, Mapping[str, Any]]
"""Option values by the name of a baseline."""


class Options(ConfigModel):
    """Base of a method's options; unknown keys are refused. `testbed show methods` shows the docstrings of options."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    baselines: ClassVar[Baselines] = {}
    """Baselines of the method's publication. Options with baselines have a field `baseline` that names one."""
    former_keys: ClassVar[Mapping[str, str]] = {}
    """Former names of options with the present ones: a former name is refused with the present one.

    >>> class RingOptions(Options):
    ...     former_keys = {"patience": "stall_timeout"}
    ...     stall_timeout: float = 1.0
    """

    @model_validator(mode="before")
    @classmethod
    def _of_baseline(cls, value: Any) -> Any:
        """Fill in the option values of the named baseline."""
        if not cls.baselines or not isinstance(value, dict):
            return value
        name = value.get("baseline")
        if name is None:
            return value
        if not isinstance(name, str) or name not in cls.baselines:
            raise ValueError(
                f"unknown baseline '{name}': {nearest(str(name), cls.baselines)}"
            )
        for key, baseline_value in cls.baselines[name].items():
            # With another value, it would be a system that no publication measured under this name.
            if value.get(key, baseline_value) != baseline_value:
                raise ValueError(
                    f"the baseline '{name}' implies {key}: {json.dumps(baseline_value)}: remove '{key}'"
                )
        return {**value, **cls.baselines[name]}


MethodOptions = TypeVar("MethodOptions", bound=Options, default=Options)
"""A method's options."""
ProblemOptions = TypeVar(
    "ProblemOptions", bound=Options, default=Options, covariant=True
)
"""Covariant type variable for read-only options."""
MethodDetails = TypeVar("MethodDetails", bound=PlanDetails, default=PlanDetails)
"""Type of the method-specific details of a plan."""


PlannedMessage = tuple[str, str, float]
"""Sender, receiver and size in bytes of a planned message."""


@dataclass(frozen=True)
class Alternative:
    """A candidate plan, with the demands on each device and on the network."""

    name: str
    chosen: bool
    """Whether the plan uses this alternative."""
    fits: bool
    """Whether every device has enough memory."""
    weights: Mapping[str, int]
    """Elements of weights on each device; biases and normalisation left out."""
    memory: Mapping[str, float]
    """Needed bytes of memory, by device name."""
    longest_path: int
    """Number of multiplications for one sample that cannot be computed at the same time."""
    communication: float
    """Transmitted elements per sample, by the formulas of the publication."""
    elements: int
    """Transmitted elements per sample in this implementation."""
    wire_bytes: float
    """Bytes on the wire of a request."""
    messages: int
    """Messages of a request."""
    step_time: float | None = None
    """Predicted seconds per training step or inference; None if unpredictable."""
    notes: str = ""
    """Remarks for the table of `testbed plan`."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values, as JSON, for `testbed plan --json`."""


@dataclass(frozen=True)
class PlanningProblem(Generic[ProblemOptions]):
    """The input of a planner. On a device, the problem contains only the facts returned by `Method.facts`."""

    devices: tuple[DeviceSpec, ...]
    """Devices in the order of the scenario; in most methods the first is the coordinator."""
    links: Mapping[Pair, Link]
    workload: WorkloadPart
    options: ProblemOptions
    seed: int

    def device(self, name: str) -> DeviceSpec:
        """Return a device by name."""
        return next(device for device in self.devices if device.name == name)

    def with_links_of(self, device: str) -> Self:
        """Return the problem with only the links from and to a device."""
        pairs = self._pairs_by_device.get(device, ())
        return replace(self, links=_LinksOf(self.links, device, pairs))

    @cached_property
    def _pairs_by_device(self) -> Mapping[str, Sequence[Pair]]:
        """The links from and to each device, in the order of all links."""
        # Grouped once for all devices: a search for each would be quadratic in a mesh.
        pairs: dict[str, list[Pair]] = {}
        for pair in self.links:
            for name in pair:
                pairs.setdefault(name, []).append(pair)
        return pairs


class _LinksOf(Mapping[Pair, Link]):
    """View of the links of one device without a copy: a mesh of 1,000 devices has a million links."""

    def __init__(
        self, links: Mapping[Pair, Link], device: str, pairs: Sequence[Pair]
    ) -> None:
        self._links = links
        self._device = device
        self._pairs = pairs

    def __getitem__(self, pair: Pair) -> Link:
        if self._device not in pair:
            raise KeyError(pair)
        return self._links[pair]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


@dataclass(frozen=True)
class ProgramContext(Generic[ProblemOptions, DetailsType]):
    """The input of a device's program."""

    problem: PlanningProblem[ProblemOptions]
    plan: Plan[DetailsType]
    shared: Any = None
    """The `Method.simulation_state`, one object for all devices of a simulation; None on containers."""


StepsOrTime = Annotated[
    Annotated[int, Field(ge=1, le=MOST_STEPS), Tag("[steps]")]
    | Annotated[Duration, Field(gt=0), Tag("[time]")],
    Discriminator(
        lambda value: "[time]" if isinstance(value, str | float) else "[steps]"
    ),
]
"""An interval in steps or rounds, or as a duration such as 30s."""


Capability = Literal[
    "all_links",
    "all_samples",
    "early_stopping",
    "fixed_units",
    "initial_weights",
    "precisions",
    "retirement",
    "smaller_batches",
    "stacked",
    "tied_weights",
    "timing_only",
]
"""An optional feature that a method's programs support.

- ``all_links``: the coordinator replans when devices leave or join, and therefore receives the links of all devices.
- ``all_samples``: every device of the plan receives all samples, since it reads a part of each; otherwise
  `Method.data_owners` names the devices with samples.
- ``early_stopping``: training respects ``until``, ``patience`` and ``best``, with an option ``evaluate_every``.
- ``fixed_units``: devices keep their units for the whole run, so given weights which are frozen are placed on all
  devices before the run; otherwise messages carry them. Frozen weights from the seed are on every device anyway.
- ``initial_weights``: the program on the coordinator begins with `ProgramContext.weights`.
- ``precisions``: devices compute in the precision of the scenario; otherwise in float32 only.
- ``retirement``: a device's program hands over its state and returns once `Device.leaving` is true.
- ``smaller_batches``: the last batch of an epoch may be smaller (``workload.drop_last: false``).
- ``stacked``: similar devices can be computed together (``workload.numerics: stacked``).
- ``tied_weights``: several devices train copies of one weight as one; otherwise no plan may divide its units.
- ``timing_only``: programs can run without numbers (``workload.numerics: none``).
"""
_FORMER = {
    "frozen_placed": "fixed_units",
    "judges": "early_stopping",
    "odd_batches": "smaller_batches",
    "precisions": "precisions",
    "replans": "all_links",
    "retires": "retirement",
    "samples_everywhere": "all_samples",
    "stacks": "stacked",
    "sums_tied": "tied_weights",
    "takes_weights": "initial_weights",
    "timing_only": "timing_only",
}
"""Class attributes of version 1.0 and the capabilities that replace them."""


class Method(ABC, Generic[MethodOptions, MethodDetails]):
    """A published system or a baseline, with method-specific types of options and plan details.

    Stateless: state lives in the programs. Problem and context have the types of the supported workloads:
    `PlanningProblem` and `ProgramContext`, or classes that a workload derives from them
    (`testbed.workload.Workload.extend_problem`).

    >>> class Idle(Method):
    ...     name, summary, tasks = "idle", "does nothing", ("train",)
    ...     def plan(self, problem):
    ...         return Plan(method=self.name, coordinator=problem.devices[0].name, assignments=())
    ...     async def program(self, device, context):
    ...         await device.sleep(1.0)
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `testbed show methods`."""
    tasks: ClassVar[tuple[str, ...]]
    """Supported workloads, as in the scenario's `task`."""
    Options: type[MethodOptions] = Options  # type: ignore[assignment]  # the default of its type
    Details: type[MethodDetails] = PlanDetails  # type: ignore[assignment]  # the default of its type
    needs_torch: ClassVar[bool] = True
    """Whether devices import the workload's libraries, such as torch, before the program starts. Devices without these
    libraries start sooner and use much less memory."""
    supports: ClassVar[frozenset[Capability]] = frozenset()
    """Optional features supported by the method; see `Capability`."""
    span_names: ClassVar[frozenset[str] | None] = None
    """Names of the spans recorded by devices, used to reject fault triggers that never fire; None if unknown."""
    declared: ClassVar[MetricsSpec] = MetricsSpec()
    """Metrics, events, rows and tables defined by the method."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Reject class attributes without effect."""
        super().__init_subclass__(**keywords)
        remedies = {"begins": "write `span_names` instead"}
        for name, capability in _FORMER.items():
            remedies[name] = f"write '{capability}' in `supports` instead"
        reject_former_names(cls, remedies)

    @abstractmethod
    def plan(self, problem: Any) -> Plan[MethodDetails]:
        """Assign the work to devices. Pure. Raises `InputError` with a suggestion if no plan fits."""

    @abstractmethod
    async def program(self, device: Device, context: Any) -> None:
        """Run one device, in the role assigned by the plan. Runs again from the start after a restart."""

    def facts(
        self, problem: Any, plan: Plan[MethodDetails], device: str
    ) -> tuple[Any, Plan[MethodDetails]]:
        """Return the facts of problem and plan for a device's program. Pure.

        The program sees nothing else on either clock. By default, a device gets its own links (all links with the
        capability `all_links`) and its own part of the plan; the coordinator gets the whole plan.
        """
        if "all_links" not in self.supports or device != plan.coordinator:
            problem = problem.with_links_of(device)
        return problem, plan.part_of(device)

    def simulation_state(self, problem: Any) -> Any:
        """Return an object for joint computations of a simulation's devices; None if each device computes alone."""
        return None

    def largest_messages(
        self, problem: Any, plan: Plan[MethodDetails]
    ) -> Iterable[PlannedMessage]:
        """Return the largest messages of a run without faults. Pure.

        The plan is rejected if a device cannot hold one of these messages. Empty by default.
        """
        return ()

    def alternatives(self, problem: Any) -> tuple[Alternative, ...]:
        """Return all candidate plans, for `testbed plan`. Pure. Empty by default."""
        return ()

    def advice(self, problem: Any, plan: Plan[MethodDetails]) -> tuple[str, ...]:
        """Return warnings about likely mistakes, each with a remedy, for `testbed plan` and `validate`. Pure."""
        return ()

    def draw(self, plan: Plan[MethodDetails]) -> str | None:
        """Render the order of the work as lines of text for `testbed plan`; None if not applicable."""
        return None

    def spans(self, plan: Plan, device: str) -> frozenset[str] | None:
        """Return the span names of a device; by default `span_names`. A method may return fewer for a given plan."""
        return self.span_names
