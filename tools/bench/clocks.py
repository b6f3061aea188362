"""The two clocks: emulated and simulated step time of the quickstart, and the speed of the simulator."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.ml.data import load as load_data
from testbed.ml.preparation import workload_section
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed_controller.running.emulation import emulate
from tools.bench.measurement import Measurement
from tools.bench.simulation import messages_per_second

TOLERANCE = 0.1
"""Maximum relative difference of the quickstart's step times on the two clocks."""
MESSAGES_PER_SECOND = 50_000
"""Minimum speed of the simulator, for each second of processor time."""


def measure() -> Iterator[Measurement]:
    """Yield the messages per second of the simulator and the ratio of the quickstart's two step times."""
    speed = messages_per_second()
    detail = f"{speed.messages} messages between {speed.devices} devices"
    yield Measurement(
        "simulator",
        speed.rate,
        "messages/s",
        MESSAGES_PER_SECOND,
        at_most=False,
        detail=detail,
    )
    prepared = prepare(trials(load("quickstart"))[0])
    dataset = load_data(workload_section(prepared.scenario).data)
    predicted = simulate(prepared, dataset)
    # On a busy host, links outside their tolerance would end the run without a measurement.
    measured = emulate(prepared, dataset, accept_links=True)
    step = {}
    for outcome in (predicted, measured):
        run_metrics = metrics(outcome, prepared.experiment, prepared.plan)
        step[outcome.runtime] = run_metrics["step_time"]
    yield Measurement("step of the quickstart, simulated", step["simulate"], "s")
    yield Measurement("step of the quickstart, emulated", step["emulate"], "s")
    difference = abs(step["emulate"] / step["simulate"] - 1)
    name = "step of the quickstart, emulated away from simulated"
    yield Measurement(name, difference, "", TOLERANCE)
