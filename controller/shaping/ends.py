"""Sockets inside the devices' own namespaces, by which links are measured."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from controller.shaping.namespaces import Namespace
from controller.shaping.plan import FRAME

HEADERS = 42
"""Bytes of Ethernet, IP and UDP before a datagram's content."""
CONTENT = struct.Struct("=8sIId")
"""At the beginning of each: which measurement, which link of it, number, and seconds of sending."""
SMALL_FRAME = HEADERS + CONTENT.size
BUFFER_PER_FRAME = 2304
"""What the kernel charges to a socket for a full frame."""
MOST_FRAMES = 4000
"""On their way to one socket."""
SO_TIMESTAMPNS = 35
ETHERNET = 14
"""Bytes before a packet."""
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_SO_RCVBUFFORCE = 33


@dataclass(frozen=True)
class Site:
    """Where one end of a link is."""

    namespace: Namespace | None
    """None on another host."""
    address: str
    uplink: float | None = None
    downlink: float | None = None


@dataclass(frozen=True)
class Ends:
    """The ends of the probes on one device."""

    sender: socket.socket
    receiver: socket.socket
    frame: int
    """Bytes of the largest Ethernet frame that the device sends."""

    @property
    def target(self) -> tuple[str, int]:
        """Where the receiver is reached."""
        address: tuple[str, int] = self.receiver.getsockname()
        return address


@dataclass(frozen=True)
class FarEnds:
    """The ends of the probes on a device on another host."""

    target: tuple[str, int]
    frame: int = FRAME
    sender: None = None
    receiver: None = None


@contextlib.contextmanager
def sockets(sites: Mapping[str, Site], names: Iterable[str]) -> Iterator[dict[str, Ends]]:
    """Open a sending and a receiving socket on a port of their own in each device."""
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in sorted(names):
            site = sites[name]
            assert site.namespace is not None
            ends[name] = site.namespace.run(lambda site=site: _open(site.address))  # type: ignore[misc]
            stack.enter_context(ends[name].sender)
            stack.enter_context(ends[name].receiver)
        yield ends


def _open(address: str) -> Ends:
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for each in (sender, receiver):
        each.bind((address, 0))
        each.setblocking(False)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2 * MOST_FRAMES * BUFFER_PER_FRAME)
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return Ends(sender, receiver, _largest(sender, address))


def _largest(link: socket.socket, address: str) -> int:
    """Return the bytes of the largest frame of the interface with an address: in a VXLAN less than elsewhere."""
    for _, name in socket.if_nameindex():
        request = struct.pack("16s24x", name.encode())
        with contextlib.suppress(OSError):  # it has no address
            if fcntl.ioctl(link, _SIOCGIFADDR, request)[20:24] == socket.inet_aton(address):
                mtu: int = struct.unpack_from("=i", fcntl.ioctl(link, _SIOCGIFMTU, request), 16)[0]
                return min(FRAME, mtu + ETHERNET)
    return FRAME


class Listener:
    """Waits for several sockets with microseconds, which epoll alone does not."""

    def __init__(self, receivers: Iterable[socket.socket]) -> None:
        self._epoll = select.epoll()
        self._receivers = {receiver.fileno(): receiver for receiver in receivers}
        for descriptor in self._receivers:
            self._epoll.register(descriptor, select.EPOLLIN)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()

    def ready(self, seconds: float) -> list[socket.socket]:
        """Wait at most so long; return the sockets that have something."""
        select.select([self._epoll.fileno()], [], [], max(0.0, seconds))
        return [self._receivers[descriptor] for descriptor, _ in self._epoll.poll(0)]
