"""All that listens in a run, for random messages: the two ports of a device, casts, the shaper, and the page.

The applications are those of the agent, the shaper and the page. The shaper plans what it is asked for and does not
carry it out; the page reads what it is to strike.
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
from testbed.ml.preparation import part_of, samples_of
from testbed.network.link import Cell, Link, Pair
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import parse
from testbed.trace.outcome import LinkMeasurement
from testbed.wire import arrays
from testbed.wire.cast import CastForm
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
from testbed_controller.lab.clients import attachment
from testbed_controller.results.recorder import Recorder
from testbed_controller.shaping import plan as planning
from testbed_controller.shaping import sender, server
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.shaper import check_links
from testbed_controller.watch.server import application as page
from tools.stress.files import torn
from tools.stress.messages import LONGEST, Application, Request, Target, asking, sending

TOKEN = "t" * 32
BEARER = {"HTTP_AUTHORIZATION": f"Bearer {TOKEN}"}
ORIGIN = "http://127.0.0.1:4000"
ADDRESSES = {"source": "10.0.0.2:8701", "worker": "10.0.0.3:8701"}
MESSAGE = Message(
    "activation", {"step": 1, "to": ["a", {"b": None}]}, {"x": torch.ones(3, 4)}
)
INBOX = 1 << 20
"""Bytes."""


def listeners(stack: ExitStack) -> dict[str, Target]:
    """Return all that listens, as a run begins, until the stack is closed."""
    settings = Settings(run="r", device="source", token=TOKEN, data=("127.0.0.1", 0))
    data, ready = DataServer(settings), _runner(settings)
    data.inbox = _emptied("worker")
    loop = asyncio.new_event_loop()
    loop.call_soon(data.serve)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    stack.callback(loop.call_soon_threadsafe, loop.stop)
    own = deployments(prepared(), "r", TOKEN, ADDRESSES, None).of("source")
    ready.deploy(bytearray(own))
    controls = [Request("PUT", "/deployment", BEARER, json.loads(own)), *_controls()]
    idle = control_application(_runner(settings))
    # No program is started: what is asked is asked before.
    starts = Request("POST", "/start", BEARER, {"origin": 12.5})
    control = control_application(ready)
    return {
        "control": asking(control, controls),
        "control of an idle device": asking(idle, [starts, *_controls()]),
        "shaper": asking(server.create_application(_Planning(), TOKEN), _shapings()),  # type: ignore[arg-type]
        "page": asking(page(_run(), TOKEN, ORIGIN, _struck), _watchings()),
        "casts": _Casts(stack).send,
        "control port": sending(_port(stack, control), controls),
        "data port": sending(data.address, _messages()),
    }


@cache
def prepared() -> Prepared:
    """Return a run of two devices."""
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


def _runner(settings: Settings) -> Runner:
    return Runner(settings, DataServer(settings))


def _emptied(peer: str) -> Inbox:
    """Return an inbox for the messages of a peer, which the program takes at once."""
    inbox: Inbox

    def deliver(arrival: Arrival) -> None:
        inbox.release(arrival.size)

    inbox = Inbox({peer: data_token(TOKEN, peer, "source")}, INBOX, deliver)
    return inbox


# What each is asked


def _controls() -> list[Request]:
    """Return requests to a device's control API, but those that deploy and start."""
    dataset = samples_of(prepared(), load(part_of(prepared().scenario).data), "source")
    assert dataset is not None
    return [
        Request("PUT", "/data", BEARER, pack(dataset)),
        Request("PUT", "/shard", BEARER, arrays.pack(MESSAGE.tensors)),
        Request("PUT", "/speed", BEARER, {"factor": 0.5}),
        Request("PUT", "/links", BEARER, {"message_loss": {"worker": 0.5}}),
        Request("GET", "/events", BEARER, query="after=7"),
        *(Request("POST", path, BEARER) for path in ("/stop", "/leave", "/lease")),
        *(
            Request("GET", path, BEARER)
            for path in ("/health", "/facts", "/weights", "/metrics")
        ),
    ]


def _messages() -> list[Request]:
    """Return messages of a peer."""
    way = {"HTTP_AUTHORIZATION": f"Bearer {data_token(TOKEN, 'worker', 'source')}"}
    return [
        Request("POST", "/messages", way, encode(MESSAGE, "worker", 1, number))
        for number in range(3)
    ]


def _shapings() -> list[Request]:
    """Return requests to the shaper."""
    links = {
        ("source", "worker"): Link(1e6, 0.01),
        ("worker", "source"): Link(1e6, 0.01, loss=0.1),
    }
    endpoints = [
        Endpoint(name, 1, where.partition(":")[0], network="10.0.0.0/24")
        for name, where in ADDRESSES.items()
    ]
    whole = attachment(endpoints, links, 1, [Cell(("source", "worker"), 1e6)])
    return [
        Request("POST", "/attach", BEARER, whole),
        Request("POST", "/set", BEARER, {"links": whole["links"]}),
        Request("POST", "/probe", BEARER, {"pairs": [["source", "worker"]]}),
        Request("GET", "/statistics", BEARER, query="reset=1"),
        *(Request("GET", path, BEARER) for path in ("/facts", "/show", "/health")),
    ]


def _watchings() -> list[Request]:
    """Return requests to the page of a run."""
    own = {**BEARER, "HTTP_HOST": ORIGIN.partition("//")[2]}
    faults: list[dict[str, Any]] = [
        {"kill": "source"},
        {"degrade": {"between": ["source", "worker"], "rate": "1mbit", "delay": "5ms"}},
        {"partition": [["source"]]},
        {"throttle": {"device": "source", "slowdown": 2}},
    ]
    return [
        *(Request("GET", path, own) for path in ("/", "/events")),
        *(Request("POST", "/strike", own, fault) for fault in faults),
    ]


# What takes the place of the kernel, and of a run


class _Planning:
    """What is to be shaped, checked and planned as the shaper does it."""

    seed = 0

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        cells: Iterable[Cell],
    ) -> None:
        check_links(links)
        known = list(endpoints)
        numbers = {
            each.name: (number, each.address) for number, each in enumerate(known, 1)
        }
        for each in known:
            sender.build(
                planning.plan_interface(each, "eth0", None, numbers, links, {})
            )

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


def _struck(given: Mapping[str, object]) -> str:
    return str(parse(ActionPart, dict(given)).action)


@cache
def _run() -> Path:
    """Return the folder of a run that begins."""
    folder = Path(tempfile.mkdtemp(), "run")
    Recorder(folder, prepared().trial, prepared().plan, "simulate")
    return folder


# What is reached over loopback


def _port(stack: ExitStack, application: Application) -> tuple[str, int]:
    """Have an application answer on a port until the stack is closed; return its address."""
    found = PatientServer(("127.0.0.1", 0), application, 4)
    threading.Thread(target=found.serve, daemon=True).start()
    stack.callback(found.stop)
    return found.address


class _Casts:
    """Datagrams to a device that hears casts."""

    def __init__(self, stack: ExitStack) -> None:
        self._link = stack.enter_context(
            closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self._address: tuple[str, int] = probe.getsockname()
        self._heard: list[Arrival] = []
        self._inbox = Inbox({"worker": ""}, INBOX, self._deliver)
        addresses = Addresses(self._address, None, "127.0.0.1", {"worker": "127.0.0.1"})
        caster = Caster(
            CastForm("source", ADDRESSES),
            addresses,
            "r",
            INBOX,
            lambda message, *_: message,
        )
        caster.start(self._inbox)
        stack.callback(caster.close)
        self._whole = CastForm("worker", ADDRESSES).encode(MESSAGE, ["source"])

    def _deliver(self, arrival: Arrival) -> None:
        self._heard.append(arrival)
        self._inbox.release(arrival.size)

    def send(self, draw: random.Random) -> Iterator[str]:
        """Send a datagram that is changed; now and then a right one, which must be heard."""
        chance, number = draw.random(), draw.randrange(1 << 20)
        count = draw.choice([1, 2, 2000, 65535])
        if chance < 0.01:
            yield from self._right()
        elif chance < 0.1:
            self._cast(draw.randbytes(draw.randrange(40)))
        elif chance < 0.3:
            self._cast(
                _datagram(number, self._whole, draw.randrange(count), count)[
                    : CAST_CHUNK + 20
                ]
            )
        elif chance < 0.6:
            self._cast(torn(draw, _datagram(number, self._whole)))
        else:
            self._cast(_datagram(number, torn(draw, self._whole)))

    def _cast(self, datagram: bytes) -> None:
        self._link.sendto(datagram, self._address)

    def _right(self) -> Iterator[str]:
        until, before = time.monotonic() + LONGEST, len(self._heard)
        newest = self._heard[-1].envelope if self._heard else None
        incarnation, number = (
            (newest.incarnation, newest.sequence + 1) if newest else (1, 0)
        )
        while len(self._heard) == before:  # a full buffer loses datagrams
            if time.monotonic() > until:
                yield "casts: a right one is not heard any more"
                return
            self._cast(_datagram(number, self._whole, incarnation=incarnation))
            time.sleep(0.002)
        if self._inbox.bytes:
            yield f"casts: {self._inbox.bytes} bytes of the inbox stay reserved"


def _datagram(
    number: int, content: bytes, index: int = 0, count: int = 1, incarnation: int = 1
) -> bytes:
    return (
        struct.pack(
            "<4sQIHH", run_mark("r"), incarnation, number % (1 << 32), index, count
        )
        + content
    )
