"""The agent in real processes on loopback: requests, programs, messages, faults. No containers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import LoopbackDevice, deployment

from testbed.trace.events import Event


@pytest.fixture(scope="module")
def booted() -> Iterator[list[LoopbackDevice]]:
    devices = [LoopbackDevice("a", 0), LoopbackDevice("b", 1)]
    for device in devices:
        device.boot()
    yield devices
    for device in devices:
        device.kill()


@pytest.fixture
def pair(booted: list[LoopbackDevice]) -> Iterator[list[LoopbackDevice]]:
    """Two agents that run nothing."""
    yield booted
    for device in booted:
        if device.process is None or device.process.poll() is not None:
            device.boot()
        elif device.agent.health()["state"] == "running":
            device.agent.stop()


def run(devices: list[LoopbackDevice], do: str, **options: Any) -> dict[str, list[Event]]:
    """Run a scripted program on all to its end; return each one's events."""
    seen = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(lambda device: device.agent.deploy(deployment(device, devices, do, **options)), devices))
        for device in devices:
            seen[device.name] = int(device.agent.metrics()["testbed_events_total"])
        origin = time.monotonic() + 0.05
        for device in devices:
            device.agent.start(origin)
        events = pool.map(lambda device: list(device.agent.events(seen[device.name])), devices)
        return dict(zip([device.name for device in devices], events, strict=True))


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.event == name]


def test_programs_exchange_tensors(pair: list[LoopbackDevice]) -> None:
    events = run(pair, "ping", count=5, size=1 << 20)
    states = [event.fields["state"] for event in named(events["a"], "state")]
    assert states == ["up", "started", "finished"]
    assert [event.fields["number"] for event in named(events["a"], "log")] == [0, 1, 2, 3, 4]
    sends = named(events["a"], "send")
    assert len(sends) == 5
    assert all(event.fields["peer"] == "b" and event.fields["bytes"] > 1 << 20 for event in sends)
    receives = named(events["b"], "receive")
    assert [event.fields["message"] for event in receives] == ["ping"] * 5
    print([round(e.fields["sent"] * 1e3, 2) for e in named(events["a"], "log")])
