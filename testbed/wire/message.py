"""Messages between devices, their encoding (`encode`), and their size without encoding (`content_size`)."""

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
"""An empty mapping shared by all messages, since most have no tensors."""


@dataclass(slots=True, init=False)
class Message:
    """A message from one device to another. Programs may modify a message after sending: the runtime sends a copy.

    ``fields`` hold small JSON values; ``tensors`` are sent as safetensors. ``sender`` is set by the runtime that
    delivers the message and never taken from the program. ``padding`` is a number of bytes charged in addition to the
    content, for programs that study timing without tensors.

    >>> message = Message("loss", {"batch": 3, "loss": 0.25})
    >>> message["batch"]
    3
    """

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]
    sender: str
    padding: int
    missing: Mapping[str, Any]
    """Masks by tensor name: True where a value of a broadcast was lost with its frame, and is zero here."""

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
        """Return a field's value."""
        return self.fields[key]


MAGIC = b"EDGE"
"""First bytes of every message, by which other data is detected."""
VERSION = 1
"""Version of the encoding; messages of other versions are refused."""
HEADER_LIMIT = 1 << 20
"""Maximum size of a message's JSON header, in bytes."""
ENVELOPE = 320
"""Approximate bytes of a message with one tensor, such as an activation, besides the values: prefix and headers."""
_PREFIX = struct.Struct("<4sB3xIQ")
"""Magic, version, size of the JSON header, size of the safetensors body (the padding is not counted)."""


class WireError(ValueError):
    """Raised for an invalid encoded message, and for a message without a valid encoding."""


@dataclass(frozen=True)
class Envelope:
    """A received message with the numbers for detecting retransmissions."""

    message: Message
    incarnation: int
    """Number of the start of the sender's program; increases with every restart."""
    sequence: int
    """Sequence number within the incarnation; increases with every message to the receiver."""


def encode(
    message: Message, sender: str, incarnation: int = 0, sequence: int = 0
) -> bytes:
    """Return a message as bytes: prefix, JSON header, safetensors, padding.

    The values of the tensors are copied, so the program may modify them afterwards. Raises WireError if the fields are
    not JSON or a tensor's type has no wire encoding.

    >>> decode(encode(Message("hello", {"step": 1}), "worker1")).message.sender
    'worker1'
    """
    header = {
        "kind": message.kind,
        "fields": dict(message.fields),
        "sender": sender,
        "incarnation": incarnation,
        "sequence": sequence,
        "padding": message.padding,
    }
    text = _to_json(header, message.kind).encode()
    _check_header(len(text), message.kind)
    # Without tensors there is no body, and no array library is imported.
    body: list[Buffer] = []
    if message.tensors:
        offset = _PREFIX.size + len(text)
        try:
            body = safetensors.write(arrays.to_raw(message.tensors), offset=offset)
        except TensorError as error:
            raise WireError(f"message '{message.kind}': {error}") from error
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), sum(len(piece) for piece in body))
    return b"".join([prefix, text, *body, bytes(message.padding)])


def content_size(message: Message, sender: str) -> int:
    """Return the encoded size of a message in bytes, without encoding the message.

    The result is exact if the incarnation and the sequence number have their usual number of digits. Raises WireError
    as `encode` does.

    >>> content_size(Message("hello", {"step": 1}), "worker1")
    130
    """
    return _content_size(message, sender, _read_back(message)[1])


def size(message: Message, sender: str) -> float:
    """Return the bytes on the wire of a message to one peer, including headers from HTTP down to Ethernet."""
    return wire_bytes(content_size(message, sender))


def size_around(tensor: float) -> float:
    """Return the approximate bytes on the wire of a message with one tensor of ``tensor`` bytes, for planners.

    >>> size_around(1e6)
    1046058.0
    """
    return wire_bytes(tensor + ENVELOPE)


def delivered(message: Message, sender: str) -> tuple[Message, int]:
    """Return a message as seen by the receiver, independent of the sender's objects, and the `content_size`.

    The message equals the result of `encode` followed by `decode`, which the simulator skips. Raises WireError as
    `encode` does.
    """
    fields, length = _read_back(message)
    copy = _copy_for_receiver(message, fields, sender)
    return copy, _content_size(message, sender, length)


def as_cast(message: Message, sender: str) -> tuple[Message, int]:
    """Return a broadcast as seen by the receivers, and the size of the fields as JSON, in bytes.

    `testbed.wire.cast.CastEncoding.header_size` needs that size. Raises WireError as `encode` does.
    """
    fields, length = _read_back(message)
    return _copy_for_receiver(message, fields, sender), length


def _copy_for_receiver(
    message: Message, fields: Mapping[str, Any], sender: str
) -> Message:
    copies: Mapping[str, Any] = NOTHING
    if message.tensors:
        copies = {}
        for name, tensor in message.tensors.items():
            copies[name] = arrays.library_of(tensor).copy(tensor)
    return Message(message.kind, fields, copies, sender, message.padding)


def _content_size(message: Message, sender: str, fields: int) -> int:
    """Return the encoded size of a message whose fields take ``fields`` bytes of JSON."""
    padding = message.padding
    header = fields + _header_size_without_fields(message.kind, sender, padding)
    _check_header(header, message.kind)
    content = _PREFIX.size + header
    if message.tensors:
        try:
            content += safetensors.size(message.tensors, offset=content)
        except TensorError as error:
            raise WireError(f"message '{message.kind}': {error}") from error
    return content + padding


def _read_back(message: Message) -> tuple[Mapping[str, Any], int]:
    """Return the fields as read back from JSON (tuples become lists), and the JSON size in bytes."""
    fields = message.fields
    # Without fields, JSON is the two braces.
    length = _flat_size(fields) if fields else 2
    if length:
        return dict(fields), length
    text = _to_json(dict(fields), message.kind)
    return json.loads(text), len(text)


@lru_cache(10_000)
def _header_size_without_fields(kind: str, sender: str, padding: int) -> int:
    values = _quoted_size(kind) + _quoted_size(sender) + len(str(padding))
    return _CONSTANT_HEADER_SIZE + values


# Cached for names of kinds, devices and fields, of which a run has few.
@lru_cache(10_000)
def _quoted_size(text: str) -> int:
    return len(quoted(text))


def _flat_size(fields: Mapping[str, Any]) -> int:
    """Return the JSON size of an object without nested values, or 0 if the size is known only by encoding."""
    # Most messages have a few numbers: adding up lengths is several times as fast as encoding them.
    # The loop counts a comma for each field, one more than JSON has.
    length = len("{}") - 1
    for key, value in fields.items():
        kind = type(value)
        if type(key) is not str:
            return 0
        if kind is str:
            length += len(quoted(value))
        elif kind is int or (kind is float and isfinite(value)):
            length += len(repr(value))
        elif kind is bool or value is None:
            length += len("false") if value is False else len("true")
        else:
            return 0
        length += _quoted_size(key) + len(":,")
    return length


def _check_header(size: int, kind: str) -> None:
    if size > HEADER_LIMIT:
        text = f"the fields of '{kind}' take {size} bytes of JSON; at most {HEADER_LIMIT} are allowed"
        raise WireError(f"{text}: send large values as tensors")


def _to_json(value: Mapping[str, Any], kind: str) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"the fields of '{kind}' must be JSON values: {error}"
        ) from error


def decode(data: Buffer) -> Envelope:
    """Decode the bytes of `encode`. Tensors share the memory of ``data`` if it is writable (a bytearray).

    The tensor library is imported only for a message with tensors, and sizes in ``data`` are checked before memory is
    allocated. Raises WireError for malformed bytes.
    """
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise WireError("truncated message: the prefix is incomplete")
    magic, version, header_size, body_size = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not a message of version {VERSION}")
    end = _PREFIX.size + header_size
    # Sizes come from the network: nothing is allocated by them before this check.
    if header_size > HEADER_LIMIT or end + body_size > len(view):
        raise WireError("truncated message, or sizes that do not match its length")
    try:
        header = json.loads(bytes(view[_PREFIX.size : end]))
    except (ValueError, RecursionError) as error:
        raise WireError("the header of the message is not JSON") from error
    _check_header_values(header, padding=len(view) - end - body_size)
    tensors = {}
    if body_size:
        try:
            tensors = arrays.unpack(view[end : end + body_size])
        except TensorError as error:
            raise WireError(str(error)) from error
    message = Message(
        header["kind"], header["fields"], tensors, header["sender"], header["padding"]
    )
    return Envelope(message, header["incarnation"], header["sequence"])


def _check_header_values(header: Any, padding: int) -> None:
    is_object = isinstance(header, dict)
    # Exact types, since True is an instance of int.
    if not is_object or {key: type(header[key]) for key in header} != _HEADER_TYPES:
        raise WireError(
            "the header of the message has missing, unknown or mistyped keys"
        )
    if header["padding"] != padding:
        raise WireError("the padding of the message does not match its header")
    for number in (header["incarnation"], header["sequence"]):
        if not 0 <= number < 1 << 63:
            raise WireError(
                "the incarnation or sequence number of the message is out of range"
            )


_HEADER_TYPES = {
    "kind": str,
    "fields": dict,
    "sender": str,
    "incarnation": int,
    "sequence": int,
    "padding": int,
}
_CONSTANT_HEADER_SIZE = (
    len('{"kind":,"fields":,"sender":,"incarnation":,"sequence":,"padding":}') + 14 + 2
)
"""Bytes of a header without kind, fields, sender and padding: the keys, 14 digits of incarnation (nanoseconds of a
machine that has been up for a day) and 2 digits of sequence number."""
