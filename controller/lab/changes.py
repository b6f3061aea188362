"""What happens to the containers of a run, whoever does it, as the engine sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import docker
import requests
from urllib3.exceptions import HTTPError

from controller.lab.containers import ControlUrl, DeviceContainer, container_name, control_url, look
from controller.lab.removal import RUN

PAUSE = 0.2
"""Seconds before the engine is asked again for its events, after it ended them."""


class ContainerChanges:
    """Follows the containers of a run, given by name with their addresses on the data network.

    An event of the engine says only that something changed; what the container is doing now is looked up. So nothing
    is missed where the engine itself was away for a while: all containers are looked at again once it answers.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        run: str,
        addresses: Mapping[str, str],
        note: Callable[[DeviceContainer], None],
        on_return: Callable[[float], None],
        url: ControlUrl = control_url,
    ) -> None:
        """``note`` is called with what every look found, before it is yielded.

        ``on_return`` is called with the seconds for which the engine gave no events, once it does again.
        """
        self._client = client
        self._run = run
        self._addresses = addresses
        self._note = note
        self._on_return = on_return
        self._url = url
        self._last: dict[str, tuple[str, int]] = {}
        self._over = threading.Event()
        self._stream: Any = None

    def __iter__(self) -> Iterator[DeviceContainer]:
        """Yield each container as it is at first, and again when its state or its process has changed.

        Ends after `close`. Raises HostError where the engine does not answer any more.
        """
        names = {container_name(self._run, name): name for name in self._addresses}
        filters = {
            "type": "container",
            "event": ["start", "die", "pause", "unpause", "destroy"],
            "label": f"{RUN}={self._run}",
        }
        left = None
        while not self._over.is_set():
            with suppress(requests.RequestException, HTTPError, OSError):
                self._stream = self._client.events(decode=True, filters=filters)
                if left is not None:
                    self._on_return(time.monotonic() - left)
                    left = None
                for name in self._addresses:
                    yield from self._looked(name)
                for event in self._stream:
                    if name := names.get(event["Actor"]["Attributes"]["name"], ""):
                        yield from self._looked(name)
            left = left or time.monotonic()
            self._over.wait(PAUSE)

    def close(self) -> None:
        """Let whoever iterates come to an end."""
        self._over.set()
        if self._stream is not None:
            with suppress(OSError, AttributeError):  # it is over already
                self._stream.close()

    def _looked(self, name: str) -> Iterator[DeviceContainer]:
        found = look(self._client, self._run, name, self._addresses[name], self._url)
        self._note(found)
        if self._last.get(name) != (found.state, found.pid) and not self._over.is_set():
            self._last[name] = found.state, found.pid
            yield found
