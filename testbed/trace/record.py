"""View of a finished run for computing metrics, with cached intermediate results."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import and_
from typing import Any, TypeVar

from testbed.common.lazy import np
from testbed.experiment import Experiment
from testbed.plan import Plan
from testbed.trace.disturbances import Recovery, Strike, recoveries, strikes
from testbed.trace.events import Event, EventType
from testbed.trace.gantt import BarKind, run_end, spans
from testbed.trace.intervals import (
    Interval,
    Intervals,
    in_order,
    intervals,
    overlaps,
    union,
)
from testbed.trace.log import EventLog
from testbed.trace.outcome import Outcome

Computed = TypeVar("Computed")
DescribeRecovery = Callable[[Recovery, "RunView"], dict[str, Any]]
"""Function that extends an entry of ``recovery_list`` from the phases of ``recovery`` events."""


# With slots, since a long run has a million.
@dataclass(frozen=True, slots=True)
class Step:
    """A training step as reported by one device."""

    device: str
    step: int
    time: float
    """End time of the step."""
    seconds: float
    """Duration since the device's previous step or the start of the workload."""
    loss: float | None
    samples: int | None
    comparable: bool
    """Whether the step is not the device's first, and contains an evaluation only if most steps do."""
    usual: bool
    """Whether the step is comparable and has the most frequent number of samples."""
    steady: bool
    """Whether the step is usual and undisturbed by faults, recoveries or pauses."""

    @property
    def window(self) -> Interval:
        """Return start and end of the step."""
        return (self.time - self.seconds, self.time)


@dataclass(frozen=True)
class Standstill:
    """A stretch in which work stood still without a fault."""

    name: str
    """Name of the event at its end."""
    start: float
    end: float


def pauses(events: Sequence[Event], kinds: Collection[EventType]) -> list[Standstill]:
    """Return the pauses reported by a method's events, in the order of their ends."""
    names = [kind.name for kind in kinds if kind.pause]
    standstills = []
    for event in EventLog.made_of(events).of(*names):
        start = event.time - event.fields["seconds"]
        standstills.append(Standstill(event.event, start, event.time))
    return standstills


class RunView:
    """Access to the events and facts of a finished run."""

    def __init__(
        self,
        outcome: Outcome,
        experiment: Experiment,
        plan: Plan,
        events: Collection[EventType] = (),
        recovery: DescribeRecovery | None = None,
    ) -> None:
        """Wrap an outcome; ``events`` and ``recovery`` come from the method's `MetricsSpec`."""
        self.outcome = outcome
        self.log = EventLog.made_of(outcome.events)
        self.experiment = experiment
        self.plan = plan
        self.describe_recovery = recovery
        self._own_events = events
        self._made: dict[Callable[[RunView], object], object] = {}

    def cached(self, compute: Callable[[RunView], Computed]) -> Computed:
        """Return the result of a function of this view, computed once."""
        if compute not in self._made:
            self._made[compute] = compute(self)
        return self._made[compute]  # type: ignore[return-value]

    @cached_property
    def end(self) -> float:
        """Seconds until the coordinator's program had ended."""
        return run_end(self.log, self.plan.coordinator)

    @cached_property
    def events(self) -> EventLog:
        """Events until the end in the order of time; ``log`` also has later ones."""
        return self.log.within(-math.inf, self.end)

    def of(self, name: str) -> EventLog:
        """Return the events of one name, in the order of time."""
        return self.events.of(name)

    @cached_property
    def _spans_by_device(
        self,
    ) -> Mapping[str, Mapping[BarKind, Mapping[str, Intervals]]]:
        return spans(self.log, self.end)

    def spans(self, device: str, kind: BarKind, label: str | None = None) -> Intervals:
        """Return when a device did something, as (n, 2) seconds in the order of starts; of one label, or of all."""
        labels = self._spans_by_device.get(device, {}).get(kind, {})
        matching = [own for name, own in labels.items() if label in (None, name)]
        if len(matching) == 1:
            return matching[0]
        return in_order(np.concatenate(matching)) if matching else np.empty((0, 2))

    @cached_property
    def strikes(self) -> list[Strike]:
        """All injected faults."""
        return strikes(self.events)

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """All faults detected by the method."""
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
        """Time spans of disturbances: faults except repairs, recoveries, pauses."""
        named: list[tuple[str, Interval]] = []
        for strike in self.strikes:
            if not strike.is_repair:
                name = f"{strike.action} {strike.target}"
                named.append((name, strike.window(self.end)))
        for pause in self.pauses:
            named.append((pause.name, (pause.start, pause.end)))
        for recovery in self.recoveries:
            until = self.end if recovery.resumed is None else recovery.resumed
            named.append(("recovery", (recovery.detected, until)))
        return named

    @cached_property
    def steps(self) -> list[Step]:
        """All reported training steps in the order of time; repeated steps appear twice."""
        done = list(self.of("step").rows("device", "time", "step", "loss", "samples"))
        if not done:
            return []
        devices, times, _, _, sizes = zip(*done, strict=True)
        windows = _step_windows(zip(devices, times, strict=True))
        # The last batch of an epoch may be smaller: its step takes less time than the others.
        usual_size, _ = Counter(sizes).most_common(1)[0]
        whole = [samples == usual_size for samples in sizes]
        comparable = self._comparable_flags(devices, windows, whole)
        disturbed = [interval for _, interval in self.disturbances]
        steps = []
        rows = zip(done, windows, comparable, whole, strict=True)
        for row, window, is_comparable, is_whole in rows:
            device, time, number, loss, samples = row
            usual = is_comparable and is_whole
            steps.append(
                Step(
                    device=device,
                    step=number,
                    time=time,
                    seconds=window[1] - window[0],
                    loss=loss,
                    samples=samples,
                    comparable=is_comparable,
                    usual=usual,
                    steady=usual and not overlaps(window, disturbed),
                )
            )
        return steps

    def _comparable_flags(
        self, names: Sequence[str], windows: Sequence[Interval], whole: Sequence[bool]
    ) -> list[bool]:
        """Return, for each step of the given devices, the value of `Step.comparable`."""
        # The first step of a device has its start in it: weights are sent, caches are cold.
        met: set[str] = set()
        later = []
        for name in names:
            later.append(name in met)
            met.add(name)
        # Training stands still during an evaluation, so its step is longer than the others.
        evaluated = [event.time for event in self.of("evaluate")]
        undivided = [
            bisect_right(evaluated, start) == bisect_right(evaluated, end)
            for start, end in windows
        ]
        # If most steps contain an evaluation, those without one are the exception, and all are compared.
        candidates = list(compress(undivided, map(and_, later, whole)))
        if 2 * sum(candidates) < len(candidates):
            return later
        return list(map(and_, later, undivided))

    @cached_property
    def steady(self) -> list[Step]:
        """The undisturbed steps; all where none is undisturbed."""
        return [step for step in self.steps if step.steady] or self.steps

    @cached_property
    def served(self) -> list[Interval]:
        """When each request was under way."""
        rows = self.of("request").rows("time", "latency")
        return [(time - latency, time) for time, latency in rows]

    @cached_property
    def phase(self) -> Intervals:
        """Time spans used for step times and latencies; the whole run by default."""
        steady = [step.window for step in self.steps if step.steady]
        stretches = union(steady or self.served)
        return stretches if len(stretches) else intervals([(0.0, self.end)])


def steps_after(steps: Sequence[Step], moment: float) -> list[Step]:
    """Return the undisturbed steps started after a time; all except the first for a permanent fault."""
    later = [step for step in steps if step.window[0] >= moment]
    # The first step after a change still fills the pipeline.
    return [step for step in later if step.steady] or later[1:]


def _step_windows(ends: Iterable[tuple[str, float]]) -> list[Interval]:
    """Return the window of each step, from the end of the device's previous step (or 0) to its own end."""
    before: dict[str, float] = {}
    windows = []
    for device, time in ends:
        windows.append((before.get(device, 0.0), time))
        before[device] = time
    return windows
