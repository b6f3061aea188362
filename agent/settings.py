"""Settings of a device, from the environment of its container."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from testbed.wire.ports import CAST_PORT, CONTROL_PORT, DATA_PORT

Address = tuple[str, int]
_ANYWHERE = "0.0.0.0"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Settings:
    """Who this device is, where it listens, and how much it takes in."""

    run: str
    device: str
    token: str
    control: Address = (_ANYWHERE, CONTROL_PORT)
    data: Address = (_ANYWHERE, DATA_PORT)
    cast: Address = (_ANYWHERE, CAST_PORT)
    disk: str = "/state"
    """Folder that outlives a restart of the device."""
    disk_limit: int = 4 << 30
    """Bytes that the program may keep there; beyond, it is ended."""
    message_limit: int = 256 << 20
    """Bytes of one message between devices."""
    body_limit: int = 2 << 30
    """Bytes of one request of the controller: a data set, a shard."""
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


def control_address(settings: Settings) -> Address:
    """Return where the control API listens: not on the data network, where its address is given.

    Raises SystemExit where there is no other.
    """
    if settings.control[0] != _ANYWHERE or settings.data[0] == _ANYWHERE:
        return settings.control
    for host in _hosts():
        if host != settings.data[0] and not host.startswith("127."):
            return host, settings.control[1]
    raise SystemExit("agent: there is no network beside that of TESTBED_DATA_ADDRESS, to be controlled by")


def _hosts() -> Iterator[str]:
    """Yield the IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(link, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield socket.inet_ntoa(answer[20:24])


def address(text: str, port: int | None = None) -> Address:
    """Read ``host:port``, or ``host`` where a port is given for it; raises ValueError."""
    host, colon, number = text.partition(":")
    if not colon and port is not None and host:
        return host, port
    if not host or not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"'{text}' is no address such as 0.0.0.0:{CONTROL_PORT}")
    return host, int(number)
