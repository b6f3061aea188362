"""What a run learns, written as it happens for programs that watch files: rows of CSV, scalars for TensorBoard."""

from __future__ import annotations

import csv
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from testbed.trace.events import Event

SCALARS: Mapping[str, Mapping[str, str]] = {
    "step": {"loss": "loss/training"},
    "evaluate": {"loss": "loss/test", "accuracy": "accuracy"},
    "request": {"latency": "latency"},
}
"""Events of the streams, the fields that are written of each, and what TensorBoard calls them."""
COLUMNS = ("time", "device", "event", "step", "loss", "accuracy", "latency")

Take = Callable[[Event], None]


@contextmanager
def streaming(folder: Path, kinds: Sequence[str]) -> Iterator[Take]:
    """Return what takes the events of a run that is written to a folder; ``kinds`` are names of `STREAMS`."""
    with ExitStack() as stack:
        takers = [STREAMS[kind](stack, folder) for kind in kinds]

        def take(event: Event) -> None:
            if event.event in SCALARS:
                for each in takers:
                    each(event)

        yield take


def _step(event: Event) -> int:
    return int(event.fields.get("step", event.fields.get("request", 0)))


def _csv(stack: ExitStack, folder: Path) -> Take:
    """Write ``stream.csv``, a row an event."""
    file = stack.enter_context((folder / "stream.csv").open("w", newline="", encoding="utf-8", buffering=1))
    table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
    table.writeheader()

    def take(event: Event) -> None:
        row = {"time": event.time, "device": event.device, "event": event.event, "step": _step(event)}
        table.writerow(row | {name: event.fields.get(name) for name in ("loss", "accuracy", "latency")})

    return take


def _tensorboard(stack: ExitStack, folder: Path) -> Take:
    """Write ``events.out.tfevents....testbed``; its times are those of the run after its beginning here."""
    began = time.time()
    path = folder / f"events.out.tfevents.{int(began)}.testbed"
    file: IO[bytes] = stack.enter_context(path.open("wb", buffering=0))
    # Field 3 of an Event is the version of the format.
    file.write(_record(_double(1, began) + _bytes(3, b"brain.Event:2")))

    def take(event: Event) -> None:
        for key, name in SCALARS[event.event].items():
            value: Any = event.fields.get(key)
            if value is not None:
                # Event: wall_time 1, step 2, summary 5; Summary: value 1; Value: tag 1, simple_value 2.
                scalar = _bytes(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, value)
                file.write(
                    _record(_double(1, began + event.time) + _number(2, _step(event)) + _bytes(5, _bytes(1, scalar)))
                )

    return take


STREAMS: Mapping[str, Callable[[ExitStack, Path], Take]] = {"csv": _csv, "tensorboard": _tensorboard}


def _record(data: bytes) -> bytes:
    """Frame a message as TFRecord does: length, its checksum, data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    """Return the masked CRC-32C (Castagnoli) that TFRecord holds of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    """Write a whole number from 0 on as protocol buffers do: seven bits a byte, the lowest first."""
    found = []
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
