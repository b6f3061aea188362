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
FRAGMENT = 1480
"""Bytes of a datagram in one full IPv4 fragment (a multiple of 8)."""
HTTP_HEADERS = 250
"""Request line and headers around one message, sent with it."""


def segments(content: float) -> int:
    """Return how many TCP segments a message of so many bytes takes, HTTP headers included."""
    return math.ceil((content + HTTP_HEADERS) / SEGMENT)


def wire_bytes(content: float) -> float:
    """Return the bytes on the wire of one message with so many bytes of content, sent over HTTP."""
    stream = content + HTTP_HEADERS
    return stream + math.ceil(stream / SEGMENT) * (TCP_HEADERS + ETHERNET_HEADER)


def fragments(content: float) -> int:
    """Return how many IP fragments one datagram of so many bytes takes."""
    return math.ceil((content + 8) / FRAGMENT)


def cast_wire_bytes(content: float) -> float:
    """Return the bytes on the wire of one datagram, fragmented as needed."""
    return content + 8 + fragments(content) * (20 + ETHERNET_HEADER)
