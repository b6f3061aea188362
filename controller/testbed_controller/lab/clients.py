"""HTTP clients of a run's containers, the shaper and the agents; see docs/protocols.md."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import requests

from testbed.common.errors import HostError, InputError, TestbedError
from testbed.network.link import Cell, Link, Pair, links_to_json
from testbed.trace.events import Event
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.lab.clocks import HostClock
from testbed_controller.shaping.plan import Endpoint

_LOG = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Time-out of a connection to an agent, in seconds."""
ANSWER_SECONDS = 30.0
"""Time-out of requests without long work, in seconds."""
WORK_SECONDS = 600.0
"""Time-out of requests for which the agent imports torch or reads a data set, on a busy host."""

LARGE_BODY = 1 << 20
"""Size in bytes above which sending a body may take as long as the answer to it."""


class Client:
    """An HTTP client of one container with the run's token, with a session for each thread."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._local = threading.local()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Send a request; raises the errors of `requests` if the container does not respond."""
        # Each thread has a session, since sessions of `requests` are not documented as thread-safe.
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            self._local.session = session
            session.trust_env = False  # the containers are never behind a proxy
            session.headers["Authorization"] = f"Bearer {self._token}"
        response = session.request(method, self.url + path, **options)
        _LOG.debug("%s %s%s: %d", method, self.url, path, response.status_code)
        return response


def describe_refusal(response: requests.Response) -> str:
    """Return the reason of a refused request."""
    try:
        return f"{response.json()['error']} ({response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def make_attachment(
    endpoints: Iterable[Endpoint],
    links: Mapping[Pair, Link],
    seed: int,
    cells: Iterable[Cell],
) -> dict[str, Any]:
    """Return the body of an attach request to the shaper."""
    return {
        "endpoints": [dataclasses.asdict(endpoint) for endpoint in endpoints],
        "links": links_to_json(links),
        "seed": seed,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


class Shaper:
    """A client of the shaper of one run.

    Every method raises HostError if the shaper does not respond or refuses, and InputError for an invalid request.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._client = Client(url, token)

    def _request(
        self, method: str, path: str, json: Any = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=json, timeout=timeout)
        except requests.RequestException as error:
            raise HostError(
                f"the shaper at {self._url} does not respond: {error}; 'testbed ps' shows whether the lab is up"
            ) from error
        if answer.status_code == HTTPStatus.BAD_REQUEST:
            raise InputError(f"shaper: {describe_refusal(answer)}")
        if not answer.ok:
            raise HostError(f"shaper: {describe_refusal(answer)}")
        document: dict[str, Any] = answer.json()
        return document

    def facts(self) -> dict[str, Any]:
        """Return ``kernel``, ``backend``, ``hostname``, and the clocks ``monotonic`` and ``time`` in seconds."""
        return self._request("GET", "/facts")

    def attach(
        self,
        endpoints: Iterable[Endpoint],
        links: Mapping[Pair, Link],
        seed: int = 0,
        cells: Iterable[Cell] = (),
    ) -> None:
        """Create the links of these devices and the cells of the run; repeat for a restarted device.

        Devices attached before are updated. Attached devices without a link cannot communicate.
        """
        self._request("POST", "/attach", make_attachment(endpoints, links, seed, cells))

    def release(self) -> None:
        """Release the network namespaces of ended devices; afterwards, no kernel answers for these devices."""
        self._request("POST", "/release", timeout=5.0)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links while running; other links are unaffected."""
        self._request("POST", "/set", {"links": links_to_json(links)})

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure these links between the devices themselves; takes seconds, or minutes for many slow links."""
        answer = self._request("POST", "/probe", {"pairs": [*pairs]}, timeout=600)
        documents = answer["measurements"]
        return [LinkMeasurement.from_json(document) for document in documents]

    def open_ends(self, run: str, pairs: Iterable[Pair]) -> dict[str, int]:
        """Open sockets for `probe_half`; return the port of each present device. ``run`` is 8 bytes in hex."""
        body = {"run": run, "pairs": [*pairs]}
        return dict(self._request("POST", "/ends", body)["ports"])

    def probe_half(
        self, run: str, pairs: Iterable[Pair], ports: Mapping[str, int], begin: float
    ) -> list[dict[str, Any]]:
        """Measure one end of links between hosts; see `measure_half` of the shaper's probes."""
        body = {"run": run, "pairs": [*pairs], "ports": dict(ports), "begin": begin}
        return list(self._request("POST", "/half", body, timeout=600)["measurements"])

    def host_load(self, *, reset: bool = False) -> dict[str, Any]:
        """Return the processor load of the shaper's machine since the last ``reset``; see `HostMonitor`."""
        return self._request("GET", "/load" + ("?reset=1" if reset else ""))

    def renew(self) -> None:
        """Renew the lease of the container."""
        self._request("POST", "/lease", timeout=5.0)

    def show(self) -> dict[str, Any]:
        """Return ``backend``, ``links`` and ``devices``, with differences from the kernel's current state."""
        return self._request("GET", "/show")

    def statistics(self, *, reset: bool = False) -> dict[str, Any]:
        """Return dropped packets by queue, and the lateness of the delay line; ``reset`` clears the lateness."""
        return self._request("GET", "/statistics" + ("?reset=1" if reset else ""))


class AgentError(TestbedError):
    """The agent refused a request or does not respond."""


class AgentGone(AgentError):  # noqa: N818 - a state of the device
    """The agent does not respond: the device is dead, disconnected or booting."""


class Agent:
    """A client of one device's agent. Thread-safe.

    Example::

        agent = Agent("http://127.0.0.1:32768/devices/worker1", token, "worker1")
        agent.health()["state"]  # 'idle'
    """

    def __init__(
        self, url: str, token: str, name: str = "", clock: HostClock | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._clock = clock or HostClock()
        self._origin = (0.0, 0.0)
        """Start of the run, by the clock of this host and by the clock of the device."""
        self._name = name or self.url
        self._client = Client(url, token)

    def health(self) -> dict[str, Any]:
        """Return run, device and state, with the traceback of a failed program."""
        return self._request_json("GET", "/health", seconds=CONNECT_SECONDS)

    def facts(self) -> dict[str, Any]:
        """Return versions, memory in bytes and the device's monotonic clock in seconds."""
        return self._request_json("GET", "/facts")

    def deploy(self, deployment: bytes) -> dict[str, Any]:
        """Send a deployment (`testbed.deployment`); return when the device is ready to start the program."""
        return self._request_json(
            "PUT", "/deployment", seconds=WORK_SECONDS, data=deployment
        )

    def put_data(self, body: bytes) -> None:
        """Send the device's samples, as `testbed.workload.Inputs.data` returns them."""
        self._request("PUT", "/data", seconds=WORK_SECONDS, data=body)

    def put_shard(self, body: bytes) -> None:
        """Send initial weights as safetensors."""
        self._request("PUT", "/shard", seconds=WORK_SECONDS, data=body)

    def start(self, origin: float) -> None:
        """Run the program from ``origin`` on, an instant of the controller's monotonic clock.

        The program starts at once if this instant has passed.
        """
        host_origin = self._clock.to_host(origin)
        self._origin = (origin, host_origin)
        self._request("POST", "/start", json={"origin": host_origin})

    def stop(self) -> None:
        """Cancel the program and wait for the end."""
        self._request("POST", "/stop", seconds=CONNECT_SECONDS, data=b"")

    def leave(self) -> None:
        """Request a graceful shutdown of the program."""
        self._request("POST", "/leave", seconds=CONNECT_SECONDS)

    def renew(self) -> None:
        """Renew the lease of the container."""
        self._request("POST", "/lease", seconds=CONNECT_SECONDS)

    def set_speed(self, factor: float) -> None:
        """Set the device's speed as a multiple of the speed in the scenario, also for the current task."""
        self._request("PUT", "/speed", seconds=CONNECT_SECONDS, json={"factor": factor})

    def set_links(
        self, message_loss: Mapping[str, float], slowness: Mapping[str, float]
    ) -> None:
        """Notify the device of changed links, by peer.

        ``message_loss`` is the fraction of lost broadcasts from now on; ``slowness`` is the round-trip time in seconds
        (`testbed.network.link.slowness`) that extends the time-outs.
        """
        document = {"message_loss": dict(message_loss), "slowness": dict(slowness)}
        changes = {key: values for key, values in document.items() if values}
        self._request("PUT", "/links", json=changes)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the events from number ``after`` on as recorded, until the end of the program.

        Raises AgentGone if the stream breaks, for example when the device is killed, and AgentError if these events
        were dropped or do not exist yet.
        """
        rest = b""
        # The stream has no time-out, since a paused device sends nothing, not even heartbeats.
        response = self._request(
            "GET", f"/events?after={after}", seconds=None, stream=True
        )
        with response:
            try:
                for piece in response.iter_content(chunk_size=None):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        # An empty line is a heartbeat.
                        if line:
                            yield self._convert_times(Event.from_json(line.decode()))
            except requests.RequestException as error:
                raise AgentGone(
                    f"{self._name}: the event stream ended before the program: {error}"
                ) from error

    def _convert_times(self, event: Event) -> Event:
        """Convert the times of an event from the device's clock to the controller's clock."""
        origin, host_origin = self._origin
        instant = self._clock.to_controller(host_origin + event.time)
        shift = instant - origin - event.time
        if not shift:
            return event
        fields = dict(event.fields)
        if "start" in fields:
            fields["start"] += shift
        return event._replace(time=event.time + shift, fields=fields)

    def weights(self, seconds: float = WORK_SECONDS, *, part: bool = False) -> bytes:
        """Return the weights exposed by the program as safetensors.

        With ``part``, only the weights of the device's own part of the model. Raises AgentGone after ``seconds``.
        """
        path = "/weights?part" if part else "/weights"
        return self._request("GET", path, seconds=seconds).content

    def metrics(self) -> dict[str, float]:
        """Return the agent's metrics: name with labels in braces, to value."""
        metrics = {}
        for line in self._request("GET", "/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                metrics[name] = float(value)
        return metrics

    def _request_json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        document = self._request(method, path, **options).json()
        assert isinstance(document, dict)
        return document

    def _request(
        self,
        method: str,
        path: str,
        seconds: float | None = ANSWER_SECONDS,
        **options: Any,
    ) -> requests.Response:
        # In `requests`, the time-out of connecting also limits the time for sending the body. The weights of a language
        # model take longer to reach a device on a busy or remote host, so a large body gets the time-out of the answer.
        connect: float | None = CONNECT_SECONDS
        if len(options.get("data") or b"") > LARGE_BODY:
            connect = seconds
        try:
            response = self._client.request(
                method, path, timeout=(connect, seconds), **options
            )
        except requests.Timeout as error:
            raise AgentGone(
                f"{self._name}: {method} {path}: no answer within {seconds} s"
            ) from error
        except requests.RequestException as error:
            raise AgentGone(
                f"{self._name}: {method} {path}: the agent does not respond: {error}"
            ) from error
        # The shaper, which forwards requests, responds with this status if no agent is listening.
        if response.status_code == HTTPStatus.BAD_GATEWAY:
            raise AgentGone(
                f"{self._name}: {method} {path}: the agent does not respond"
            )
        if response.status_code >= 400:
            raise AgentError(
                f"{self._name}: {method} {path}: {describe_refusal(response)}"
            )
        return response
