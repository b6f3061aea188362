"""A small run, written by hand: two devices and five steps of one second; b is killed in the third and recovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.network.link import Link
from testbed.plan import Assignment, Plan
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario, Trial
from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.outcome import LinkMeasurement, Outcome
from testbed.trace.record import RunView
from testbed_controller.results.recorder import Recorder

LINK = Link(rate=8e6, delay=0.01)

SCENARIO: dict[str, Any] = {
    "name": "recorded",
    "seed": 3,
    "devices": {
        "a": {"speed": "1gflops"},
        "b": {"profile": "raspberry-pi-4b", "speed": "100mflops"},
    },
    "network": {"link": {"rate": "8mbit", "delay": "10ms"}},
    "workload": {
        "model": {"name": "cnn", "channels": 8},
        "method": {"name": "pipeline", "schedule": "1f1b"},
        "steps": 5,
        "batch_size": 32,
    },
    # The third step has batch 2, since batches count from 0.
    "faults": [
        {
            "kill": "b",
            "when": {"device": "b", "begins": "forward", "batch": 2},
            "for": "1s",
        }
    ],
}


def make_trial(**changes: Any) -> Trial:
    return trials(Scenario.model_validate(SCENARIO | changes))[0]


def make_plan() -> Plan:
    assignments = (
        Assignment(device="a", start=0, stop=1, memory=1e6),
        Assignment(device="b", start=1, stop=3, memory=2e6),
    )
    return Plan(
        method="pipeline", coordinator="a", assignments=assignments, step_time=0.9
    )


def _step(step: int, start: float) -> list[Event]:
    """Return the events of one training step.

    a computes for 0.2 s and sends for 0.1 s, b computes for 0.4 s and sends for 0.1 s, and a computes for 0.2 s.
    """
    return [
        Event(start, "a", "begin", {"span": "forward", "batch": step}),
        _compute(start + 0.2, "a", "forward", step, start, 0.2),
        _send(start + 0.3, "a", "b", start + 0.2),
        _receive(start + 0.3, "b", "a", start + 0.21),
        Event(start + 0.3, "b", "begin", {"span": "forward", "batch": step}),
        _compute(start + 0.7, "b", "forward", step, start + 0.3, 0.4, deficit=0.01),
        _send(start + 0.8, "b", "a", start + 0.7),
        _receive(start + 0.8, "a", "b", start + 0.71),
        Event(start + 0.8, "a", "begin", {"span": "backward", "batch": step}),
        _compute(start + 1.0, "a", "backward", step, start + 0.8, 0.2),
        Event(
            start + 1.0,
            "a",
            "step",
            {"step": step, "loss": 2.0 / (step + 1), "samples": 32},
        ),
    ]


def _compute(
    time: float,
    device: str,
    span: str,
    batch: int,
    start: float,
    duration: float,
    deficit: float = 0.0,
) -> Event:
    fields = {
        "span": span,
        "batch": batch,
        "start": start,
        "duration": duration,
        "flops": 1e8,
    }
    return Event(time, device, "compute", {**fields, "busy": 0.05, "deficit": deficit})


def _send(time: float, device: str, peer: str, start: float) -> Event:
    fields = {
        "peer": peer,
        "message": "activation",
        "bytes": 100_000,
        "start": start,
        "duration": time - start,
    }
    return Event(time, device, "send", {**fields, "queued": 0.0, "encode": 0.001})


def _receive(time: float, device: str, peer: str, start: float) -> Event:
    fields = {
        "peer": peer,
        "message": "activation",
        "bytes": 100_000,
        "start": start,
        "duration": time - start,
    }
    return Event(time, device, "receive", {**fields, "decode": 0.001})


def make_events(faulty: bool = True) -> list[Event]:
    """Return the events of the run; without the fault if not ``faulty``.

    Steps 0 and 1 end at 1 s and 2 s. In step 2, b is killed at 2.3 s and restarts at 3.4 s. The method detects the
    failure at 3 s and resumes at 4 s with step 1.
    """
    starts = [Event(0.0, name, "state", {"state": "started"}) for name in ("a", "b")]
    if not faulty:
        steps = []
        for step in range(5):
            steps += _step(step, start=float(step))
        end = [
            Event(5.5, "a", "evaluate", {"step": 4, "accuracy": 0.9, "loss": 0.3}),
            Event(5.6, "a", "state", {"state": "finished"}),
        ]
        return [*starts, *steps, *end]
    crash = [
        # The first four events of step 2: a has computed and sent, and b begins.
        *_step(2, start=2.0)[:4],
        Event(2.3, "b", "begin", {"span": "forward", "batch": 2}),
        Event(
            2.32,
            "testbed",
            "fault",
            {"action": "kill", "target": "b", "phase": "strike", "intended": 2.3},
        ),
        # Detected 0.68 s after the fault, and resumed 1 s after its detection.
        Event(3.0, "a", "recovery", {"phase": "detected", "step": 2, "missing": ["b"]}),
        Event(
            3.3,
            "testbed",
            "fault",
            {"action": "kill", "target": "b", "phase": "undo", "intended": 3.3},
        ),
        Event(3.4, "b", "state", {"state": "started"}),
        Event(4.0, "a", "recovery", {"phase": "resumed", "step": 1}),
    ]
    resumed = []
    for step, start in ((1, 4.0), (2, 5.0), (3, 6.0), (4, 7.0)):
        resumed += _step(step, start)
    end = [
        Event(8.5, "a", "evaluate", {"step": 4, "accuracy": 0.95, "loss": 0.25}),
        Event(8.6, "a", "state", {"state": "finished"}),
    ]
    return [*starts, *_step(0, 0.0), *_step(1, 1.0), *crash, *resumed, *end]


def make_links() -> list[LinkMeasurement]:
    # Both directions are within the tolerances of 8 Mbit/s and 10 ms.
    return [
        LinkMeasurement("a", "b", LINK, rate=7.9e6, delay=0.0101, loss=0.0, packets=50),
        LinkMeasurement("b", "a", LINK, rate=7.8e6, delay=0.0102, loss=0.0, packets=50),
    ]


def slow_down(events: list[Event], factor: float) -> list[Event]:
    """Return the events with all times and durations multiplied by ``factor``."""
    slower = []
    for event in events:
        fields = dict(event.fields)
        for key in ("start", "duration", "intended"):
            if key in fields:
                fields[key] *= factor
        slower.append(Event(event.time * factor, event.device, event.event, fields))
    return slower


def make_outcome(**changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "runtime": "emulate",
        "status": "finished",
        "events": make_events(),
        "links": make_links(),
        "host": {"backend": "userspace", "engine": "20.10"},
        "fidelity": {"host_load": 0.4, "host_saturated": 0.02},
        "wall_seconds": 12.5,
    }
    return Outcome(**(facts | changes))


def write_run(folder: Path, trial: Trial, plan: Plan, outcome: Outcome) -> Path:
    """Write a finished run to a folder."""
    return Recorder(folder, trial, plan, outcome.runtime).finish(outcome).path


def make_record(**changes: Any) -> RunView:
    """Return a view of the run, with ``trial`` and arguments of `make_outcome` replaced."""
    trial = changes.pop("trial", None) or make_trial()
    return RunView(make_outcome(**changes), trial.experiment, make_plan())


def make_calm_record(**changes: Any) -> RunView:
    """Return a view of the run without its fault."""
    calm = {"trial": make_trial(faults=()), "events": make_events(faulty=False)}
    return make_record(**(calm | changes))


def recorded_metrics(**changes: Any) -> dict[str, Any]:
    """Return the metrics of the run."""
    return metrics(make_outcome(**changes), make_trial().experiment, make_plan())


def calm_metrics(**changes: Any) -> dict[str, Any]:
    """Return the metrics of the run without its fault."""
    outcome = make_outcome(**({"events": make_events(faulty=False)} | changes))
    return metrics(outcome, make_trial(faults=()).experiment, make_plan())
