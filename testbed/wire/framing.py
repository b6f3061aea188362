"""What a message weighs on the wire: content plus HTTP, TCP, IP and Ethernet headers.

A link's rate is charged on Ethernet frames, as the kernel's shaper counts them, so a rate of 50 mbit carries
46.9 Mbit/s of tensor. Constants are those of IPv4 with TCP timestamps at an MTU of 1500 bytes.
"""

from __future__ import annotations

import math

MTU = 1500
ETHERNET_HEADER = 14
"""Destination, source, type; the preamble and checksum are not seen by the kernel's shaper."""
TCP_HEADERS = 20 + 32
"""IPv4, and TCP with its timestamp option."""
SEGMENT = MTU - TCP_HEADERS
"""Bytes of a stream in one full TCP segment: 1448."""
CAST_HEADER = 20
"""Bytes of the agent's header in each datagram: which run, which cast and which part of it this is."""
CAST_HEADERS = 20 + 8 + CAST_HEADER
"""IPv4, UDP and the agent's own."""
CAST_CHUNK = MTU - CAST_HEADERS
"""Bytes of a cast in one datagram: 1452."""
WINDOW = 16 << 20
"""Bytes of messages to one peer that may be unacknowledged: once there are as many, the next message waits."""
CONGESTION_CONTROL = "reno"
"""TCP's congestion control on the links of every device: the only algorithm that each Linux kernel holds and allows."""
HTTP_HEADERS = 132
"""Request line and headers before one message, give or take some digits of its length and of the peer's address."""


def wire_bytes(content: float) -> float:
    """Return the bytes on the wire of one message with this many bytes of content, sent over HTTP."""
    stream = content + HTTP_HEADERS
    return stream + math.ceil(stream / SEGMENT) * (TCP_HEADERS + ETHERNET_HEADER)


def chunks(content: float) -> int:
    """Return the number of datagrams in which this many bytes are cast."""
    return max(1, math.ceil(content / CAST_CHUNK))


def cast_wire_bytes(content: float) -> float:
    """Return the bytes on the wire of one cast with this many bytes of content, in as many datagrams as it takes."""
    return content + chunks(content) * (CAST_HEADERS + ETHERNET_HEADER)
