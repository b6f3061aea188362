"""The engine that the user means: that of DOCKER_HOST, else of the current docker context, else this machine's own."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from testbed.common.errors import HostError, InputError

SOCKET = "/var/run/docker.sock"
"""Where an engine listens on its own machine, unless its context has another address."""
CERTIFICATES = ("ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens, and who chose it.

    A run's state keeps the address of its engine, so that the run is found after the user has switched to another one.

    >>> EngineAddress("tcp://192.0.2.7:2376").is_local
    False
    """

    url: str = f"unix://{SOCKET}"
    context: str = ""
    """Name of the docker context; empty for DOCKER_HOST and for this machine's own engine."""
    chosen: bool = False
    """Whether the user chose this engine, by DOCKER_HOST or a context: such an engine is never started or installed."""
    certificates: str = ""
    """Folder of the files `CERTIFICATES`; empty without TLS."""
    verify: bool = True
    """Whether the engine's own certificate is checked."""

    @property
    def title(self) -> str:
        """The address as the user wrote it."""
        if self.context:
            return f"the docker context '{self.context}' ({self.url})"
        return f"DOCKER_HOST={self.url}" if self.chosen else self.url

    @property
    def is_ssh(self) -> bool:
        """Whether the engine is reached by ssh, which only `--hosts` does."""
        return urlsplit(self.url).scheme == "ssh"

    @property
    def is_local(self) -> bool:
        """Whether the address is on this machine; its published ports may be out of reach all the same."""
        parts = urlsplit(self.url)
        if parts.scheme in ("", "unix", "npipe"):
            return True
        if parts.hostname in (None, "localhost"):
            return not self.is_ssh
        with suppress(ValueError):
            return not self.is_ssh and ip_address(parts.hostname).is_loopback
        return False

    @property
    def switch_back(self) -> str:
        """How to get from this engine to that of this machine."""
        if not self.context:
            return "unset DOCKER_HOST"
        return "unset DOCKER_CONTEXT" if os.environ.get("DOCKER_CONTEXT") else "'docker context use default'"


def chosen_engine() -> EngineAddress:
    """Return the engine that docker's own commands would use now.

    Read here, as docker-py follows contexts only since version 7.2. Raises HostError for a context that is missing.
    """
    host = os.environ.get("DOCKER_HOST")
    if host:
        verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        folder = os.environ.get("DOCKER_CERT_PATH") or (str(Path.home() / ".docker") if verify else "")
        return EngineAddress(host, "", True, folder, verify)
    name = os.environ.get("DOCKER_CONTEXT") or _current_context()
    if name in ("", "default"):
        return EngineAddress()
    try:
        return find_context(name)
    except InputError as error:
        raise HostError(f"{error}; or choose another, for instance by 'docker context use default'") from None


def find_context(name: str) -> EngineAddress:
    """Return the engine of a docker context; raises InputError, with all names, for one that is missing."""
    if name == "default":
        return EngineAddress(os.environ.get("DOCKER_HOST") or EngineAddress.url)
    folder = _configuration() / "contexts"
    key = hashlib.sha256(name.encode()).hexdigest()
    try:
        found = json.loads((folder / "meta" / key / "meta.json").read_text())["Endpoints"]["docker"]
    except FileNotFoundError:
        raise InputError(
            f"there is no docker context '{name}' (contexts: {', '.join(context_names())}): make it with "
            f"'docker context create {name} --docker host=ssh://USER@ADDRESS'"
        ) from None
    certificates = folder / "tls" / key / "docker"
    complete = all((certificates / each).exists() for each in CERTIFICATES)
    tls = str(certificates) if complete else ""
    return EngineAddress(str(found["Host"]), name, True, tls, not found.get("SkipTLSVerify"))


def context_names() -> list[str]:
    """Return the names of all docker contexts."""
    found = (_configuration() / "contexts").glob("meta/*/meta.json")
    return ["default", *sorted(json.loads(each.read_text())["Name"] for each in found)]


def _current_context() -> str:
    with suppress(OSError, ValueError):  # docker's own commands take an unreadable file for an empty one
        return str(json.loads((_configuration() / "config.json").read_text()).get("currentContext", ""))
    return ""


def _configuration() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
