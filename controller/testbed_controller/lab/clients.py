"""Clients of the containers of a run, over HTTP: of the shaper, and of the agents; see docs/protocols.md."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import requests

from testbed.common.errors import HostError, InputError, TestbedError
from testbed.network.link import Cell, Link, Pair, links_to_json
from testbed.trace.events import Event
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.lab.clocks import Clock
from testbed_controller.shaping.plan import Endpoint

if TYPE_CHECKING:
    pass


_LOG = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
WORK_SECONDS = 600.0
"""For requests in which the agent has to import torch or take in a data set, beside many others on few processors."""


class Client:
    """Requests with the token of a run to one container. Threads have a session each."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._local = threading.local()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Make a request; raises what `requests` raises where nobody answers."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # no proxy stands between us and our own containers
            session.headers["Authorization"] = f"Bearer {self._token}"
        response = session.request(method, self.url + path, **options)
        _LOG.debug("%s %s%s: %d", method, self.url, path, response.status_code)
        return response


def refusal(response: requests.Response) -> str:
    """Return why a request was refused."""
    try:
        return f"{response.json()['error']} ({response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def attachment(
    endpoints: Iterable[Endpoint], links: Mapping[Pair, Link], seed: int, cells: Iterable[Cell]
) -> dict[str, Any]:
    """Return what the shaper is asked to attach."""
    return {
        "endpoints": [dataclasses.asdict(each) for each in endpoints],
        "links": links_to_json(links),
        "seed": seed,
        "cells": [dataclasses.asdict(each) for each in cells],
    }


class Shaper:
    """Shapes the links of one run. Every method raises HostError when a rule did not take."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._client = Client(url, token)

    def _request(self, method: str, path: str, json: Any = None, timeout: float = 60.0) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=json, timeout=timeout)
        except requests.RequestException as error:
            raise HostError(f"the shaper at {self._url} does not answer: {error}; is the lab up?") from error
        if not answer.ok:
            raise (InputError if answer.status_code == 400 else HostError)(f"shaper: {refusal(answer)}")
        document: dict[str, Any] = answer.json()
        return document

    def facts(self) -> dict[str, Any]:
        """Return ``kernel``, ``backend``, ``hostname``, ``monotonic`` and ``time`` (clocks, seconds) of its host."""
        return self._request("GET", "/facts")

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        seed: int = 0,
        cells: Iterable[Cell] = (),
    ) -> None:
        """Build the links of these devices and the cells of the run; again for one that has restarted.

        Devices attached before are adapted. A pair of attached devices without a link cannot talk.
        """
        self._request("POST", "/attach", attachment(endpoints, links, seed, cells))

    def release(self) -> None:
        """Return when nothing answers any more for devices that have ended."""
        self._request("POST", "/release", timeout=5.0)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links, live; no other link notices."""
        self._request("POST", "/set", {"links": links_to_json(links)})

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure these links between the devices themselves: seconds, or minutes of many slow links."""
        answer = self._request("POST", "/probe", {"pairs": [*pairs]}, timeout=600)
        return [LinkMeasurement.from_json(each) for each in answer["measurements"]]

    def open_ends(self, run: str, pairs: Iterable[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the port of each device that is there. ``run`` is 8 bytes as hex."""
        return dict(self._request("POST", "/ends", {"run": run, "pairs": [*pairs]})["ports"])

    def probe_half(
        self, run: str, pairs: Iterable[Pair], ports: Mapping[str, int], begin: float
    ) -> list[dict[str, Any]]:
        """Measure links between hosts, of which each does its half; see `measure_half` of the shaper's probes."""
        asked = {"run": run, "pairs": [*pairs], "ports": dict(ports), "begin": begin}
        return list(self._request("POST", "/half", asked, timeout=600)["measurements"])

    def host_load(self, reset: bool = False) -> dict[str, Any]:
        """Return how busy the processors of the shaper's machine were since the last ``reset``; see `HostMonitor`."""
        return self._request("GET", "/load" + ("?reset=1" if reset else ""))

    def renew(self) -> None:
        """Let the container live for another lease."""
        self._request("POST", "/lease", timeout=5.0)

    def show(self) -> dict[str, Any]:
        """Return ``backend``, ``links`` and ``devices``; of each device where the kernel differs, read back now."""
        return self._request("GET", "/show")

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return drops at queues and the delay line's lateness; ``reset`` sets the lateness back to nothing."""
        return self._request("GET", "/statistics" + ("?reset=1" if reset else ""))


class AgentError(TestbedError):
    """The agent refused a request, or does not answer."""


class AgentGone(AgentError):  # noqa: N818 - a state of the device
    """The agent does not answer: its device is dead, cut off or just booting."""


class Agent:
    """One device's agent. May be used from several threads."""

    def __init__(self, url: str, token: str, name: str = "", clock: Clock | None = None) -> None:
        self.url = url.rstrip("/")
        self._clock = clock or Clock()
        self._origin = 0.0, 0.0
        """Origin of the run's time, by the clock here and by that of the device."""
        self._name = name or self.url
        self._client = Client(url, token)

    def health(self) -> dict[str, Any]:
        """Return run, device and state, and the traceback of a program that failed."""
        return self._document("GET", "/health", seconds=CONNECT_SECONDS)

    def facts(self) -> dict[str, Any]:
        """Return versions, memory and the device's monotonic clock."""
        return self._document("GET", "/facts")

    def deploy(self, deployment: bytes) -> dict[str, Any]:
        """Hand over a deployment (`testbed.deployment`); returns once the device is ready to start its program."""
        return self._document("PUT", "/deployment", seconds=WORK_SECONDS, data=deployment)

    def put_data(self, body: bytes) -> None:
        """Hand over the data set."""
        self._request("PUT", "/data", seconds=WORK_SECONDS, data=body)

    def put_shard(self, body: bytes) -> None:
        """Hand over weights to begin with, as safetensors."""
        self._request("PUT", "/shard", seconds=WORK_SECONDS, data=body)

    def start(self, origin: float) -> None:
        """Run the program from ``origin`` on, an instant of this host's monotonic clock; now if that is past."""
        self._origin = origin, self._clock.there(origin)
        self._request("POST", "/start", json={"origin": self._origin[1]})

    def stop(self) -> None:
        """Cancel the program; returns once it is over."""
        self._request("POST", "/stop", seconds=CONNECT_SECONDS, data=b"")

    def leave(self) -> None:
        """Notify the program that the device leaves."""
        self._request("POST", "/leave", seconds=CONNECT_SECONDS)

    def renew(self) -> None:
        """Let the container live for another lease."""
        self._request("POST", "/lease", seconds=CONNECT_SECONDS)

    def set_speed(self, factor: float) -> None:
        """Let the device compute at this share of its own speed from now on, also what it is computing right now."""
        self._request("PUT", "/speed", seconds=CONNECT_SECONDS, json={"factor": factor})

    def set_links(self, message_loss: Mapping[str, float], slowness: Mapping[str, float]) -> None:
        """Have the device adapt to changed links with some peers.

        ``message_loss`` has the fractions of their casts that it loses from now on, ``slowness`` the seconds there and
        back (`testbed.network.link.slowness`) that its time-outs have to allow for.
        """
        document = {"message_loss": dict(message_loss), "slowness": dict(slowness)}
        self._request("PUT", "/links", json={key: values for key, values in document.items() if values})

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the events from number ``after`` on as they are recorded, until the program is over.

        Raises AgentGone where the stream broke, as it does when the device is killed; AgentError where those events are
        not kept, or not there yet.
        """
        rest = b""
        with self._request("GET", f"/events?after={after}", seconds=None, stream=True) as response:
            try:
                for piece in response.iter_content(chunk_size=None):
                    *lines, rest = (rest + piece).split(b"\n")
                    yield from (self._on_our_clock(Event.from_json(line.decode())) for line in lines if line)
            except requests.RequestException as error:
                raise AgentGone(f"{self._name}: its events ended before its program did: {error}") from error

    def _on_our_clock(self, event: Event) -> Event:
        """Return an event with its times, which are seconds since the origin there, in seconds since that here."""
        here, there = self._origin
        moved = self._clock.here(there + event.time) - here - event.time
        if not moved:
            return event
        start = {"start": event.fields["start"] + moved} if "start" in event.fields else {}
        return event._replace(time=event.time + moved, fields={**event.fields, **start})

    def weights(self, seconds: float = WORK_SECONDS, part: bool = False) -> bytes:
        """Return the weights that the program exposes right now, as safetensors.

        ``part``: those of the device's own part of the model. Raises AgentGone after ``seconds``.
        """
        return self._request("GET", "/weights?part" if part else "/weights", seconds=seconds).content

    def metrics(self) -> dict[str, float]:
        """Return the agent's metrics: name, with its labels in braces, to value."""
        lines = self._request("GET", "/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def _document(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        document = self._request(method, path, **options).json()
        assert isinstance(document, dict)
        return document

    def _request(
        self, method: str, path: str, seconds: float | None = ANSWER_SECONDS, **options: Any
    ) -> requests.Response:
        try:
            response = self._client.request(method, path, timeout=(CONNECT_SECONDS, seconds), **options)
        except requests.Timeout as error:
            raise AgentGone(f"{self._name}: {method} {path}: no answer within {seconds} s") from error
        except requests.RequestException as error:
            raise AgentGone(f"{self._name}: {method} {path}: the agent does not answer: {error}") from error
        if response.status_code == HTTPStatus.BAD_GATEWAY:  # the shaper's, where nobody is there to lead to
            raise AgentGone(f"{self._name}: {method} {path}: the agent does not answer")
        if response.status_code >= 400:
            raise AgentError(f"{self._name}: {method} {path}: {refusal(response)}")
        return response
