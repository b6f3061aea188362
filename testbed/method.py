"""What a method is: options, a planner and a program for every device, and nothing else."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import TypeVar

from testbed.common.errors import nearest
from testbed.common.part import ConfigModel
from testbed.common.quantities import Duration
from testbed.device import Device
from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.plan import Details, Plan, PlanDetails
from testbed.trace.metrics_spec import MetricsSpec
from testbed.work import MOST_STEPS, WorkloadPart

Baselines = Mapping[str, Mapping[str, Any]]
"""Options by the name of a baseline, which stands for them."""


class Options(ConfigModel):
    """Base of a method's options: unknown keys are refused; `testbed show methods` shows each one's docstring."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    baselines: ClassVar[Baselines] = {}
    """What the method's publication compares it with; who declares any has a field `baseline`, which names one."""

    @model_validator(mode="before")
    @classmethod
    def _of_baseline(cls, value: Any) -> Any:
        """Set the options that a baseline stands for."""
        name = value.get("baseline") if cls.baselines and isinstance(value, dict) else None
        if name is None:
            return value
        if not isinstance(name, str) or name not in cls.baselines:
            raise ValueError(f"there is no baseline '{name}': {nearest(str(name), cls.baselines)}")
        for key, fixed in cls.baselines[name].items():
            if value.get(key, fixed) != fixed:
                raise ValueError(f"the baseline '{name}' stands for {key}: {json.dumps(fixed)}: leave '{key}' out")
        return {**value, **cls.baselines[name]}


MethodOptions = TypeVar("MethodOptions", bound=Options, default=Options)
"""A method's options."""
ProblemOptions = TypeVar("ProblemOptions", bound=Options, default=Options, covariant=True)
"""The same where they are only read: a problem with a pipeline's options is a problem with options."""
MethodDetails = TypeVar("MethodDetails", bound=Details, default=Details)
"""What a method's plans say beyond their pieces."""


PlannedMessage = tuple[str, str, float]
"""Sender, receiver and bytes of a message that a plan foresees."""


@dataclass(frozen=True)
class Alternative:
    """One way in which a method could do the work, with what it would take of each device and of the network."""

    name: str
    chosen: bool
    """Whether it is the plan's."""
    fits: bool
    """Whether every device has the memory."""
    weights: Mapping[str, int]
    """Elements of weights on each device; biases and normalisation left out."""
    memory: Mapping[str, float]
    """Bytes that each device needs."""
    longest_path: int
    """Multiplications one after the other, for one sample."""
    communication: float
    """Elements of one sample that go over the network, by the formulas of the method's paper."""
    elements: int
    """The same as they are sent."""
    wire_bytes: float
    """Bytes on the wire of a request."""
    messages: int
    """Messages of a request."""
    step_time: float | None = None
    """Predicted seconds per training step or inference, where the planner can predict them."""
    notes: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values of JSON."""


@dataclass(frozen=True)
class Problem(Generic[ProblemOptions]):
    """Everything a planner may look at; a device's program knows of it what `Method.facts` says."""

    devices: tuple[DeviceSpec, ...]
    """Devices in the order of the scenario; the first is the source."""
    links: Mapping[Pair, Link]
    workload: WorkloadPart
    options: ProblemOptions
    seed: int

    def device(self, name: str) -> DeviceSpec:
        """Return the device of that name."""
        return next(device for device in self.devices if device.name == name)

    def with_links_of(self, device: str) -> Self:
        """Return the same with the links from and to a device alone."""
        return replace(self, links=_LinksOf(self.links, device, self._pairs.get(device, ())))

    @cached_property
    def _pairs(self) -> Mapping[str, Sequence[Pair]]:
        """The links from and to each device, in the order of all."""
        found: dict[str, list[Pair]] = {}
        for pair in self.links:
            for name in pair:
                found.setdefault(name, []).append(pair)
        return found


class _LinksOf(Mapping[Pair, Link]):
    """The links of one device among those of all, of which it keeps no copy: in a mesh of 1,000 there are a million."""

    def __init__(self, links: Mapping[Pair, Link], device: str, pairs: Sequence[Pair]) -> None:
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
class Job(Generic[ProblemOptions, PlanDetails]):
    """What a device's program is started with."""

    problem: Problem[ProblemOptions]
    plan: Plan[PlanDetails]
    shared: Any = None
    """The `Method.simulation_state`, one object for all devices of a simulation; None on containers."""


StepsOrTime = Annotated[
    Annotated[int, Field(ge=1, le=MOST_STEPS), Tag("[steps]")] | Annotated[Duration, Field(gt=0), Tag("[time]")],
    Discriminator(lambda value: "[time]" if isinstance(value, str | float) else "[steps]"),
]
"""How often: every so many steps or rounds, or after a time such as 30s."""


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
"""An ability of a method's programs.

all_links: the lead plans again as devices come and go, for which it is given the links of all.
all_samples: every device of the plan is given all samples, since it reads a part of each; else see `data_owners`.
early_stopping: it follows ``until``, ``patience`` and ``best`` of the training, by an option ``evaluate_every``.
fixed_units: devices keep their units for the whole run, so that given weights which are frozen are placed on all before
it; else messages carry them. Frozen weights of the seed are on every device anyway.
initial_weights: its program on the lead begins with `Job.weights`.
precisions: devices compute in the precision that the scenario gives them; else in float32 alone.
retirement: a device's program hands over what it holds and returns once `Device.leaving` is true.
smaller_batches: the last batch of an epoch may be smaller, as ``workload.drop_last: false`` asks for.
stacked: similar devices can be computed together, as ``workload.numerics: stacked`` asks for.
tied_weights: devices with a copy each of one weight train it as one; else no plan may divide its units.
timing_only: it can do without numbers, as ``workload.numerics: none`` asks for.
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
"""Class attributes of version 1.0 that are capabilities now."""


class Method(ABC, Generic[MethodOptions, MethodDetails]):
    """A published system, or a baseline, with options of its own type and details that its plans have.

    Stateless: state lives in the programs. The types of its problem and its job are those of the workloads that it can
    do: `Problem` and `Job`, or classes that a kind of work derives from them (`testbed.workload.Workload.problem`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `testbed show methods`."""
    tasks: ClassVar[tuple[str, ...]]
    """Workloads that it can do, by the `task` of scenarios."""
    Options: type[MethodOptions] = Options  # type: ignore[assignment]  # the default of its type
    Details: type[MethodDetails] = Details  # type: ignore[assignment]  # the default of its type
    needs_torch: ClassVar[bool] = True
    """Whether devices import the libraries of the workload, such as torch, before its program starts; without it they
    are ready sooner, and much smaller."""
    supports: ClassVar[frozenset[Capability]] = frozenset()
    """What a scenario may ask for, and what devices are given, beyond the least; see `Capability`."""
    begins: ClassVar[frozenset[str] | None] = None
    """Names of the spans that a device may begin, so that a fault on one that never comes is refused; None: unknown."""
    declared: ClassVar[MetricsSpec] = MetricsSpec()
    """Figures, events, rows and tables of its own."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse attributes that would have no effect."""
        super().__init_subclass__(**keywords)
        for name in _FORMER.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} has no effect: write '{_FORMER[name]}' in `supports` instead")

    @abstractmethod
    def plan(self, problem: Any) -> Plan[MethodDetails]:
        """Decide who holds what; pure. Raises `InputError` where no plan fits, saying what would."""

    @abstractmethod
    async def program(self, device: Device, job: Any) -> None:
        """Run on one device, whichever role the plan gives it. A device that restarts runs it again, empty."""

    def facts(self, problem: Any, plan: Plan[MethodDetails], device: str) -> tuple[Any, Plan[MethodDetails]]:
        """Return what the program of a device is to know of the problem and of the plan; pure.

        On either clock it sees nothing else. Unless a method says otherwise, that is the links from and to the device
        (see `Capability`, all_links), and its part of the plan; all of it on the lead.
        """
        everything = "all_links" in self.supports and device == plan.lead
        return problem if everything else problem.with_links_of(device), plan.part_of(device)

    def simulation_state(self, problem: Any) -> Any:
        """Return an object through which the devices of a simulation compute together; None where each is alone."""
        return None

    def largest_messages(self, problem: Any, plan: Plan[MethodDetails]) -> Iterable[PlannedMessage]:
        """Return the largest messages of a run without faults; pure.

        A plan is refused whose devices cannot hold one of them. None, unless a method knows some.
        """
        return ()

    def alternatives(self, problem: Any) -> tuple[Alternative, ...]:
        """Return the ways to choose from, for `testbed plan`; pure. None where a method has but one."""
        return ()

    def advice(self, problem: Any, plan: Plan[MethodDetails]) -> tuple[str, ...]:
        """Return what is probably not meant, each with what to do, for `testbed plan` and `validate`; pure."""
        return ()

    def draw(self, plan: Plan[MethodDetails]) -> str | None:
        """Draw the order of the work in lines of text, for `testbed plan`; None where there is nothing to draw."""
        return None

    def spans(self, plan: Plan, device: str) -> frozenset[str] | None:
        """Return `begins`; a method may know that a device of its plan begins fewer."""
        return self.begins
