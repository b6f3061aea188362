"""`RunView`, the view of a finished run from which all metrics are computed.

Metrics call their `RunView` the record of the run. It computes steps, faults, recoveries and disturbances from the
events, and caches these results. A step is undisturbed (steady) if it is an ordinary step (`Step.usual`) and no fault,
recovery or pause overlaps it.
"""

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

Result = TypeVar("Result")
DescribeRecovery = Callable[[Recovery, "RunView"], dict[str, Any]]
"""Function that extends an entry of ``recovery_list`` from the phases of ``recovery`` events."""


# With slots, which save memory, since a long run has a million steps.
@dataclass(frozen=True, slots=True)
class Step:
    """A training step as reported by one device."""

    device: str
    step: int
    time: float
    """End time of the step."""
    seconds: float
    """Duration since the end of the device's previous step, or since the start of the workload."""
    loss: float | None
    """Training loss; None in a run without tensors."""
    samples: int | None
    """Number of training samples; None if the method does not report it."""
    comparable: bool
    """Whether the step is not the device's first, and contains no evaluation (unless most steps contain one)."""
    usual: bool
    """Whether the step is comparable and has the most frequent number of samples in the run."""
    steady: bool
    """Whether the step is usual and undisturbed by faults, recoveries or pauses."""

    @property
    def window(self) -> Interval:
        """Return start and end of the step."""
        return (self.time - self.seconds, self.time)


@dataclass(frozen=True)
class Standstill:
    """A pause of the work without a fault, such as a change of the model partition; times are seconds of the run."""

    name: str
    """Name of the event that the method recorded at the end of the pause."""
    start: float
    end: float


def pauses(
    events: Sequence[Event], event_types: Collection[EventType]
) -> list[Standstill]:
    """Return the pauses reported by the events of a method, in the order of their ends."""
    names = [event_type.name for event_type in event_types if event_type.pause]
    standstills = []
    for event in EventLog.made_of(events).of(*names):
        start = event.time - event.fields["seconds"]
        standstills.append(Standstill(event.event, start, event.time))
    return standstills


class RunView:
    """Access to the events and facts of a finished run.

    A metric is a function of it, such as ``lambda record: len(record.of("lost"))``.
    """

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
        """All events, also those after `end`."""
        self.experiment = experiment
        self.plan = plan
        self.describe_recovery = recovery
        self._method_events = events
        self._results: dict[Callable[[RunView], object], object] = {}

    def cached(self, compute: Callable[[RunView], Result]) -> Result:
        """Return the result of a function of the view, computed once."""
        if compute not in self._results:
            self._results[compute] = compute(self)
        return self._results[compute]  # type: ignore[return-value]

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
        """Return the intervals of a device's activities of one kind, (n, 2) in seconds, in the order of their starts.

        ``label`` restricts them to one span, or to one kind of message.
        """
        by_label = self._spans_by_device.get(device, {}).get(kind, {})
        matching = [rows for name, rows in by_label.items() if label in (None, name)]
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
        """All pauses of the work reported by the method."""
        return pauses(self.events, self._method_events)

    @cached_property
    def last_change(self) -> float:
        """End of the last recovery or pause in seconds of the run; 0 without any."""
        resumed = [item.resumed for item in self.recoveries if item.resumed is not None]
        return max([0.0, *resumed, *(pause.end for pause in self.pauses)])

    @cached_property
    def disturbances(self) -> list[tuple[str, Interval]]:
        """Name and interval of each disturbance: faults except repairs, recoveries and pauses."""
        disturbances: list[tuple[str, Interval]] = []
        for strike in self.strikes:
            if not strike.is_repair:
                name = f"{strike.action} {strike.target}"
                disturbances.append((name, strike.window(self.end)))
        for pause in self.pauses:
            disturbances.append((pause.name, (pause.start, pause.end)))
        for recovery in self.recoveries:
            until = self.end if recovery.resumed is None else recovery.resumed
            disturbances.append(("recovery", (recovery.detected, until)))
        return disturbances

    @cached_property
    def steps(self) -> list[Step]:
        """All reported training steps in the order of time; repeated steps appear twice."""
        rows = list(self.of("step").rows("device", "time", "step", "loss", "samples"))
        if not rows:
            return []
        devices, times, _, _, sizes = zip(*rows, strict=True)
        windows = _step_windows(zip(devices, times, strict=True))
        # The last batch of an epoch may be smaller: its step takes less time than the others.
        usual_size, _ = Counter(sizes).most_common(1)[0]
        has_usual_size = [samples == usual_size for samples in sizes]
        comparable = self._comparable_flags(devices, windows, has_usual_size)
        disturbed = [interval for _, interval in self.disturbances]
        steps = []
        for index, (device, time, number, loss, samples) in enumerate(rows):
            window = windows[index]
            is_comparable = comparable[index]
            usual = is_comparable and has_usual_size[index]
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
        self,
        devices: Sequence[str],
        windows: Sequence[Interval],
        has_usual_size: Sequence[bool],
    ) -> list[bool]:
        """Return `Step.comparable` of each step, given the device, the interval and the size of each step."""
        # The first step of a device includes its start: weights are sent, caches are cold.
        earlier_devices: set[str] = set()
        is_later = []
        for device in devices:
            is_later.append(device in earlier_devices)
            earlier_devices.add(device)
        # Training stops during an evaluation, so the step around it is longer than the others.
        evaluations = [event.time for event in self.of("evaluate")]
        without_evaluation = []
        for start, end in windows:
            before = bisect_right(evaluations, start)
            without_evaluation.append(before == bisect_right(evaluations, end))
        # If most steps contain an evaluation, the steps without one are the exception, and all steps are compared.
        candidates = list(
            compress(without_evaluation, map(and_, is_later, has_usual_size))
        )
        if 2 * sum(candidates) < len(candidates):
            return is_later
        return list(map(and_, is_later, without_evaluation))

    @cached_property
    def steady(self) -> list[Step]:
        """The undisturbed steps; all steps if none is undisturbed."""
        return [step for step in self.steps if step.steady] or self.steps

    @cached_property
    def request_windows(self) -> list[Interval]:
        """Interval of each request from start to answer."""
        rows = self.of("request").rows("time", "latency")
        return [(time - latency, time) for time, latency in rows]

    @cached_property
    def steady_phase(self) -> Intervals:
        """Intervals of the undisturbed steps, or of the requests in inference; by default the whole run."""
        steady = [step.window for step in self.steps if step.steady]
        phase = union(steady or self.request_windows)
        return phase if len(phase) else intervals([(0.0, self.end)])


def steps_after(steps: Sequence[Step], moment: float) -> list[Step]:
    """Return the undisturbed steps started after a moment.

    If a permanent fault disturbs all later steps, return all later steps except the first.
    """
    later_steps = [step for step in steps if step.window[0] >= moment]
    # The first step after a change still fills the pipeline.
    return [step for step in later_steps if step.steady] or later_steps[1:]


def _step_windows(ends: Iterable[tuple[str, float]]) -> list[Interval]:
    """Return the interval of each step, given device and end: from the end of the device's previous step, or 0."""
    previous_ends: dict[str, float] = {}
    windows = []
    for device, end in ends:
        windows.append((previous_ends.get(device, 0.0), end))
        previous_ends[device] = end
    return windows
