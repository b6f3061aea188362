"""A cast as it travels: a message with as little around it as can be, since at 250 kbit/s 320 bytes take 10 ms.

All devices of a run know the names of all, so a name is a number in their order, and the audience a bitmap. The
sender's incarnation and the number of the cast stand before each datagram (`testbed_agent.casting`) and not again here.
In this order:

==================  ====================================================================================
two bytes           number of the sender, little-endian
a bit a device      whether it is for that device, from the lowest bit of the first byte on
text                kind of the message
length, JSON        the fields; of no fields nothing
one byte            how many tensors there are
of each             text: its name; one byte: its type; one byte: how many axes; length: each of them
length              of the padding
the rest            values of all tensors, row by row, little-endian; padding
==================  ====================================================================================

A text is a byte with its length, and UTF-8. A length has seven bits a byte, the lowest first, with the eighth set where
another follows (LEB128).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from testbed.common.lazy import np
from testbed.wire import arrays
from testbed.wire import tensors as safetensors
from testbed.wire.framing import cast_wire_bytes
from testbed.wire.message import HEADER_LIMIT, Message, WireError
from testbed.wire.tensors import Raw, TensorError

HEADER = 64
"""Bytes before the values of a cast that carries one tensor and two small fields, at most, among 64 devices."""
_TYPES = tuple(safetensors.ITEM_SIZES)


def size_around(tensor: float) -> float:
    """Return about how many bytes on the wire a cast will have that carries one tensor of this many bytes."""
    return cast_wire_bytes(tensor + HEADER)


class CastForm:
    """How a device casts messages to the others of its run, and reads theirs."""

    def __init__(self, name: str, devices: Iterable[str]) -> None:
        self.name = name
        self._names = sorted({name, *devices})
        self._places = {name: place for place, name in enumerate(self._names)}
        self._bitmap = -(-len(self._names) // 8)
        self._header_sizes: dict[object, int] = {}

    def header_size(self, message: Message, peers: Collection[str], fields: int) -> int:
        """Return the bytes of `header`, mostly without making it, raising as it does; ``fields``: their JSON bytes."""
        tensors = ((name, tensor.dtype, tensor.shape) for name, tensor in message.tensors.items())
        form = (message.kind, fields, message.padding, *tensors)
        size = self._header_sizes.get(form)
        if size is None:
            size = self._header_sizes[form] = len(self.header(message, peers))
        return size

    def header(self, message: Message, peers: Collection[str]) -> bytes:
        """Return what stands before the values; raises WireError for what is no JSON, too long or does not travel."""
        audience = sum(1 << self._places[peer] for peer in set(peers))
        found = bytearray(self._places[self.name].to_bytes(2, "little"))
        found += audience.to_bytes(self._bitmap, "little")
        try:
            fields = json.dumps(dict(message.fields), separators=(",", ":")).encode() if message.fields else b""
            if len(fields) > HEADER_LIMIT:
                raise WireError(f"the fields of '{message.kind}' take {len(fields)} bytes of JSON")
            found += _text(message.kind) + _length(len(fields)) + fields + bytes([len(message.tensors)])
            for name, tensor in message.tensors.items():
                code = _TYPES.index(safetensors.type_of(name, tensor))
                found += _text(name) + bytes([code, len(tensor.shape)])
                for size in tensor.shape:
                    found += _length(size)
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"a message '{message.kind}' cannot be cast: {error}") from error
        return bytes(found + _length(message.padding))

    def encode(self, message: Message, peers: Collection[str]) -> bytes:
        """Return a message in one piece. Raises WireError as `header` does."""
        values = [tensor.data for tensor in arrays.to_raw(message.tensors)] if message.tensors else []
        return b"".join([self.header(message, peers), *values, bytes(message.padding)])

    def decode(self, data: bytes | bytearray) -> tuple[Message, int] | None:
        """Return a message and how many bytes its header has; None where it is for others.

        Raises WireError for anything but what `encode` makes.
        """
        try:
            return self._decode(_Reader(data))
        except (IndexError, UnicodeDecodeError, RecursionError, TensorError, ValueError) as error:
            raise WireError(f"not a cast: {error}") from error

    def _decode(self, reader: _Reader) -> tuple[Message, int] | None:
        sender = self._names[int.from_bytes(reader.take(2), "little")]
        if not int.from_bytes(reader.take(self._bitmap), "little") >> self._places[self.name] & 1:
            return None
        kind, text = reader.text(), reader.take(reader.length())
        fields = json.loads(text) if text else {}
        if not isinstance(fields, dict):
            raise WireError("the fields of a cast are no object")
        described = []
        for _ in range(reader.take(1)[0]):
            name, (code, axes) = reader.text(), reader.take(2)
            described.append((name, _TYPES[code], tuple(reader.length() for _ in range(axes))))
        padding, header = reader.length(), reader.place
        raw = []
        for name, dtype, shape in described:
            # A copy: values at any place in the datagrams would not be aligned.
            values = memoryview(bytearray(reader.take(math.prod(shape) * safetensors.ITEM_SIZES[dtype])))
            raw.append(Raw(name, dtype, shape, values))
        if reader.left != padding:
            raise WireError("a cast that is longer or shorter than it says")
        return Message(kind, fields, arrays.from_raw(raw) if raw else {}, sender, padding), header


def with_gaps(message: Message, header: int, frame: int, lost: Iterable[int]) -> Message | None:
    """Return what is left of a cast without some of its frames, of ``frame`` bytes each, from 0.

    None where one of them is of the ``header`` bytes before the values. A value is missing with any byte of it.
    """
    tensors, missing, end = dict(message.tensors), {}, header
    lost = sorted(lost)
    if lost and lost[0] * frame < header:
        return None
    for name, tensor in message.tensors.items():
        start, end = end, end + tensor.nbytes
        size = safetensors.ITEM_SIZES[safetensors.type_of(name, tensor)]
        gaps = np.zeros(math.prod(tensor.shape), np.bool_)
        for number in lost:
            gaps[max(0, (number * frame - start) // size) : max(0, -(-((number + 1) * frame - start) // size))] = True
        if gaps.any():
            tensors[name], missing[name] = arrays.library_of(tensor).mask(tensor, gaps.reshape(tuple(tensor.shape)))
    return replace(message, tensors=tensors, missing=missing) if missing else message


class _Reader:
    """Takes bytes one after the other; raises IndexError where there are no more."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.place = 0
        self._data = memoryview(data)

    @property
    def left(self) -> int:
        return len(self._data) - self.place

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise IndexError("it ends too early")
        self.place += count
        return bytes(self._data[self.place - count : self.place])

    def text(self) -> str:
        return self.take(self.take(1)[0]).decode()

    def length(self) -> int:
        found = shift = 0
        while True:
            byte = self.take(1)[0]
            found |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return found
            shift += 7
            if shift > 42:
                raise ValueError("a length without an end")


def _length(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(found + bytes([value]))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return bytes([len(encoded)]) + encoded
