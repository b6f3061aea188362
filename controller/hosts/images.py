"""Images are built on one engine and brought to the others over their contexts, as far as they lack them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import docker
import requests
from docker.errors import APIError, DockerException

from controller.hosts.contexts import Host
from controller.lab.engine import Say
from controller.lab.images import exists
from testbed.common.errors import HostError
from testbed.common.quantities import format_size

_SAID = 200 << 20
"""Bytes between two reports of how far it is."""


def bring(source: docker.DockerClient, hosts: Iterable[Host], tags: Iterable[str], say: Say) -> None:
    """Return when every host has these images; several hosts at once.

    Raises HostError where one cannot take them.
    """
    wanted = sorted(set(tags))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda host: _bring(source, host, wanted, say), hosts))


def _bring(source: docker.DockerClient, host: Host, tags: list[str], say: Say) -> None:
    lacking = [tag for tag in tags if not exists(host.client, tag)]
    if not lacking:
        return
    size = sum(int(source.images.get(tag).attrs["Size"]) for tag in lacking)
    say(f"{host.name}: bringing {', '.join(lacking)} ({format_size(size)} at most)")
    try:
        # One archive: layers that images share travel once.
        url = f"{source.api.base_url}/v{source.api.api_version}/images/get"
        with source.api.get(url, params={"names": lacking}, stream=True, timeout=600) as response:
            response.raise_for_status()
            found = _counted(response.iter_content(1 << 20), host.name, say)
            host.client.images.load(found)  # type: ignore[arg-type]
    except (APIError, DockerException, requests.RequestException) as error:
        said = str(getattr(error, "explanation", error))
        room = f": make room there, by 'docker --context {host.name} system prune' or a larger disk"
        full = "no space left" in said
        raise HostError(f"{host.name}: it does not take the images ({said}){room if full else ''}") from error


def _counted(pieces: Iterable[bytes], host: str, say: Say) -> Iterator[bytes]:
    """Yield what comes, and say how much it was."""
    total = said = 0
    for piece in pieces:
        total += len(piece)
        if total - said >= _SAID:
            said = total
            say(f"{host}: {format_size(total)} brought")
        yield piece
