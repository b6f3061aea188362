"""NFNETLINK queue messages (linux/netfilter/nfnetlink_queue.h) as bytes, and a check for kernel support.

Packets are requested without content, or with as much as needed; a message then has the queue, the packet's identity,
and possibly its arrival time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from testbed.common.errors import HostError
from testbed_controller.shaping.namespaces import read_proc

ACCEPT = 1
DROP = 0

_NETLINK_NETFILTER = 12
"""Constants of linux/netlink.h, linux/netfilter.h and linux/netfilter/nfnetlink_queue.h, and below of
asm-generic/socket.h."""
_SO_RCVBUFFORCE = 33
_SO_SNDBUFFORCE = 32
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
NLMSG_ERROR = 2
_SUBSYSTEM = 3 << 8
PACKET = _SUBSYSTEM | 0
_VERDICT = _SUBSYSTEM | 1
_CONFIG = _SUBSYSTEM | 2
_VERDICT_BATCH = _SUBSYSTEM | 3

_ATTRIBUTE_VERDICT = 2
_ATTRIBUTE_TIMESTAMP = 4
_ATTRIBUTE_PAYLOAD = 10
_CONFIG_COMMAND, _CONFIG_PARAMETERS, _CONFIG_MAXLEN = 1, 2, 3
_COMMAND_BIND = 1
_COPY_META, _COPY_PACKET = 1, 2
WHOLE = 0xFFFF
"""Number of bytes that requests whole packets."""

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_STAMP = struct.Struct(">QQ")
_FIRST_ATTRIBUTE = 20
_SEQUENCES = count(1)
IDENTITY = 4
"""Size of a packet's identity in bytes."""


def open_socket(receive_buffer: int = 64 << 20) -> socket.socket:
    """Open a socket to netfilter in the calling thread's network namespace; raises `HostError`."""
    try:
        netfilter = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER
        )
        netfilter.bind((0, 0))
        # FORCE exceeds net.core.rmem_max: packets that find the buffer full are lost.
        netfilter.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        netfilter.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 20)
    except OSError as error:
        raise HostError(
            f"cannot open a netfilter socket: {error.strerror} (needs CAP_NET_ADMIN)"
        ) from error
    return netfilter


def _make_message(
    kind: int, queue: int, flags: int, sequence: int, attributes: bytes
) -> bytes:
    # Netlink headers have the byte order of the host, netfilter's own fields that of the network.
    body = struct.pack(">BBH", 0, 0, queue) + attributes
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, kind, _NLM_F_REQUEST | flags, sequence, 0) + body


def _make_attribute(kind: int, value: bytes) -> bytes:
    # Padded to a multiple of four bytes, which the length does not count.
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def bind_message(queue: int, sequence: int) -> bytes:
    """Return a message for binding a queue to a socket.

    >>> len(bind_message(queue=1, sequence=7))
    28
    """
    command = struct.pack(">BBH", _COMMAND_BIND, 0, socket.AF_INET)
    attribute = _make_attribute(_CONFIG_COMMAND, command)
    return _make_message(_CONFIG, queue, _NLM_F_ACK, sequence, attribute)


def configure_message(queue: int, limit: int, content: int, sequence: int) -> bytes:
    """Return a message for limiting a queue's length and requesting ``content`` bytes of each packet."""
    mode = _COPY_PACKET if content else _COPY_META
    attributes = _make_attribute(_CONFIG_PARAMETERS, struct.pack(">IB", content, mode))
    attributes += _make_attribute(_CONFIG_MAXLEN, struct.pack(">I", limit))
    return _make_message(_CONFIG, queue, _NLM_F_ACK, sequence, attributes)


def verdict_prefix(queue: int, verdict: int, *, batch: bool = False) -> bytes:
    """Return a verdict up to the packet's identity, the last field.

    With ``batch``, the verdict applies to all packets of the queue up to the identified one.

    >>> whole = verdict_prefix(1, ACCEPT) + b"\\0\\0\\0\\7"
    >>> len(whole)
    32
    """
    kind = _VERDICT_BATCH if batch else _VERDICT
    attribute = _make_attribute(_ATTRIBUTE_VERDICT, struct.pack(">II", verdict, 0))
    # The same prefix serves all packets of a line: building each message would cost more than the decision.
    return _make_message(kind, queue, 0, 0, attribute)[:-IDENTITY]


def accept_altered(queue: int, identity: bytes | bytearray, packet: bytes) -> bytes:
    """Return a verdict for accepting a packet with changed content."""
    verdict = struct.pack(">I", ACCEPT) + identity
    attributes = _make_attribute(_ATTRIBUTE_VERDICT, verdict)
    attributes += _make_attribute(_ATTRIBUTE_PAYLOAD, packet)
    return _make_message(_VERDICT, queue, 0, 0, attributes)


def packet_content(data: bytearray, length: int) -> bytes:
    """Return the packet content in a message of type `PACKET`, starting with the IP header."""
    at = _FIRST_ATTRIBUTE
    while at + 4 <= length:
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _ATTRIBUTE_PAYLOAD:
            return bytes(data[at + 4 : at + size])
        at += max(4, (size + 3) & ~3)
    return b""


def packet_queue(data: bytearray) -> int:
    """Return the queue number in a message of type `PACKET`."""
    return data[18] << 8 | data[19]


def packet_identity(data: bytearray) -> bytearray:
    """Return the identity for verdicts: four bytes, ascending in the order of arrival, modulo 2**32.

    The packet header is always the first attribute of the message.
    """
    return data[24:28]


def check_support() -> None:
    """Bind and release a queue in the calling thread's network namespace; raises HostError without kernel support."""
    # Opening the socket alone proves nothing: that succeeds without queue support.
    with open_socket() as opened:
        opened.setblocking(False)
        try:
            configure_socket(opened, partial(bind_message, 1), bytearray(4096))
        except OSError as error:
            raise HostError(
                f"cannot bind a netfilter queue: {error.strerror or error}"
            ) from error


def configure_socket(
    opened: socket.socket,
    message: Callable[[int], bytes],
    buffer: bytearray,
    arrived: Callable[[int], None] = lambda length: None,
) -> None:
    """Send a configuration message with a sequence number, and wait for the kernel's acknowledgement.

    ``arrived`` is called with the length of each packet message that arrives meanwhile in ``buffer``. Raises OSError if
    the kernel refuses or does not respond within two seconds.
    """
    sequence = next(_SEQUENCES)
    opened.send(message(sequence))
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        select.select([opened], [], [], 0.1)
        with contextlib.suppress(BlockingIOError):
            while True:
                length = opened.recv_into(buffer)
                kind = message_type(buffer)
                if kind == PACKET:
                    arrived(length)
                elif kind == NLMSG_ERROR:
                    # An error message quotes the header of the request, with its sequence number.
                    error, _, _, _, answered = struct.unpack_from("=iIHHI", buffer, 16)
                    if answered != sequence:
                        continue
                    if error:
                        text = f"the kernel refused a netfilter queue: {os.strerror(-error)}"
                        raise OSError(-error, text)
                    return
    raise OSError("the kernel did not respond to the request for a netfilter queue")


class Stamps:
    """A reader of arrival times in packet messages, with a cache of their position."""

    def __init__(self) -> None:
        self._stamp_at = 48

    def read(self, data: bytearray, length: int) -> float | None:
        """Return the arrival time (CLOCK_REALTIME, seconds); None if the kernel has not recorded the time."""
        # The position depends on the attributes before, which are the same for all packets of most namespaces.
        at = self._stamp_at
        if at + 20 > length or data[at] != 20 or data[at + 2] != _ATTRIBUTE_TIMESTAMP:
            at = _FIRST_ATTRIBUTE
            while at + 4 <= length:
                size, kind = _ATTRIBUTE.unpack_from(data, at)
                if kind == _ATTRIBUTE_TIMESTAMP and size == 20:
                    break
                at += max(4, (size + 3) & ~3)
            else:
                return None
            self._stamp_at = at
        seconds, micro = _STAMP.unpack_from(data, at + 4)
        return float(seconds) + float(micro) * 1e-6


def message_type(data: bytearray) -> int:
    """Return the type of a message."""
    return data[4] | data[5] << 8


def kernel_queues() -> list[dict[str, int]]:
    """Return the netfilter queues of the calling thread's namespace with their drop counters."""
    columns = (
        "queue",
        "port",
        "waiting",
        "mode",
        "range",
        "queue_dropped",
        "user_dropped",
    )
    queues = []
    for line in read_proc("netfilter/nfnetlink_queue").splitlines():
        values = map(int, line.split())
        # Not strict: the kernel prints further columns.
        queues.append(dict(zip(columns, values, strict=False)))
    return queues
