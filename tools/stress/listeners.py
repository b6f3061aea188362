"""The listeners of a run, as targets of random messages: the two ports of a device, casts, the shaper, and the page.

The applications are those of the agent, the shaper and the page. Their effects are replaced: the shaper plans links
without applying them, and the page parses faults without injecting them.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import torch

from testbed.deployment import deployments
from testbed.faults.parts import ActionPart
from testbed.ml.data import load
from testbed.ml.data.dataset import pack
from testbed.ml.preparation import samples_of, workload_section
from testbed.network.link import Cell, Link, Pair
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import parse
from testbed.trace.outcome import LinkMeasurement
from testbed.wire import arrays
from testbed.wire.cast import CastEncoding
from testbed.wire.framing import CAST_CHUNK
from testbed.wire.message import Message, encode
from testbed.wire.serving import PatientServer
from testbed.wire.token import data_token
from testbed_agent.casting import Addresses, Caster, run_mark
from testbed_agent.control import create_application as control_application
from testbed_agent.receiving import Arrival, DataServer, Inbox
from testbed_agent.runner import Runner
from testbed_agent.settings import Settings
from testbed_controller.api import build
from testbed_controller.lab.clients import make_attachment
from testbed_controller.results.recorder import Recorder
from testbed_controller.shaping import plan as planning
from testbed_controller.shaping import sender, server
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.shaper import check_links
from testbed_controller.watch.server import application as page
from tools.stress.files import damage_bytes
from tools.stress.messages import (
    MAX_SECONDS,
    Application,
    Request,
    Target,
    call_target,
    port_target,
)

TOKEN = "t" * 32
BEARER = {"HTTP_AUTHORIZATION": f"Bearer {TOKEN}"}
ORIGIN = "http://127.0.0.1:4000"
ADDRESSES = {"source": "10.0.0.2:8701", "worker": "10.0.0.3:8701"}
MESSAGE = Message(
    "activation", {"step": 1, "to": ["a", {"b": None}]}, {"x": torch.ones(3, 4)}
)
INBOX = 1 << 20
"""Size of an inbox in bytes."""


def listeners(stack: ExitStack) -> dict[str, Target]:
    """Start the listeners of a new run and return the targets; closing the stack stops the listeners."""
    settings = Settings(run="r", device="source", token=TOKEN, data=("127.0.0.1", 0))
    data = DataServer(settings)
    runner = _make_runner(settings)
    data.inbox = _make_inbox("worker")
    loop = asyncio.new_event_loop()
    loop.call_soon(data.serve)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    stack.callback(loop.call_soon_threadsafe, loop.stop)
    body = deployments(prepared_run(), "r", TOKEN, ADDRESSES, None).of("source")
    runner.deploy(bytearray(body))
    deployment = Request("PUT", "/deployment", BEARER, json.loads(body))
    controls = [deployment, *_control_requests()]
    idle = control_application(_make_runner(settings))
    # Only for the idle device, which has no program to start.
    starts = Request("POST", "/start", BEARER, {"origin": 12.5})
    control = control_application(runner)
    shaper = server.create_application(_Planner(), TOKEN)  # type: ignore[arg-type]
    watch_page = page(_run_folder(), TOKEN, ORIGIN, _parse_fault)
    return {
        "control": call_target(control, controls),
        "control of an idle device": call_target(idle, [starts, *_control_requests()]),
        "shaper": call_target(shaper, _shaper_requests()),
        "page": call_target(watch_page, _page_requests()),
        "casts": _Casts(stack).send,
        "control port": port_target(_serve(stack, control), controls),
        "data port": port_target(data.address, _data_requests()),
    }


@cache
def prepared_run() -> Prepared:
    """Return a prepared run of two devices."""
    workload = {
        "model": {"name": "mlp"},
        "data": {"name": "digits", "train": 16, "test": 16},
        "method": {"name": "pipeline"},
        "batch_size": 8,
        "steps": 1,
    }
    tree: dict[str, Any] = {
        "devices": {"source": {}, "worker": {}},
        "network": {"link": {}},
        "workload": workload,
    }
    (trial,) = trials(build(name="messages", **tree))
    return prepare(trial)


def _make_runner(settings: Settings) -> Runner:
    return Runner(settings, DataServer(settings))


def _make_inbox(peer: str) -> Inbox:
    """Return an inbox for the messages of a peer, which are released on arrival."""
    inbox: Inbox

    def deliver(arrival: Arrival) -> None:
        inbox.release(arrival.size)

    inbox = Inbox({peer: data_token(TOKEN, peer, "source")}, INBOX, deliver)
    return inbox


# Valid requests to each listener


def _control_requests() -> list[Request]:
    """Return requests to a device's control API, except deployment and start."""
    run = prepared_run()
    dataset = samples_of(run, load(workload_section(run.scenario).data), "source")
    assert dataset is not None
    return [
        Request("PUT", "/data", BEARER, pack(dataset)),
        Request("PUT", "/shard", BEARER, arrays.pack(MESSAGE.tensors)),
        Request("PUT", "/speed", BEARER, {"factor": 0.5}),
        Request("PUT", "/links", BEARER, {"message_loss": {"worker": 0.5}}),
        Request("GET", "/events", BEARER, query="after=7"),
        *_bare_requests("POST", "/stop", "/leave", "/lease"),
        *_bare_requests("GET", "/health", "/facts", "/weights", "/metrics"),
    ]


def _bare_requests(method: str, *paths: str) -> list[Request]:
    """Return requests with the token, and without a body."""
    return [Request(method, path, BEARER) for path in paths]


def _data_requests() -> list[Request]:
    """Return messages of a peer."""
    token = data_token(TOKEN, "worker", "source")
    headers = {"HTTP_AUTHORIZATION": f"Bearer {token}"}
    requests = []
    for number in range(3):
        content = encode(MESSAGE, "worker", 1, number)
        requests.append(Request("POST", "/messages", headers, content))
    return requests


def _shaper_requests() -> list[Request]:
    """Return requests to the shaper."""
    links = {
        ("source", "worker"): Link(1e6, 0.01),
        ("worker", "source"): Link(1e6, 0.01, loss=0.1),
    }
    endpoints = []
    for name, address_and_port in ADDRESSES.items():
        address, _, _ = address_and_port.partition(":")
        endpoints.append(Endpoint(name, 1, address, network="10.0.0.0/24"))
    attachment = make_attachment(endpoints, links, 1, [Cell(("source", "worker"), 1e6)])
    return [
        Request("POST", "/attach", BEARER, attachment),
        Request("POST", "/set", BEARER, {"links": attachment["links"]}),
        Request("POST", "/probe", BEARER, {"pairs": [["source", "worker"]]}),
        Request("GET", "/statistics", BEARER, query="reset=1"),
        *_bare_requests("GET", "/facts", "/show", "/health"),
    ]


def _page_requests() -> list[Request]:
    """Return requests to the page of a run."""
    headers = {**BEARER, "HTTP_HOST": ORIGIN.partition("//")[2]}
    faults: list[dict[str, Any]] = [
        {"kill": "source"},
        {"degrade": {"between": ["source", "worker"], "rate": "1mbit", "delay": "5ms"}},
        {"partition": [["source"]]},
        {"throttle": {"device": "source", "slowdown": 2}},
    ]
    requests = [Request("GET", "/", headers), Request("GET", "/events", headers)]
    for fault in faults:
        requests.append(Request("POST", "/strike", headers, fault))
    return requests


# Replacements of the kernel and of a run


class _Planner:
    """A shaper without effect: links are checked and planned, but not applied."""

    seed = 0

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        cells: Iterable[Cell],
    ) -> None:
        check_links(links)
        endpoints = list(endpoints)
        peers = {}
        for number, endpoint in enumerate(endpoints, 1):
            peers[endpoint.name] = (number, endpoint.address)
        for endpoint in endpoints:
            plan = planning.plan_interface(endpoint, "eth0", None, peers, links, {})
            sender.build(plan)

    def set(self, links: Mapping[Pair, Link]) -> None:
        check_links(links)

    def probe(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        return [LinkMeasurement(*pair, Link()) for pair in pairs]

    def facts(self) -> dict[str, Any]:
        return {}

    show = facts

    def statistics(self, reset: bool) -> dict[str, Any]:
        return {"reset": reset}

    host_load = statistics


def _parse_fault(fault: Mapping[str, object]) -> str:
    return str(parse(ActionPart, dict(fault)).action)


@cache
def _run_folder() -> Path:
    """Return the folder of a new run."""
    folder = Path(tempfile.mkdtemp(), "run")
    run = prepared_run()
    Recorder(folder, run.trial, run.plan, "simulate")
    return folder


# Listeners on loopback


def _serve(stack: ExitStack, application: Application) -> tuple[str, int]:
    """Serve an application until the stack is closed; return the address."""
    http_server = PatientServer(("127.0.0.1", 0), application, 4)
    threading.Thread(target=http_server.serve, daemon=True).start()
    stack.callback(http_server.stop)
    return http_server.address


class _Casts:
    """Datagrams to a device with an open port for casts."""

    def __init__(self, stack: ExitStack) -> None:
        self._link = stack.enter_context(
            closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        )
        # A free port, found by a socket that is closed again: the caster binds its own.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self._address: tuple[str, int] = probe.getsockname()
        self._received: list[Arrival] = []
        self._inbox = Inbox({"worker": ""}, INBOX, self._deliver)
        addresses = Addresses(self._address, None, "127.0.0.1", {"worker": "127.0.0.1"})
        caster = Caster(
            CastEncoding("source", ADDRESSES),
            addresses,
            "r",
            INBOX,
            lambda message, *_: message,
        )
        caster.start(self._inbox)
        stack.callback(caster.close)
        self._content = CastEncoding("worker", ADDRESSES).encode(MESSAGE, ["source"])

    def _deliver(self, arrival: Arrival) -> None:
        self._received.append(arrival)
        self._inbox.release(arrival.size)

    def send(self, draw: random.Random) -> Iterator[str]:
        """Send a damaged datagram; one in a hundred is valid, and must be received."""
        chance = draw.random()
        number = draw.randrange(1 << 20)
        count = draw.choice([1, 2, 2000, 65535])
        if chance < 0.01:
            yield from self._send_valid()
        elif chance < 0.1:
            self._send_datagram(draw.randbytes(draw.randrange(40)))
        elif chance < 0.3:
            index = draw.randrange(count)
            fragment = _make_datagram(number, self._content, index, count)
            self._send_datagram(fragment[: CAST_CHUNK + 20])
        elif chance < 0.6:
            datagram = _make_datagram(number, self._content)
            self._send_datagram(damage_bytes(draw, datagram))
        else:
            content = damage_bytes(draw, self._content)
            self._send_datagram(_make_datagram(number, content))

    def _send_datagram(self, datagram: bytes) -> None:
        self._link.sendto(datagram, self._address)

    def _send_valid(self) -> Iterator[str]:
        until = time.monotonic() + MAX_SECONDS
        before = len(self._received)
        incarnation, number = 1, 0
        # A receiver ignores numbers and incarnations below the newest.
        if self._received:
            newest = self._received[-1].envelope
            incarnation, number = newest.incarnation, newest.sequence + 1
        datagram = _make_datagram(number, self._content, incarnation=incarnation)
        # Repeated, as a full buffer loses datagrams.
        while len(self._received) == before:
            if time.monotonic() > until:
                yield "casts: a valid cast is no longer received"
                return
            self._send_datagram(datagram)
            time.sleep(0.002)
        if self._inbox.bytes:
            yield f"casts: {self._inbox.bytes} bytes of the inbox stay reserved"


def _make_datagram(
    number: int, content: bytes, index: int = 0, count: int = 1, incarnation: int = 1
) -> bytes:
    header = struct.pack(
        "<4sQIHH", run_mark("r"), incarnation, number % (1 << 32), index, count
    )
    return header + content
