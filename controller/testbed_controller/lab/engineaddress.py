"""The choice of the container engine: DOCKER_HOST, otherwise the current docker context, otherwise this machine's
engine.

A docker context is a named engine address in Docker's configuration (`docker context ls`). The files of a context are
in ``~/.docker/contexts``: ``meta/KEY/meta.json`` has the address, and ``tls/KEY/docker`` the certificates, where KEY is
a hash of the context's name.
"""

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
"""Default socket of an engine on its own machine."""
CERTIFICATES = ("ca.pem", "cert.pem", "key.pem")
"""Names of the files with the certificate authority, the client's certificate and the client's key."""


@dataclass(frozen=True)
class EngineAddress:
    """The address of an engine, and whether the user chose the engine.

    A run's state file contains the address of its engine, so the run is accessible after the user chooses another
    engine.

    >>> EngineAddress("tcp://192.0.2.7:2376").is_local
    False
    """

    url: str = f"unix://{SOCKET}"
    """Address of the engine's API, as in DOCKER_HOST."""
    context: str = ""
    """Name of the docker context; empty for DOCKER_HOST and for the engine of this machine."""
    chosen: bool = False
    """Whether the user chose the engine by DOCKER_HOST or a context; such an engine is never started or installed."""
    certificates: str = ""
    """Folder with the files `CERTIFICATES`; empty without TLS."""
    verify: bool = True
    """Whether to verify the engine's certificate."""

    @property
    def title(self) -> str:
        """The address for messages, in the form in which the user chose the engine."""
        if self.context:
            return f"the docker context '{self.context}' ({self.url})"
        return f"DOCKER_HOST={self.url}" if self.chosen else self.url

    @property
    def is_ssh(self) -> bool:
        """Whether the engine is reached by ssh, which only `--hosts` supports."""
        return urlsplit(self.url).scheme == "ssh"

    @property
    def is_local(self) -> bool:
        """Whether the address is on this machine; published ports may be unreachable nevertheless."""
        parts = urlsplit(self.url)
        if parts.scheme in ("", "unix", "npipe"):
            return True
        if parts.hostname in (None, "localhost"):
            return not self.is_ssh
        with suppress(ValueError):
            return not self.is_ssh and ip_address(parts.hostname).is_loopback
        return False

    @property
    def local_engine_advice(self) -> str:
        """Instruction for the user to choose the engine of this machine instead of this engine."""
        if not self.context:
            return "unset DOCKER_HOST"
        # The variable takes precedence over the context in docker's configuration.
        if os.environ.get("DOCKER_CONTEXT"):
            return "unset DOCKER_CONTEXT"
        return "'docker context use default'"


def chosen_engine() -> EngineAddress:
    """Return the engine chosen for docker's own commands.

    The context is read here because docker-py follows contexts only since version 7.2. Raises HostError for a missing
    context.
    """
    host = os.environ.get("DOCKER_HOST")
    if host:
        # As in docker's own commands, any text but an empty one switches the verification on.
        verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        folder = os.environ.get("DOCKER_CERT_PATH", "")
        if verify and not folder:
            folder = str(Path.home() / ".docker")
        return EngineAddress(host, chosen=True, certificates=folder, verify=verify)
    name = os.environ.get("DOCKER_CONTEXT") or _current_context()
    if name in ("", "default"):
        return EngineAddress()
    try:
        return find_context(name)
    except InputError as error:
        raise HostError(
            f"{error}; or choose another context, for example with 'docker context use default'"
        ) from None


def find_context(name: str) -> EngineAddress:
    """Return the engine of a docker context; raises InputError with all names for a missing one."""
    if name == "default":
        return EngineAddress(os.environ.get("DOCKER_HOST") or EngineAddress.url)
    folder = _configuration_folder() / "contexts"
    # The docker command names the folders of a context by the hash of its name.
    key = hashlib.sha256(name.encode()).hexdigest()
    try:
        text = (folder / "meta" / key / "meta.json").read_text()
    except FileNotFoundError:
        raise InputError(
            f"unknown docker context '{name}' (contexts: {', '.join(context_names())}): create it with "
            f"'docker context create {name} --docker host=ssh://USER@ADDRESS'"
        ) from None
    endpoint = json.loads(text)["Endpoints"]["docker"]
    certificates = folder / "tls" / key / "docker"
    is_complete = all((certificates / file).exists() for file in CERTIFICATES)
    return EngineAddress(
        str(endpoint["Host"]),
        name,
        chosen=True,
        certificates=str(certificates) if is_complete else "",
        verify=not endpoint.get("SkipTLSVerify"),
    )


def context_names() -> list[str]:
    """Return the names of all docker contexts."""
    files = (_configuration_folder() / "contexts").glob("meta/*/meta.json")
    names = [json.loads(file.read_text())["Name"] for file in files]
    return ["default", *sorted(names)]


def _current_context() -> str:
    # Docker's own commands treat an unreadable file as empty.
    with suppress(OSError, ValueError):
        text = (_configuration_folder() / "config.json").read_text()
        return str(json.loads(text).get("currentContext", ""))
    return ""


def _configuration_folder() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
