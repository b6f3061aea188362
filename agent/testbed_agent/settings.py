"""Settings of a device, read from the environment of its container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from testbed.wire.ports import CAST_PORT, CONTROL_PORT, DATA_PORT

Address = tuple[str, int]
"""IPv4 address and port."""


@dataclass(frozen=True)
class Settings:
    """Identity, addresses and limits of a device.

    >>> names = {"TESTBED_RUN": "quickstart-0a1b2c3d", "TESTBED_DEVICE": "worker1", "TESTBED_TOKEN": "secret"}
    >>> Settings.from_environment(names).data
    ('0.0.0.0', 8701)
    """

    run: str
    """Name of the run."""
    device: str
    """Name of the device in the scenario."""
    token: str
    """Token that authorises the controller's requests to this device."""
    control: Address = ("127.0.0.1", CONTROL_PORT)
    """Address of the control server: on loopback, since shaper or keeper connect from inside the container."""
    data: Address = ("0.0.0.0", DATA_PORT)
    """Address of the server for messages of other devices, over TCP."""
    cast: Address = ("0.0.0.0", CAST_PORT)
    """Address at which broadcasts arrive, over UDP."""
    disk: str = "/state"
    """Folder that survives a restart of the device."""
    disk_limit: int = 4 << 30
    """Disk quota in bytes; a program that exceeds the quota is cancelled."""
    inbox_limit: int = 64 << 20
    """Capacity of the inbox in bytes; if the inbox is full, senders have to retry."""
    event_limit: int = 16 << 20
    """Maximum size of the compressed event log in bytes; the oldest events are dropped."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Settings:
        """Read ``TESTBED_RUN``, ``TESTBED_DEVICE``, ``TESTBED_TOKEN`` and an optional variable for each other field.

        Examples are ``TESTBED_DISK`` and ``TESTBED_DATA_ADDRESS``. Raises SystemExit with the name of a missing or
        invalid variable.
        """
        missing = []
        for name in ("TESTBED_RUN", "TESTBED_DEVICE", "TESTBED_TOKEN"):
            if not environment.get(name):
                missing.append(name)
        if missing:
            raise SystemExit(f"agent: set {', '.join(missing)} in the environment")
        # By the text of the annotation, since annotations are not evaluated here.
        parsers: Mapping[Any, Callable[[str], Any]] = {
            "str": str,
            "int": _parse_bytes,
            "Address": parse_address,
        }
        values = {}
        for field in fields(Settings):
            name = f"TESTBED_{field.name.upper()}"
            if field.type == "Address":
                name += "_ADDRESS"
            if name not in environment:
                continue
            try:
                values[field.name] = parsers[field.type](environment[name])
            except ValueError as error:
                raise SystemExit(f"agent: {name}: {error}") from error
        return Settings(**values)


def _parse_bytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"must be a number of bytes, not '{text}'")
    return int(text)


def parse_address(text: str, port: int | None = None) -> Address:
    """Parse ``host:port``, or ``host`` alone if a default port is given; raises ValueError.

    >>> parse_address("10.0.0.2", 8701)
    ('10.0.0.2', 8701)
    """
    host, colon, number = text.partition(":")
    if not colon and port is not None and host:
        return host, port
    if not host or not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"'{text}' must be an address such as 0.0.0.0:{CONTROL_PORT}")
    return host, int(number)
