"""Messages of netfilter queues (linux/netfilter/nfnetlink_queue.h) as bytes, and a check for kernel support.

An iptables rule with the target NFQUEUE puts packets into a numbered queue of their network namespace. The kernel holds
each packet and announces it to the process that has bound the queue to its socket. The process answers with a verdict,
which accepts the packet, alters it or drops it.

The announcement has the queue, the packet's identity, as much of its content as was requested, and possibly its arrival
time. Every value behind the fixed headers is an attribute: length, type, content.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from testbed.common.errors import HostError
from testbed_controller.shaping.namespaces import read_proc

# Verdicts: NF_ACCEPT and NF_DROP of linux/netfilter.h.
ACCEPT = 1
DROP = 0

# Constants of asm-generic/socket.h and linux/netlink.h, by the kernel's names.
_SO_RCVBUFFORCE = 33
_SO_SNDBUFFORCE = 32
_NETLINK_NETFILTER = 12
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
NLMSG_ERROR = 2
# Constants of linux/netfilter/nfnetlink.h and nfnetlink_queue.h.
_SUBSYSTEM = 3 << 8  # NFNL_SUBSYS_QUEUE
PACKET = _SUBSYSTEM | 0  # NFQNL_MSG_PACKET
_VERDICT = _SUBSYSTEM | 1  # NFQNL_MSG_VERDICT
_CONFIG = _SUBSYSTEM | 2  # NFQNL_MSG_CONFIG
_VERDICT_BATCH = _SUBSYSTEM | 3  # NFQNL_MSG_VERDICT_BATCH
_ATTRIBUTE_VERDICT = 2  # NFQA_VERDICT_HDR
_ATTRIBUTE_TIMESTAMP = 4  # NFQA_TIMESTAMP
_ATTRIBUTE_PAYLOAD = 10  # NFQA_PAYLOAD
# NFQA_CFG_CMD, NFQA_CFG_PARAMS, NFQA_CFG_QUEUE_MAXLEN
_CONFIG_COMMAND, _CONFIG_PARAMETERS, _CONFIG_MAXLEN = 1, 2, 3
_COMMAND_BIND = 1  # NFQNL_CFG_CMD_BIND
_COPY_META, _COPY_PACKET = 1, 2  # NFQNL_COPY_META, NFQNL_COPY_PACKET
WHOLE = 0xFFFF
"""Number of content bytes that requests whole packets."""

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_BODY = struct.Struct(">BBH")  # struct nfgenmsg: family, version, queue
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
_STAMP = struct.Struct(">QQ")  # struct nfqnl_msg_packet_timestamp
_STAMP_SIZE = _ATTRIBUTE.size + _STAMP.size
_FIRST_ATTRIBUTE = _HEADER.size + _BODY.size
_SEQUENCES = count(1)
"""Numbers of configuration messages, which the kernel repeats in its acknowledgements."""
IDENTITY_SIZE = 4
"""Size of a packet's identity in bytes."""
_RECEIVE_BUFFER = 64 << 20
"""Size of a socket's receive buffer in bytes; a packet that finds the buffer full is lost."""
_SEND_BUFFER = 1 << 20
"""Size of a socket's send buffer in bytes."""


def open_socket() -> socket.socket:
    """Open a socket to netfilter in the calling thread's network namespace; raises HostError without CAP_NET_ADMIN."""
    try:
        netfilter = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER
        )
        netfilter.bind((0, 0))
        # The FORCE variants may exceed the host's limits, such as net.core.rmem_max.
        netfilter.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        netfilter.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER)
    except OSError as error:
        raise HostError(
            f"cannot open a netfilter socket: {error.strerror} (needs CAP_NET_ADMIN)"
        ) from error
    return netfilter


def _make_message(
    kind: int, queue: int, flags: int, sequence: int, attributes: bytes
) -> bytes:
    # Netlink headers have the byte order of the host, netfilter's own fields that of the network.
    body = _BODY.pack(0, 0, queue) + attributes
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, kind, _NLM_F_REQUEST | flags, sequence, 0) + body


def _make_attribute(kind: int, value: bytes) -> bytes:
    # Padded to a multiple of four bytes, which the length does not count.
    padding = bytes(-len(value) % 4)
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + padding


def make_bind_message(queue: int, sequence: int) -> bytes:
    """Return a message for binding a queue to a socket.

    >>> len(make_bind_message(queue=1, sequence=7))
    28
    """
    command = struct.pack(">BBH", _COMMAND_BIND, 0, socket.AF_INET)
    attribute = _make_attribute(_CONFIG_COMMAND, command)
    return _make_message(_CONFIG, queue, _NLM_F_ACK, sequence, attribute)


def make_configure_message(
    queue: int, limit: int, content: int, sequence: int
) -> bytes:
    """Return a message for limiting a queue's length and requesting ``content`` bytes of each packet."""
    mode = _COPY_PACKET if content else _COPY_META
    attributes = _make_attribute(_CONFIG_PARAMETERS, struct.pack(">IB", content, mode))
    attributes += _make_attribute(_CONFIG_MAXLEN, struct.pack(">I", limit))
    return _make_message(_CONFIG, queue, _NLM_F_ACK, sequence, attributes)


def make_verdict_prefix(queue: int, verdict: int, *, batch: bool = False) -> bytes:
    """Return a verdict up to the packet's identity, the last field.

    With ``batch``, the verdict applies to all packets of the queue up to the identified one.

    >>> message = make_verdict_prefix(1, ACCEPT) + b"\\0\\0\\0\\7"
    >>> len(message)
    32
    """
    kind = _VERDICT_BATCH if batch else _VERDICT
    attribute = _make_attribute(_ATTRIBUTE_VERDICT, struct.pack(">II", verdict, 0))
    # One prefix serves all packets of a queue: building each message would cost more than the decision.
    return _make_message(kind, queue, 0, 0, attribute)[:-IDENTITY_SIZE]


def make_altered_verdict(
    queue: int, identity: bytes | bytearray, packet: bytes
) -> bytes:
    """Return a verdict for accepting a packet with changed content."""
    verdict = struct.pack(">I", ACCEPT) + identity
    attributes = _make_attribute(_ATTRIBUTE_VERDICT, verdict)
    attributes += _make_attribute(_ATTRIBUTE_PAYLOAD, packet)
    return _make_message(_VERDICT, queue, 0, 0, attributes)


def packet_content(data: bytearray, length: int) -> bytes:
    """Return the packet content in a message of type `PACKET`, from the IP header on; empty if none was requested."""
    for at, size, kind in _attributes(data, length):
        if kind == _ATTRIBUTE_PAYLOAD:
            return bytes(data[at + _ATTRIBUTE.size : at + size])
    return b""


def _attributes(data: bytearray, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield position, size and type of each attribute of a message."""
    at = _FIRST_ATTRIBUTE
    while at + _ATTRIBUTE.size <= length:
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        yield at, size, kind
        # Attributes are padded to multiples of four bytes. A malformed size of 0 must not repeat the attribute forever.
        padded_size = (size + 3) & ~3
        at += max(_ATTRIBUTE.size, padded_size)


def packet_queue(data: bytearray) -> int:
    """Return the queue number in a message of type `PACKET`."""
    # The last field of the body, at a fixed position: indexing is faster than unpacking, and this runs for each packet.
    return data[18] << 8 | data[19]


def packet_identity(data: bytearray) -> bytearray:
    """Return the identity for verdicts: four bytes, ascending in the order of arrival, modulo 2**32."""
    # The identity begins the content of the first attribute.
    return data[24:28]


def check_support() -> None:
    """Bind and release a queue in the calling thread's network namespace; raises HostError without kernel support."""
    # A kernel without queues still opens the socket, so a queue is bound.
    with open_socket() as netfilter:
        netfilter.setblocking(False)
        try:
            configure_socket(netfilter, partial(make_bind_message, 1), bytearray(4096))
        except OSError as error:
            raise HostError(
                f"cannot bind a netfilter queue: {error.strerror or error}"
            ) from error


def configure_socket(
    netfilter: socket.socket,
    make_message: Callable[[int], bytes],
    buffer: bytearray,
    on_packet: Callable[[int], None] = lambda length: None,
) -> None:
    """Send a configuration message, and wait for the kernel's acknowledgement.

    ``make_message`` returns the message for a sequence number. The socket must be non-blocking. Packet messages may
    arrive before the acknowledgement: each is read into ``buffer``, and ``on_packet`` is called with its length. Raises
    OSError if the kernel refuses or does not respond within two seconds.
    """
    sequence = next(_SEQUENCES)
    netfilter.send(make_message(sequence))
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        select.select([netfilter], [], [], 0.1)
        # Read until nothing is left, which raises BlockingIOError.
        with contextlib.suppress(BlockingIOError):
            while True:
                length = netfilter.recv_into(buffer)
                kind = message_type(buffer)
                if kind == PACKET:
                    on_packet(length)
                elif kind == NLMSG_ERROR and _acknowledges(buffer, sequence):
                    return
    raise OSError("the kernel did not respond to the request for a netfilter queue")


def _acknowledges(message: bytearray, sequence: int) -> bool:
    """Return whether an `NLMSG_ERROR` message acknowledges a request; raises OSError if the kernel refuses it."""
    # The message has an error number, 0 for an acknowledgement, and the header of the request.
    error, _, _, _, request_sequence = struct.unpack_from(
        "=iIHHI", message, _HEADER.size
    )
    if request_sequence != sequence:
        return False
    if error:
        text = f"the kernel refused a netfilter queue: {os.strerror(-error)}"
        raise OSError(-error, text)
    return True


class TimestampReader:
    """A reader of arrival times in packet messages, which remembers the position of the time in the last message."""

    def __init__(self) -> None:
        # The position in messages of current kernels. A search corrects a wrong one.
        self._stamp_at = 48

    def read(self, data: bytearray, length: int) -> float | None:
        """Return the arrival time (CLOCK_REALTIME, seconds); None if the kernel has not recorded the time."""
        # The position depends on the attributes before, which are the same for all packets in most namespaces.
        if not self._is_stamp(data, self._stamp_at, length):
            stamp_at = _find_stamp(data, length)
            if stamp_at is None:
                return None
            self._stamp_at = stamp_at
        seconds, micro = _STAMP.unpack_from(data, self._stamp_at + _ATTRIBUTE.size)
        return float(seconds) + float(micro) * 1e-6

    @staticmethod
    def _is_stamp(data: bytearray, at: int, length: int) -> bool:
        if at + _STAMP_SIZE > length:
            return False
        # The low bytes of length and type, as on all processors that torch supports.
        return data[at] == _STAMP_SIZE and data[at + 2] == _ATTRIBUTE_TIMESTAMP


def _find_stamp(data: bytearray, length: int) -> int | None:
    for at, size, kind in _attributes(data, length):
        if kind == _ATTRIBUTE_TIMESTAMP and size == _STAMP_SIZE:
            return at
    return None


def message_type(data: bytearray) -> int:
    """Return the type of a message, the field ``nlmsg_type``."""
    # Little-endian, as all processors that torch supports.
    return data[4] | data[5] << 8


def kernel_queues() -> list[dict[str, int]]:
    """Return the bound netfilter queues of the calling thread's namespace with their drop counters.

    ``queue_dropped`` counts packets that found the queue full, ``user_dropped`` those that found the socket full.
    """
    # In the order in which seq_show prints them (nfnetlink_queue.c of the kernel).
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
