"""A finished run as figures are computed from it: its events, and what several figures need, each computed once."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from testbed.experiment import Experiment
from testbed.plan import Plan
from testbed.trace.disturbances import Recovery, Strike, recoveries, strikes
from testbed.trace.events import Event, EventType
from testbed.trace.gantt import Bar, bars, run_end
from testbed.trace.intervals import Interval, overlaps, union
from testbed.trace.outcome import Outcome

Computed = TypeVar("Computed")
Tell = Callable[[Recovery, "Record"], dict[str, Any]]
"""What a method adds to an item of ``recovery_list``, from the phases that its ``recovery`` events name."""


@dataclass(frozen=True)
class Step:
    """A training step as one device reported it."""

    device: str
    step: int
    time: float
    """When it was done."""
    seconds: float
    """Since the step before it of the same device, or the start of the workload."""
    loss: float | None
    samples: int | None
    comparable: bool
    """Whether it is not the device's first and has no evaluation in its time, unless there is one in that of most."""
    usual: bool
    """Whether it is comparable and has as many samples as most."""
    steady: bool
    """Whether it is usual and nothing disturbed it: no fault, no recovery and no pause in its time."""

    @property
    def window(self) -> Interval:
        """When it was done."""
        return (self.time - self.seconds, self.time)


@dataclass(frozen=True)
class Standstill:
    """A stretch in which work stood still without a fault."""

    name: str
    """Of the event that ended it."""
    start: float
    end: float


def pauses(events: Sequence[Event], kinds: Collection[EventType]) -> list[Standstill]:
    """Return the pauses that a method's events tell of, in the order of their ends."""
    names = {kind.name for kind in kinds if kind.pause}
    return [
        Standstill(event.event, event.time - event.fields["seconds"], event.time)
        for event in events
        if event.event in names
    ]


class Record:
    """What a run left."""

    def __init__(
        self,
        outcome: Outcome,
        experiment: Experiment,
        plan: Plan,
        events: Collection[EventType] = (),
        recovery: Tell | None = None,
    ) -> None:
        """Take what was left; ``events`` and ``recovery`` are what the run's method declares (`Declared`)."""
        self.outcome = outcome
        self.experiment = experiment
        self.plan = plan
        self.tell_recovery = recovery
        self._own_events = events
        self._made: dict[Callable[[Record], object], object] = {}

    def once(self, compute: Callable[[Record], Computed]) -> Computed:
        """Return what a function makes of this record, computed when it is first asked for."""
        if compute not in self._made:
            self._made[compute] = compute(self)
        return self._made[compute]  # type: ignore[return-value]

    @cached_property
    def end(self) -> float:
        """Seconds until the lead's program had ended."""
        return run_end(self.outcome.events, self.plan.lead)

    @cached_property
    def events(self) -> list[Event]:
        """Those up to the end, in the order of time; ``outcome.events`` has the later ones as well."""
        return [event for event in self.outcome.events if event.time <= self.end]

    @cached_property
    def _named(self) -> Mapping[str, list[Event]]:
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.event].append(event)
        return found

    def of(self, name: str) -> list[Event]:
        """Return the events of one name, in the order of time."""
        return self._named.get(name, [])

    @cached_property
    def bars(self) -> Mapping[str, list[Bar]]:
        """What each device was doing when, in the order of their starts."""
        found: dict[str, list[Bar]] = defaultdict(list)
        for bar in bars(self.outcome.events, self.end):
            found[bar.device].append(bar)
        return found

    @cached_property
    def strikes(self) -> list[Strike]:
        """Every fault that struck."""
        return strikes(self.events)

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """Every fault that the method noticed."""
        return recoveries(self.events)

    @cached_property
    def pauses(self) -> list[Standstill]:
        """When work stood still without a fault, as the method declares."""
        return pauses(self.events, self._own_events)

    @cached_property
    def last_change(self) -> float:
        """When the last recovery or pause was over; 0 without one."""
        resumed = [item.resumed for item in self.recoveries if item.resumed is not None]
        return max([0.0, *resumed, *(pause.end for pause in self.pauses)])

    @cached_property
    def disturbances(self) -> list[tuple[str, Interval]]:
        """What disturbed the run, and when: faults that did not mend, recoveries, pauses."""
        faults = [(f"{each.action} {each.target}", each.window(self.end)) for each in self.strikes if not each.mends]
        recovering = [
            ("recovery", (each.detected, self.end if each.resumed is None else each.resumed))
            for each in self.recoveries
        ]
        standing = [(pause.name, (pause.start, pause.end)) for pause in self.pauses]
        return [*faults, *standing, *recovering]

    @cached_property
    def steps(self) -> list[Step]:
        """Every training step that was reported, in the order of time; those done again after a fault stand twice."""
        done = self.of("step")
        before: dict[str, float] = {}
        windows: list[Interval] = []
        for event in done:
            windows.append((before.get(event.device, 0.0), event.time))
            before[event.device] = event.time
        sized = [event.fields.get("samples") == self._samples for event in done]
        comparable = self._comparable(done, windows, sized)
        disturbed = [interval for _, interval in self.disturbances]
        return [
            Step(
                event.device,
                event.fields.get("step"),  # type: ignore[arg-type]
                event.time,
                window[1] - window[0],
                event.fields.get("loss"),
                event.fields.get("samples"),
                one,
                one and alike,
                one and alike and not overlaps(window, disturbed),
            )
            for event, window, one, alike in zip(done, windows, comparable, sized, strict=True)
        ]

    @cached_property
    def _samples(self) -> int | None:
        """The number of samples that most steps have."""
        counted = Counter(event.fields.get("samples") for event in self.of("step"))
        return counted.most_common(1)[0][0] if counted else None

    def _comparable(self, done: Sequence[Event], windows: Sequence[Interval], sized: Sequence[bool]) -> list[bool]:
        """Return of each step whether it is `Step.comparable`."""
        met: set[str] = set()
        later = []
        for event in done:
            later.append(event.device in met)
            met.add(event.device)
        alike = [one and other for one, other in zip(later, sized, strict=True)]
        evaluated = [event.time for event in self.of("evaluate")]
        alone = [bisect_right(evaluated, start) == bisect_right(evaluated, end) for start, end in windows]
        mostly_alone = 2 * sum(one and other for one, other in zip(alike, alone, strict=True)) >= sum(alike)
        return [one and (other or not mostly_alone) for one, other in zip(later, alone, strict=True)]

    @cached_property
    def steady(self) -> list[Step]:
        """The undisturbed steps; all where none is undisturbed."""
        return [step for step in self.steps if step.steady] or self.steps

    @cached_property
    def served(self) -> list[Interval]:
        """When each request was under way."""
        return [(event.time - event.fields["latency"], event.time) for event in self.of("request")]

    @cached_property
    def phase(self) -> list[Interval]:
        """The stretches that step times and latencies are taken from; the whole run where there are none."""
        steady = [step.window for step in self.steps if step.steady]
        return union(steady or self.served) or [(0.0, self.end)]


def after(steps: Sequence[Step], moment: float) -> list[Step]:
    """Return the undisturbed steps that began after a moment; all but the first where a fault outlasts the run."""
    rows = [step for step in steps if step.window[0] >= moment]
    return [step for step in rows if step.steady] or rows[1:]
