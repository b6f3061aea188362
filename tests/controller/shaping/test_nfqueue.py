"""Messages of the kernel's netfilter queue, byte for byte, and the lateness of verdicts."""

from __future__ import annotations

import struct

import pytest

from testbed_controller.shaping import nfqueue
from testbed_controller.shaping.helper import LatenessHistogram


def test_netfilter_messages_byte_for_byte() -> None:
    # Each message begins with its length, type, flags, sequence number and port; the queue has the number 7.
    packet_id = struct.pack(">I", 0x01020304)
    verdict = nfqueue.make_verdict_prefix(7, nfqueue.ACCEPT) + packet_id
    assert verdict == bytes.fromhex(
        "20000000 0103 0100 00000000 00000000 00 00 0007 0c00 0200 00000001 01020304"
    )
    assert nfqueue.make_bind_message(7, 5) == bytes.fromhex(
        "1c000000 0203 0500 05000000 00000000 00 00 0007 0800 0100 01 00 0002"
    )
    # After the verdict follows the payload of 4 + 5 bytes, padded to a multiple of four.
    altered = nfqueue.make_altered_verdict(7, b"\1\2\3\4", b"abcde")
    attributes = bytes.fromhex("0c000200 00000001 01020304 0900 0a00")
    assert altered[20:] == attributes + b"abcde\0\0\0"


def test_arrival_time_is_read_at_any_position() -> None:
    # The packet header is an attribute of 11 bytes, padded to 12.
    header = bytes(16 + 4) + struct.pack("=HH", 11, 1) + bytes(8)
    # Attribute 4 is the time stamp: its length is in the byte order of the host, its seconds and microseconds are not.
    stamp = struct.pack("=HH", 20, 4) + struct.pack(">QQ", 1_700_000_000, 250_000)
    other = struct.pack("=HHI", 8, 5, 3)
    reader = nfqueue.TimestampReader()
    for attributes in (other + stamp, stamp, other + other + stamp + other):
        data = bytearray(header + attributes)
        assert reader.read(data, len(data)) == pytest.approx(1_700_000_000.25)
    without_stamp = bytearray(header + other)
    assert reader.read(without_stamp, len(without_stamp)) is None


def test_lateness_percentiles() -> None:
    lateness = LatenessHistogram()
    lateness.add(20e-6, 990)
    lateness.add(0.5, 10)
    summary = lateness.summary()
    # 20 us are in the bin up to 30 us, and a percentile is the upper end of its bin.
    assert summary["p50"] == pytest.approx(30e-6)
    assert (summary["p999"], summary["max"]) == (0.5, 0.5)
    assert LatenessHistogram().summary()["p99"] == 0
