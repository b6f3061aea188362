"""Settings of a device, from the environment of its container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from testbed.wire.ports import CAST_PORT, CONTROL_PORT, DATA_PORT

Address = tuple[str, int]


@dataclass(frozen=True)
class Settings:
    """Who this device is, where it listens, and how much it takes in."""

    run: str
    device: str
    token: str
    control: Address = ("127.0.0.1", CONTROL_PORT)
    """Nobody asks for it over the network: the shaper does, or the keeper, from within."""
    data: Address = ("0.0.0.0", DATA_PORT)
    cast: Address = ("0.0.0.0", CAST_PORT)
    disk: str = "/state"
    """Folder that outlives a restart of the device."""
    disk_limit: int = 4 << 30
    """Bytes that the program may keep there; beyond, it is ended."""
    inbox_limit: int = 64 << 20
    """Bytes of messages that wait for the program; beyond, senders are asked to try again later."""
    event_limit: int = 16 << 20
    """Bytes of events kept, compressed; the oldest are dropped beyond."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Settings:
        """Read ``TESTBED_RUN``, ``TESTBED_DEVICE``, ``TESTBED_TOKEN`` and the optional addresses, limits and disk.

        Raises SystemExit naming the variable that is missing or cannot be read.
        """
        missing = [name for name in ("TESTBED_RUN", "TESTBED_DEVICE", "TESTBED_TOKEN") if not environment.get(name)]
        if missing:
            raise SystemExit(f"agent: set {', '.join(missing)} in the environment")
        read: Mapping[Any, Callable[[str], Any]] = {"str": str, "int": _bytes, "Address": address}
        found = {}
        for field in fields(Settings):
            name = f"TESTBED_{field.name.upper()}" + ("_ADDRESS" if field.type == "Address" else "")
            if name in environment:
                try:
                    found[field.name] = read[field.type](environment[name])
                except ValueError as error:
                    raise SystemExit(f"agent: {name}{':' * (field.type == 'Address')} {error}") from error
        return Settings(**found)


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"is a number of bytes, not '{text}'")
    return int(text)


def address(text: str, port: int | None = None) -> Address:
    """Read ``host:port``, or ``host`` where a port is given for it; raises ValueError."""
    host, colon, number = text.partition(":")
    if not colon and port is not None and host:
        return host, port
    if not host or not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"'{text}' is no address such as 0.0.0.0:{CONTROL_PORT}")
    return host, int(number)
