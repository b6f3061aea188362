from __future__ import annotations

import csv
import struct
from pathlib import Path

import pytest

from controller.results.streams import _masked, streaming
from testbed.trace.events import Event
from tests.helpers import recorded

EVENTS = [
    Event(1.0, "a", "compute", {"span": "forward"}),
    Event(1.5, "a", "step", {"step": 300, "loss": 0.25, "samples": 8}),
    Event(2.5, "a", "evaluate", {"step": 300, "loss": 0.5, "accuracy": 0.75}),
    Event(3.0, "b", "request", {"request": 2, "latency": 0.125}),
    Event(4.0, "a", "step", {"step": 301, "loss": None, "samples": 8}),
]


def test_rows_are_there_as_they_come(tmp_path: Path) -> None:
    with streaming(tmp_path, ["csv"]) as take:
        for count, event in enumerate(EVENTS):
            take(event)
            assert len((tmp_path / "stream.csv").read_text().splitlines()) == count + 1
    with (tmp_path / "stream.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {
        "time": "2.5",
        "device": "a",
        "event": "evaluate",
        "step": "300",
        "loss": "0.5",
        "accuracy": "0.75",
        "latency": "",
    }


def test_scalars_are_framed_and_checked_as_tensorboard_reads_them(tmp_path: Path) -> None:
    with streaming(tmp_path, ["tensorboard"]) as take:
        for event in EVENTS:
            take(event)
        [path] = tmp_path.glob("events.out.tfevents.*")
        content = path.read_bytes()
    records = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        assert (content[8:12], content[12 + length : 16 + length]) == (_masked(content[:8]), _masked(data))
        records.append(data)
        content = content[16 + length :]
    assert b"brain.Event:2" in records[0]
    began = struct.unpack("<d", records[0][1:9])[0]
    scalars = [_scalar(record, began) for record in records[1:]]
    assert scalars == [
        (pytest.approx(1.5, abs=1e-5), 300, b"loss/training", 0.25),
        (pytest.approx(2.5, abs=1e-5), 300, b"loss/test", 0.5),
        (pytest.approx(2.5, abs=1e-5), 300, b"accuracy", 0.75),
        (pytest.approx(3.0, abs=1e-5), 2, b"latency", 0.125),
    ]


def _scalar(record: bytes, began: float) -> tuple[float, int, bytes, float]:
    """Read a record by the layout of Event: time, step in one or two bytes, summary with one value."""
    time = struct.unpack("<d", record[1:9])[0] - began
    length = 2 if record[10] & 0x80 else 1
    step = record[10] & 0x7F | (record[11] << 7 if length == 2 else 0)
    value = record[10 + length + 4 :]
    return time, step, value[2 : 2 + value[1]], struct.unpack("<f", value[-4:])[0]


def test_the_checksum_is_castagnolis() -> None:
    crc = 0xE3069283  # of "123456789", the check value of CRC-32C
    assert _masked(b"123456789") == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_a_run_without_streams_writes_none(tmp_path: Path) -> None:
    with streaming(tmp_path, []) as take:
        for event in recorded.events():
            take(event)
    assert list(tmp_path.iterdir()) == []
