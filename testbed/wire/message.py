"""Messages between devices, and their form on the wire (see ``encode``)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from math import isfinite
from types import MappingProxyType
from typing import Any

from testbed.wire import arrays
from testbed.wire import tensors as safetensors
from testbed.wire.framing import wire_bytes
from testbed.wire.tensors import Buffer, TensorError

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""What a message has of that which it lacks; one for all, since most have no tensors."""


@dataclass(slots=True, init=False)
class Message:
    """What one device sends to another. Nothing keeps a program from changing one, but what was sent is a copy already.

    ``fields`` hold small JSON values; ``tensors`` travel as safetensors. ``sender`` is set by the runtime that delivers
    the message, never trusted from its maker. ``padding`` is a number of bytes charged beside the content, for
    programs that study timing without tensors.
    """

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]
    sender: str
    padding: int
    missing: Mapping[str, Any]
    """Where values of a cast's tensors, by name, are missing since frames were lost; they are zeros then."""

    def __init__(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        sender: str = "",
        padding: int = 0,
        missing: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.fields = NOTHING if fields is None else fields
        self.tensors = NOTHING if tensors is None else tensors
        self.sender = sender
        self.padding = padding
        self.missing = NOTHING if missing is None else missing

    def __getitem__(self, key: str) -> Any:
        """Return one of the fields."""
        return self.fields[key]


MAGIC = b"EDGE"
VERSION = 1
HEADER_LIMIT = 1 << 20
"""Bytes of JSON in one message, at most."""
ENVELOPE = 320
"""Bytes that `encode` puts around the one tensor of an activation or a gradient, about: prefix and headers."""
_PREFIX = struct.Struct("<4sB3xIQ")
"""Magic, version, bytes of the JSON header, bytes of everything after it but the padding."""


class WireError(ValueError):
    """These bytes are no message, or this message cannot travel."""


@dataclass(frozen=True)
class Envelope:
    """A message as it arrived, with what distinguishes a repetition from a new one."""

    message: Message
    incarnation: int
    """Larger for each later start of the sender's program."""
    sequence: int
    """Larger for each later message of that incarnation to this receiver."""


def encode(message: Message, sender: str, incarnation: int = 0, sequence: int = 0) -> bytes:
    """Return a message in one piece: prefix, JSON header, safetensors, padding.

    The tensors' values are copied, so the program may go on to change them. Raises WireError when the fields are not
    JSON or the tensors of no type that travels.
    """
    header = {
        "kind": message.kind,
        "fields": dict(message.fields),
        "sender": sender,
        "incarnation": incarnation,
        "sequence": sequence,
        "padding": message.padding,
    }
    text = _json(header, message.kind).encode()
    _check_header(len(text), message.kind)
    body: list[Buffer] = []
    if message.tensors:
        try:
            body = safetensors.write(arrays.to_raw(message.tensors), offset=_PREFIX.size + len(text))
        except TensorError as error:
            raise WireError(f"message '{message.kind}': {error}") from error
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), sum(len(piece) for piece in body))
    return b"".join([prefix, text, *body, bytes(message.padding)])


def content_size(message: Message, sender: str) -> int:
    """Return how many bytes `encode` makes of a message, without making them.

    Exact where the sender's incarnation and the sequence number have as many digits as they usually have. Raises
    WireError as `encode` does.
    """
    return _content_size(message, sender, _read_back(message)[1])


def size(message: Message, sender: str) -> float:
    """Return the bytes on the wire of a message to one peer: its content, and headers from HTTP down to Ethernet."""
    return wire_bytes(content_size(message, sender))


def size_around(tensor: float) -> float:
    """Return about the bytes on the wire of a message that carries one tensor of this many bytes, for planners."""
    return wire_bytes(tensor + ENVELOPE)


def delivered(message: Message, sender: str) -> tuple[Message, int]:
    """Return the message as its receiver will see it, sharing nothing that can change, and its `content_size`.

    It is what `decode` makes of what `encode` writes, for those who need not really write it. Raises WireError as
    `encode` does.
    """
    fields, length = _read_back(message)
    return _copied(message, fields, sender), _content_size(message, sender, length)


def as_cast(message: Message, sender: str) -> tuple[Message, int]:
    """Return the message as `delivered` does, and the bytes of its fields; `testbed.wire.cast` says its size."""
    fields, length = _read_back(message)
    return _copied(message, fields, sender), length


def _copied(message: Message, fields: Mapping[str, Any], sender: str) -> Message:
    tensors = message.tensors
    copied = {name: arrays.library_of(tensor).copy(tensor) for name, tensor in tensors.items()} if tensors else NOTHING
    return Message(message.kind, fields, copied, sender, message.padding)


def _content_size(message: Message, sender: str, fields: int) -> int:
    """Return the bytes of a message whose fields take this many."""
    padding = message.padding
    header = fields + _size_around(message.kind, sender, padding)
    _check_header(header, message.kind)
    content = _PREFIX.size + header
    if message.tensors:
        try:
            content += safetensors.size(message.tensors, offset=content)
        except TensorError as error:
            raise WireError(f"message '{message.kind}': {error}") from error
    return content + padding


def _read_back(message: Message) -> tuple[Mapping[str, Any], int]:
    """Return the fields of a message as they come out of JSON, and how many bytes they take there."""
    fields = message.fields
    length = _flat_size(fields) if fields else 2
    if length:
        return dict(fields), length
    text = _json(dict(fields), message.kind)
    return json.loads(text), len(text)


@lru_cache(10_000)
def _size_around(kind: str, sender: str, padding: int) -> int:
    """Return the bytes of a header but for its fields."""
    return _SIZE_WITHOUT_TEXTS + _quoted_size(kind) + _quoted_size(sender) + len(str(padding))


@lru_cache(10_000)
def _quoted_size(text: str) -> int:
    """Return the bytes of a text as JSON: for names, of which there are few."""
    return len(quoted(text))


def _flat_size(fields: Mapping[str, Any]) -> int:
    """Return the bytes of a flat object as JSON, or 0 where it is not flat and has to be written to know."""
    length = 1
    for key, value in fields.items():
        kind = type(value)
        if type(key) is not str:
            return 0
        if kind is str:
            length += len(quoted(value))
        elif kind is int or (kind is float and isfinite(value)):
            length += len(repr(value))
        elif kind is bool or value is None:
            length += 5 if value is False else 4
        else:
            return 0
        length += _quoted_size(key) + 2
    return length


def _check_header(size: int, kind: str) -> None:
    if size > HEADER_LIMIT:
        raise WireError(f"the fields of '{kind}' take {size} bytes of JSON; large values travel as tensors")


def _json(value: Mapping[str, Any], kind: str) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the fields of a message are JSON values, but those of '{kind}' are not: {error}") from error


def decode(data: Buffer) -> Envelope:
    """Read what `encode` wrote. Tensors share the memory of ``data`` when that is writable (a bytearray).

    The library of the tensors is imported only when there are some. Nothing in ``data`` decides how much memory is
    taken. Raises WireError for anything else.
    """
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise WireError("too short for a message")
    magic, version, header_size, body_size = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not a message of version {VERSION}")
    end = _PREFIX.size + header_size
    if header_size > HEADER_LIMIT or end + body_size > len(view):
        raise WireError("a message that is cut off, or whose sizes are wrong")
    try:
        header = json.loads(bytes(view[_PREFIX.size : end]))
    except (ValueError, RecursionError) as error:
        raise WireError("the header of the message is not JSON") from error
    if not isinstance(header, dict) or {key: type(value) for key, value in header.items()} != _HEADER_TYPES:
        raise WireError("the header of the message lacks something or has something unknown")
    if header["padding"] != len(view) - end - body_size:
        raise WireError("the padding of the message is not as long as it says")
    if not 0 <= header["incarnation"] < 1 << 63 or not 0 <= header["sequence"] < 1 << 63:
        raise WireError("the message is numbered outside of what numbers are")
    arrived = {}
    if body_size:
        try:
            arrived = arrays.unpack(view[end : end + body_size])
        except TensorError as error:
            raise WireError(str(error)) from error
    message = Message(header["kind"], header["fields"], arrived, header["sender"], header["padding"])
    return Envelope(message, header["incarnation"], header["sequence"])


_HEADER_TYPES = {"kind": str, "fields": dict, "sender": str, "incarnation": int, "sequence": int, "padding": int}
_SIZE_WITHOUT_TEXTS = len('{"kind":,"fields":,"sender":,"incarnation":,"sequence":,"padding":}') + 14 + 2
"""Bytes of a header: its keys, the incarnation on a machine that has been on for a day, and the sequence number of a
hundredth message."""
