"""Size of messages on the wire: content plus HTTP, TCP, IP and Ethernet headers.

A link's rate applies to Ethernet frames, as the kernel's shaper counts them, so a rate of 50 mbit carries
46.9 Mbit/s of tensor data. The constants are those of IPv4 with TCP timestamps at an MTU of 1500 bytes.
"""

from __future__ import annotations

import math

MTU = 1500
"""Maximum bytes of an IP packet on Ethernet."""
ETHERNET_HEADER = 14
"""Bytes of destination, source and type; the kernel's shaper does not count the preamble and the checksum."""
TCP_HEADERS = 20 + 32
"""Bytes of the headers of IPv4 and of TCP with its timestamp option."""
SEGMENT = MTU - TCP_HEADERS
"""Bytes of a stream in one full TCP segment: 1448."""
CAST_HEADER = 20
"""Bytes of the agent's header in each datagram: run, broadcast number and part number."""
CAST_HEADERS = 20 + 8 + CAST_HEADER
"""Bytes of the headers of IPv4, UDP and the agent in each datagram."""
CAST_CHUNK = MTU - CAST_HEADERS
"""Bytes of a broadcast in one datagram: 1452."""
CAST_BUFFER = 8 << 20
"""Bytes of the kernel's memory requested for received datagrams that the agent has not read; the host's
net.core.rmem_max limits it. A datagram of 1,500 bytes occupies 2,304."""
WINDOW = 16 << 20
"""Maximum number of unacknowledged message bytes to one peer; further messages wait."""
CONGESTION_CONTROL = "reno"
"""TCP congestion control of every device: the only algorithm that every Linux kernel has and allows."""
HTTP_HEADERS = 132
"""Size of the request line and headers of a message; the digits of its length and address change it slightly."""


def wire_bytes(content: float) -> float:
    """Return the bytes on the wire of a message with ``content`` bytes, sent over HTTP.

    >>> wire_bytes(1000)
    1198
    """
    stream = content + HTTP_HEADERS
    segments = math.ceil(stream / SEGMENT)
    return stream + segments * (TCP_HEADERS + ETHERNET_HEADER)


def chunks(content: float) -> int:
    """Return the number of datagrams for a broadcast of ``content`` bytes.

    >>> chunks(3000)
    3
    """
    # An empty broadcast is a datagram as well.
    return max(1, math.ceil(content / CAST_CHUNK))


def cast_wire_bytes(content: float) -> float:
    """Return the bytes on the wire of a broadcast with ``content`` bytes, including all datagram headers.

    >>> cast_wire_bytes(1000)
    1062
    """
    return content + chunks(content) * (CAST_HEADERS + ETHERNET_HEADER)
