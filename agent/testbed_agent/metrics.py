"""Metrics of a device in the text format of Prometheus, for ``GET /metrics``.

In Prometheus, a metric family is a metric name with one sample for each label value. A counter only rises; a gauge may
rise and fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed_agent.device import RealDevice
    from testbed_agent.runner import Runner

_STATES = ("idle", "ready", "running", "finished", "failed", "stopped")
"""States of `testbed_agent.runner.Runner`."""
_COUNTER_TEXTS = {
    "compute_seconds": "Computing time of the program on this device.",
    "deficit_seconds": "Time by which the host was slower than the device.",
    "late_seconds": "Time by which the host made the program's work late.",
    "sent_bytes": "Bytes of acknowledged messages and of broadcasts.",
    "received_bytes": "Bytes of received messages.",
    "sent_messages": "Acknowledged messages, and broadcasts.",
    "received_messages": "Received messages.",
    "steps": "Training steps recorded by this device.",
    "requests": "Inferences recorded by this device.",
}
"""Help texts of the counters in `testbed_agent.device.Totals.counts`."""
_LEARNING_TEXTS = {
    "loss": "Loss of the last training step.",
    "accuracy": "Accuracy of the last test.",
    "test_loss": "Loss of the last test.",
}
"""Help texts of the gauges in `testbed_agent.device.Totals.learned`."""


def render_metrics(runner: Runner, resident: int) -> bytes:
    """Return the device's metrics as Prometheus text; ``resident`` is the agent's memory in bytes."""
    states = {}
    for state in _STATES:
        states[f'{{state="{state}"}}'] = float(state == runner.state)
    lines = [
        *_family("state", "gauge", "1 for the device's current state.", states),
        *_gauge("resident_bytes", "Resident memory of the agent.", resident),
        *_gauge(
            "speed_factor",
            "Current speed of the processor as a multiple of its speed in the scenario.",
            runner.pace.factor,
        ),
        *_counter("events", "Events recorded.", runner.log.count),
    ]
    if runner.device is not None:
        lines += _program_metrics(runner.device)
    return "".join(f"{line}\n" for line in lines).encode()


def _program_metrics(device: RealDevice) -> Iterator[str]:
    totals = device.totals
    for name, text in _COUNTER_TEXTS.items():
        yield from _counter(name, text, totals.counts.get(name, 0.0))
    # Copies, here and below: the program's thread may add an entry during the iteration.
    for name, value in list(totals.learned.items()):
        yield from _gauge(name, _LEARNING_TEXTS[name], value)
    yield from _gauge(
        "inbox_messages", "Messages waiting for the program.", device.waiting
    )
    yield from _gauge(
        "inbox_bytes", "Memory of waiting and arriving messages.", device.inbox.bytes
    )
    yield from _gauge(
        "compute_queue", "Tasks waiting for the processor.", device.processors.waiting
    )
    queues = {}
    for peer, lane in list(device.lanes.items()):
        queues[f'{{peer="{peer}"}}'] = float(lane.waiting)
    yield from _family(
        "send_queue", "gauge", "Unacknowledged messages to each peer.", queues
    )


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> list[str]:
    """Return the lines of a metric family; ``samples`` are values by labels, such as ``{state="idle"}``.

    Label values are names of devices and states, which need no escaping.
    """
    full_name = f"testbed_{name}"
    lines = [f"# HELP {full_name} {text}", f"# TYPE {full_name} {kind}"]
    for labels, value in samples.items():
        lines.append(f"{full_name}{labels} {_format_number(value)}")
    return lines


def _format_number(value: float) -> str:
    """Return a number in Prometheus syntax."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _gauge(name: str, text: str, value: float) -> list[str]:
    return _family(name, "gauge", text, {"": value})


def _counter(name: str, text: str, value: float) -> list[str]:
    return _family(f"{name}_total", "counter", text, {"": value})
