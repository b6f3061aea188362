"""Compact encoding of broadcasts: at 250 kbit/s, every 320 bytes of overhead cost 10 ms.

Every device knows all names of its run, so a name is encoded as an index into the sorted names, and the audience (the
receiving devices) as a bitmap. The sender's incarnation and the sequence number precede each datagram
(`testbed_agent.casting`) and are not repeated here. The header is all bytes before the values. The fields in order:

==================  ====================================================================================
two bytes           index of the sender, little-endian
one bit per device  whether the broadcast is for the device, from the lowest bit of the first byte on
text                kind of the message
length, JSON        the fields; empty if the message has none
one byte            number of tensors
for each tensor     text: its name; one byte: its type; one byte: number of axes; length: size of each axis
length              number of padding bytes
the rest            values of all tensors, row by row, little-endian; padding
==================  ====================================================================================

A text is UTF-8 after one byte with its length. A length is an unsigned LEB128 integer: seven bits a byte, the lowest
first, and the eighth bit set if another byte follows.
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
"""Maximum header size, in bytes, of a broadcast with one tensor and two small fields among 64 devices."""
_TYPES = tuple(safetensors.ITEM_SIZES)
"""Types of tensors; the one-byte code of a type is its index in this tuple."""


def size_around(tensor: float) -> float:
    """Return the approximate wire size, in bytes, of a broadcast with one tensor of ``tensor`` bytes."""
    return cast_wire_bytes(tensor + HEADER)


class CastEncoding:
    """Encoder and decoder of the broadcasts of one run, for one device.

    Example::

        encoding = CastEncoding("worker1", ["worker1", "worker2"])
        data = encoding.encode(Message("hello", {"step": 1}), ["worker2"])
    """

    def __init__(self, name: str, devices: Iterable[str]) -> None:
        self.name = name
        # Sorted, so that all devices agree on the indices.
        self._names = sorted({name, *devices})
        self._indices = {name: index for index, name in enumerate(self._names)}
        self._audience_bytes = math.ceil(len(self._names) / 8)
        """Size of the audience's bitmap, in bytes."""
        self._header_sizes: dict[object, int] = {}
        """Cached results of `header_size`, by the properties of a message that determine them."""

    def header_size(self, message: Message, peers: Collection[str], fields: int) -> int:
        """Return the size of `header` in bytes, mostly from a cache; raises the same errors.

        ``fields`` is the size of the message's fields as JSON, in bytes.
        """
        tensors = (
            (name, tensor.dtype, tensor.shape)
            for name, tensor in message.tensors.items()
        )
        # Only the length of the fields' text affects the size; the size of the audience is constant.
        properties = (message.kind, fields, message.padding, *tensors)
        size = self._header_sizes.get(properties)
        if size is None:
            size = len(self.header(message, peers))
            self._header_sizes[properties] = size
        return size

    def header(self, message: Message, peers: Collection[str]) -> bytes:
        """Return the bytes before the tensor values.

        Raises WireError if the fields are too long or not JSON, or if a tensor's type has no wire encoding.
        """
        audience = sum(1 << self._indices[peer] for peer in set(peers))
        encoded = bytearray(self._indices[self.name].to_bytes(2, "little"))
        encoded += audience.to_bytes(self._audience_bytes, "little")
        try:
            fields = b""
            # Without fields, no bytes: an empty JSON object would take two.
            if message.fields:
                text = json.dumps(dict(message.fields), separators=(",", ":"))
                fields = text.encode()
            if len(fields) > HEADER_LIMIT:
                raise WireError(
                    f"the fields of '{message.kind}' take {len(fields)} bytes; at most {HEADER_LIMIT} are allowed"
                )
            encoded += _encode_text(message.kind)
            encoded += _encode_length(len(fields))
            encoded += fields
            encoded += bytes([len(message.tensors)])
            for name, tensor in message.tensors.items():
                code = _TYPES.index(safetensors.type_of(name, tensor))
                encoded += _encode_text(name) + bytes([code, len(tensor.shape)])
                for size in tensor.shape:
                    encoded += _encode_length(size)
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(
                f"message '{message.kind}' cannot be broadcast: {error}"
            ) from error
        return bytes(encoded + _encode_length(message.padding))

    def encode(self, message: Message, peers: Collection[str]) -> bytes:
        """Return the bytes of a message for the named peers; raises WireError as `header` does."""
        values = []
        # Without tensors, no array library is imported.
        if message.tensors:
            values = [tensor.data for tensor in arrays.to_raw(message.tensors)]
        return b"".join([self.header(message, peers), *values, bytes(message.padding)])

    def decode(self, data: bytes | bytearray) -> tuple[Message, int] | None:
        """Return a message and the size of its header in bytes, or None for a broadcast to other devices.

        Raises WireError for bytes that `encode` cannot have written.
        """
        try:
            return self._decode(_Reader(data))
        except (
            IndexError,
            UnicodeDecodeError,
            RecursionError,
            TensorError,
            ValueError,
        ) as error:
            raise WireError(f"malformed broadcast: {error}") from error

    def _decode(self, reader: _Reader) -> tuple[Message, int] | None:
        sender = self._names[int.from_bytes(reader.take_bytes(2), "little")]
        audience = int.from_bytes(reader.take_bytes(self._audience_bytes), "little")
        if not audience >> self._indices[self.name] & 1:
            return None
        kind = reader.read_text()
        text = reader.take_bytes(reader.read_length())
        fields = json.loads(text) if text else {}
        if not isinstance(fields, dict):
            raise WireError("the fields must be a JSON object")
        descriptions = []
        for _ in range(reader.take_bytes(1)[0]):
            name = reader.read_text()
            code, axes = reader.take_bytes(2)
            shape = tuple(reader.read_length() for _ in range(axes))
            descriptions.append((name, _TYPES[code], shape))
        padding = reader.read_length()
        header_size = reader.position
        raw = []
        for name, dtype, shape in descriptions:
            size = math.prod(shape) * safetensors.ITEM_SIZES[dtype]
            # A copy, since values are not aligned inside the datagrams.
            values = bytearray(reader.take_bytes(size))
            raw.append(Raw(name, dtype, shape, memoryview(values)))
        if reader.remaining != padding:
            raise WireError("payload length does not match the header")
        tensors = arrays.from_raw(raw) if raw else {}
        return Message(kind, fields, tensors, sender, padding), header_size


def with_gaps(
    message: Message, header: int, frame: int, lost: Iterable[int]
) -> Message | None:
    """Return a broadcast with zeros instead of the values in lost frames.

    A frame has ``frame`` bytes, and ``lost`` are the numbers of lost frames, counted from 0. A value is missing if any
    of its bytes is lost; `Message.missing` marks missing values. Returns None if a lost frame contains some of the
    first ``header`` bytes, since the broadcast cannot be decoded then.
    """
    lost = sorted(lost)
    if lost and lost[0] * frame < header:
        return None
    tensors = dict(message.tensors)
    missing = {}
    end = header
    for name, tensor in message.tensors.items():
        start, end = end, end + tensor.nbytes
        item_size = safetensors.ITEM_SIZES[safetensors.type_of(name, tensor)]
        gaps = np.zeros(math.prod(tensor.shape), np.bool_)
        for number in lost:
            # Byte offset of the frame from the first value of this tensor.
            frame_offset = number * frame - start
            # A value that is partly in the frame is lost as well, so the bounds are rounded outwards.
            first = frame_offset // item_size
            stop = math.ceil((frame_offset + frame) / item_size)
            # A negative bound is in an earlier tensor. As an index, it would count from the end of this tensor.
            gaps[max(0, first) : max(0, stop)] = True
        if gaps.any():
            library = arrays.library_of(tensor)
            shaped = gaps.reshape(tuple(tensor.shape))
            tensors[name], missing[name] = library.mask(tensor, shaped)
    if not missing:
        return message
    return replace(message, tensors=tensors, missing=missing)


class _Reader:
    """A cursor over the bytes of a broadcast; raises IndexError at the end."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.position = 0
        self._data = memoryview(data)

    @property
    def remaining(self) -> int:
        return len(self._data) - self.position

    def take_bytes(self, count: int) -> bytes:
        if count > self.remaining:
            raise IndexError("the broadcast is truncated")
        start = self.position
        self.position += count
        return bytes(self._data[start : self.position])

    def read_text(self) -> str:
        return self.take_bytes(self.take_bytes(1)[0]).decode()

    def read_length(self) -> int:
        value = shift = 0
        while True:
            byte = self.take_bytes(1)[0]
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            # Seven bytes of 7 bits hold every possible length; malformed bytes must not build huge numbers.
            if shift > 42:
                raise ValueError("a length has more than seven bytes")


def _encode_length(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded + bytes([value]))


def _encode_text(value: str) -> bytes:
    encoded = value.encode()
    # `bytes` raises ValueError beyond 255, which `header` turns into a WireError.
    return bytes([len(encoded)]) + encoded
