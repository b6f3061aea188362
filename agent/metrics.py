"""``GET /metrics`` in Prometheus' text format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from agent.device import RealDevice
    from agent.runner import Runner

_LEARNED = {
    "loss": "Loss of the last training step.",
    "accuracy": "Accuracy of the last test.",
    "test_loss": "Loss of the last test.",
}
STATES = ("idle", "ready", "running", "finished", "failed", "stopped")


def resident_bytes() -> int:
    """Return the memory this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def memory_limit() -> int | None:
    """Return what the container may hold, where that is limited."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            # Version 1 writes "no limit" as the largest number of pages.
            return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def exposition(runner: Runner) -> bytes:
    """Return what the device did and holds."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(runner))
    return generate_latest(registry)


class _Metrics(Collector):
    """Reads the metrics of a device off its programs when they are asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        runner = self._runner
        states = GaugeMetricFamily("testbed_state", "1 for the state the device is in.", labels=["state"])
        for state in STATES:
            states.add_metric([state], state == runner.state)
        yield states
        yield _gauge("resident_bytes", "Memory the agent holds.", resident_bytes())
        yield _gauge("speed_factor", "Share of its own speed that the processor goes at.", runner.pace.factor)
        yield _counter("events", "Events recorded.", runner.log.count)
        if runner.device is not None:
            yield from _of_program(runner.device)


def _of_program(device: RealDevice) -> Iterator[Metric]:
    totals = device.totals
    yield _counter("compute_seconds", "Time the program's work took on this device.", totals.compute_seconds)
    yield _counter("deficit_seconds", "Time by which the host was slower than the device.", totals.deficit_seconds)
    yield _counter("late_seconds", "Time by which the host made the program's work late.", totals.late_seconds)
    yield _counter("sent_bytes", "Bytes of acknowledged messages and of casts.", totals.bytes_sent)
    yield _counter("received_bytes", "Bytes of messages that arrived.", totals.bytes_received)
    yield _counter("sent_messages", "Messages acknowledged, and casts.", totals.messages_sent)
    yield _counter("received_messages", "Messages that arrived.", totals.messages_received)
    yield _counter("steps", "Training steps that this device recorded.", totals.steps)
    yield _counter("requests", "Inferences that this device recorded.", totals.requests)
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
