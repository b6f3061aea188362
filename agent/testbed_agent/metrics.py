"""What a device did and holds, for Prometheus; imported with Flask, without a server of its library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from testbed_agent.device import RealDevice
    from testbed_agent.runner import Runner

_STATES = ("idle", "ready", "running", "finished", "failed", "stopped")
_COUNTED = {
    "compute_seconds": "Time the program's work took on this device.",
    "deficit_seconds": "Time by which the host was slower than the device.",
    "late_seconds": "Time by which the host made the program's work late.",
    "sent_bytes": "Bytes of acknowledged messages and of casts.",
    "received_bytes": "Bytes of messages that arrived.",
    "sent_messages": "Messages acknowledged, and casts.",
    "received_messages": "Messages that arrived.",
    "steps": "Training steps that this device recorded.",
    "requests": "Inferences that this device recorded.",
}
_LEARNED = {
    "loss": "Loss of the last training step.",
    "accuracy": "Accuracy of the last test.",
    "test_loss": "Loss of the last test.",
}


def exposition(runner: Runner, resident: int) -> bytes:
    """Return what the device did and holds; ``resident`` is the memory of the agent in bytes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(runner, resident))
    return generate_latest(registry)


class _Metrics(Collector):
    """Reads the metrics of a device off its programs when they are asked for."""

    def __init__(self, runner: Runner, resident: int) -> None:
        self._runner = runner
        self._resident = resident

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        runner = self._runner
        states = GaugeMetricFamily("testbed_state", "1 for the state the device is in.", labels=["state"])
        for state in _STATES:
            states.add_metric([state], state == runner.state)
        yield states
        yield _gauge("resident_bytes", "Memory the agent holds.", self._resident)
        yield _gauge("speed_factor", "Share of its own speed that the processor goes at.", runner.pace.factor)
        yield _counter("events", "Events recorded.", runner.log.count)
        if runner.device is not None:
            yield from _of_program(runner.device)


def _of_program(device: RealDevice) -> Iterator[Metric]:
    totals = device.totals
    for name, text in _COUNTED.items():
        yield _counter(name, text, totals.counts.get(name, 0.0))
    for name, value in list(totals.learned.items()):
        yield _gauge(name, _LEARNED[name], value)
    yield _gauge("inbox_messages", "Messages that wait for the program.", device.waiting)
    yield _gauge("inbox_bytes", "Memory of messages that wait or arrive.", device.inbox.bytes)
    yield _gauge("compute_queue", "Pieces of work that wait for the processor.", device.processors.waiting)
    queues = GaugeMetricFamily("testbed_send_queue", "Messages on their way to each peer.", labels=["peer"])
    for peer, lane in list(device.lanes.items()):
        queues.add_metric([peer], lane.waiting)
    yield queues


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"testbed_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    """Return a counter; its sample is called ``<name>_total``."""
    return CounterMetricFamily(f"testbed_{name}", text, value=value)
