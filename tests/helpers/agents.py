"""Agents as processes, each on its own loopback address, driven through the agent's HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import requests

from testbed.deployment import Deployments
from testbed.hardware import DeviceSpec
from testbed.ml.method import Options, PlanningProblem
from testbed.ml.models import create
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.trace.events import Event
from testbed.wire.ports import CONTROL_PORT, DATA_PORT
from testbed.work import WorkloadPart
from testbed_controller.lab.clients import Agent
from tests.helpers.agent_programs import Scripted

TOKEN = "a-token-of-the-tests"
"""Authenticates requests of the controller."""
RUN_TOKEN = "a-token-of-the-run"
"""Authenticates messages between devices."""
HERE = Path(__file__).parent

# Test processes run in parallel on one machine: ports and addresses follow from the process id.
_CAST_PORT = 20000 + os.getpid() % 2000 * 20
"""A port from 20000 to 59980. All devices of a test share it, since a cast reaches one port of the loopback network."""


class LoopbackDevice:
    """An agent process in place of a device."""

    def __init__(
        self, name: str, index: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        # Two bytes of the address for the process, without 0 and 255, and one for the device.
        upper, lower = divmod(os.getpid(), 250)
        self.host = f"127.{1 + upper % 250}.{1 + lower}.{10 + index}"
        self.control_address = f"{self.host}:{CONTROL_PORT}"
        self.data_address = f"{self.host}:{DATA_PORT}"
        self.environment = environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.agent = Agent(f"http://{self.control_address}", TOKEN, name)

    def boot(self) -> None:
        """Start the process and wait for the agent's first response."""
        environment = os.environ | {
            "TESTBED_RUN": "test-run",
            "TESTBED_DEVICE": self.name,
            "TESTBED_TOKEN": TOKEN,
            "TESTBED_CONTROL_ADDRESS": self.control_address,
            "TESTBED_DATA_ADDRESS": self.data_address,
            "TESTBED_CAST_ADDRESS": f"0.0.0.0:{_CAST_PORT}",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "agent_programs.py")], env=environment
        )
        for _ in range(400):
            try:
                requests.get(f"http://{self.control_address}/health", timeout=5)
            except requests.ConnectionError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"agent {self.name} does not answer")

    def kill(self) -> None:
        """Kill the process, which simulates switching the device off."""
        if self.process is not None:
            # Some tests stop the process by SIGSTOP.
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


def make_deployment(
    device: LoopbackDevice,
    devices: list[LoopbackDevice],
    program: str,
    memory: float = 1e9,
    **options: Any,
) -> bytes:
    """Return the encoded deployment of one device for a program of `agent_programs`."""
    workload = {
        "model": {"name": "mlp"},
        "method": {"name": "scripted", "program": program, **options},
        "steps": 1,
    }
    names = [peer.name for peer in devices]
    specs = [DeviceSpec(name, speed=1e9, memory=memory) for name in names]
    problem: PlanningProblem[Any] = PlanningProblem(
        model=create("mlp", {}, (1, 28, 28), 10),
        devices=tuple(specs),
        links=dict.fromkeys(permutations(names, 2), Link()),
        workload=WorkloadPart.model_validate(workload),
        options=Options(),
        seed=0,
    )
    return Deployments(
        method=Scripted(),
        problem=problem,
        plan=Plan(method="scripted", coordinator="a", assignments=()),
        run="test-run",
        token=RUN_TOKEN,
        addresses={peer.name: peer.data_address for peer in devices},
        broadcast=f"127.255.255.255:{_CAST_PORT}",
    ).of(device.name)


def replace_fields(body: bytes, **changes: Any) -> bytes:
    """Return an encoded deployment with some fields replaced."""
    return json.dumps(json.loads(body) | changes).encode()


def count_events(device: LoopbackDevice) -> int:
    """Return the number of events since the boot; a reader that skips as many sees only new ones."""
    return int(device.agent.metrics()["testbed_events_total"])


def run_programs(
    devices: list[LoopbackDevice], program: str, **options: Any
) -> dict[str, list[Event]]:
    """Run a program of `agent_programs` on all devices, and return the events of each device."""

    def deploy(device: LoopbackDevice) -> None:
        device.agent.deploy(make_deployment(device, devices, program, **options))

    def read_events(device: LoopbackDevice) -> list[Event]:
        return list(device.agent.events(earlier_events[device.name]))

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(deploy, devices))
        earlier_events = {device.name: count_events(device) for device in devices}
        # All programs start at one instant, a little ahead of the requests.
        origin = time.monotonic() + 0.05
        for device in devices:
            device.agent.start(origin)
        events = pool.map(read_events, devices)
        return dict(zip(earlier_events, events, strict=True))


def start_and_wait(device: LoopbackDevice) -> None:
    """Start the deployed program and wait for the event of its start."""
    earlier_events = count_events(device)
    device.agent.start(time.monotonic())
    for event in device.agent.events(earlier_events):
        # In this state the device receives messages.
        if event.fields.get("state") == "started":
            return


def events_named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.event == name]


def field_of(events: list[Event], name: str, field: str) -> list[Any]:
    """Return one field of all events with a name."""
    return [event.fields[field] for event in events_named(events, name)]


def ask(
    device: LoopbackDevice,
    method: str,
    path: str,
    port: int = CONTROL_PORT,
    token: str = TOKEN,
    **options: Any,
) -> requests.Response:
    """Send an HTTP request with a token to the agent; ``options`` are those of `requests.request`."""
    headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
    return requests.request(
        method,
        f"http://{device.host}:{port}{path}",
        headers=headers,
        timeout=10,
        **options,
    )


def send_raw(device: LoopbackDevice, port: int, request: bytes) -> bytes:
    """Send bytes and the end of the stream, and return the response."""
    with socket.create_connection((device.host, port), timeout=10) as link:
        # The agent may respond and close the connection before it has read all.
        with contextlib.suppress(OSError):
            link.sendall(request)
            link.shutdown(socket.SHUT_WR)
        response = b""
        with contextlib.suppress(ConnectionResetError):
            while received := link.recv(65536):
                response += received
    return response


def request_head(method: str, path: str, *headers: str, token: str = TOKEN) -> bytes:
    """Return the head of an HTTP request for `send_raw`."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: agent",
        f"Authorization: Bearer {token}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
