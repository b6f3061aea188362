"""Client of the agents' control API; see docs/protocols.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import requests

from controller.lab.client import Client, refusal
from testbed.common.errors import TestbedError
from testbed.trace.events import Event
from testbed.wire import tensors

if TYPE_CHECKING:
    import torch

    from testbed.data.dataset import Dataset

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
WORK_SECONDS = 600.0
"""For requests in which the agent has to import torch or take in a data set, beside many others on few processors."""


class Clock(Protocol):
    """The monotonic clock of an engine's host, by that of the controller."""

    def there(self, here: float) -> float:
        """Return what the clock there shows when the one here shows this; in seconds."""
        ...

    def here(self, there: float) -> float:
        """Return what the clock here shows when the one there shows this."""
        ...


class SameClock:
    """One clock, as containers share it with the host of their engine."""

    def there(self, here: float) -> float:
        """Return the same."""
        return here

    def here(self, there: float) -> float:
        """Return the same."""
        return there


class AgentError(TestbedError):
    """The agent refused a request, or does not answer."""


class AgentGone(AgentError):  # noqa: N818 - a state of the device
    """The agent does not answer: its device is dead, cut off or just booting."""


class Agent:
    """One device's agent. May be used from several threads."""

    def __init__(self, url: str, token: str, name: str = "", clock: Callable[[], Clock] = SameClock) -> None:
        self.url = url.rstrip("/")
        self._clock = clock
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

    def put_data(self, dataset: Dataset) -> None:
        """Hand over the data set."""
        from testbed.data.packing import pack

        self._request("PUT", "/data", seconds=WORK_SECONDS, data=pack(dataset))

    def put_shard(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Hand over weights to begin with."""
        body = b"".join(tensors.write(tensors.from_torch(weights)))
        self._request("PUT", "/shard", seconds=WORK_SECONDS, data=body)

    def start(self, origin: float) -> None:
        """Run the program from ``origin`` on, an instant of this host's monotonic clock; now if that is past."""
        self._origin = origin, self._clock().there(origin)
        self._request("POST", "/start", json={"origin": self._origin[1]})

    def stop(self) -> None:
        """Cancel the program; returns once it is over."""
        self._request("POST", "/stop", seconds=CONNECT_SECONDS, data=b"")

    def leave(self) -> None:
        """Tell the program that the device leaves."""
        self._request("POST", "/leave", seconds=CONNECT_SECONDS)

    def renew(self) -> None:
        """Let the container live for another lease."""
        self._request("POST", "/lease", seconds=CONNECT_SECONDS)

    def set_speed(self, factor: float) -> None:
        """Let the device compute at this share of its own speed from now on, also what it is computing right now."""
        self._request("PUT", "/speed", seconds=CONNECT_SECONDS, json={"factor": factor})

    def set_message_loss(self, fractions: Mapping[str, float]) -> None:
        """Let the device lose these fractions, by sender, of the casts it would hear, from now on."""
        self._request("PUT", "/links", json={"message_loss": dict(fractions)})

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
        clock = self._clock()
        moved = clock.here(there + event.time) - here - event.time
        if not moved:
            return event
        start = {"start": event.fields["start"] + moved} if "start" in event.fields else {}
        return event._replace(time=event.time + moved, fields={**event.fields, **start})

    def weights(self) -> bytes:
        """Return the weights that the program exposes right now, as safetensors."""
        return self._request("GET", "/weights", seconds=WORK_SECONDS).content

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
        if response.status_code >= 400:
            raise AgentError(f"{self._name}: {method} {path}: {refusal(response)}")
        return response
