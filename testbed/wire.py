"""Messages between devices, and their form on the wire (see ``encode``)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from testbed import tensors as safetensors
from testbed.tensors import Buffer, TensorError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Message:
    """What one device tells another.

    ``fields`` hold small JSON values; ``tensors`` travel as safetensors. ``sender`` is set by whoever delivers
    the message, never trusted from its maker. ``padding`` is a number of bytes charged beside the content, for
    programs that study timing without tensors.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sender: str = ""
    padding: int = 0

    def __getitem__(self, key: str) -> Any:
        """Return one of the fields."""
        return self.fields[key]


MAGIC = b"EDGE"
VERSION = 1
HEADER_LIMIT = 1 << 20
"""Bytes of JSON in one message, at most."""
_PREFIX = struct.Struct("<4sB3xIQ")
"""Magic, version, bytes of the JSON header, bytes of everything after it but the padding."""


class WireError(ValueError):
    """These bytes are no message, or this message cannot travel."""


@dataclass(frozen=True)
class Envelope:
    """A message as it arrived, with what tells a repetition from a new one."""

    message: Message
    incarnation: int
    """Larger for each later start of the sender's program."""
    sequence: int
    """Larger for each later message of that incarnation to this receiver."""


def encode(message: Message, sender: str, incarnation: int = 0, sequence: int = 0) -> bytes:
    """Return a message in one piece: prefix, JSON header, safetensors, padding.

    The tensors' values are copied, so the program may go on to change them.

    Raises:
        WireError: when the fields are not JSON or the tensors of no type that travels.
    """
    header = {
        "kind": message.kind,
        "fields": dict(message.fields),
        "sender": sender,
        "incarnation": incarnation,
        "sequence": sequence,
        "padding": message.padding,
    }
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"the fields of a message are JSON values, but those of '{message.kind}' are not: {error}"
        ) from error
    if len(text) > HEADER_LIMIT:
        raise WireError(
            f"the fields of '{message.kind}' take {len(text)} bytes of JSON; large values travel as tensors"
        )
    body: list[Buffer] = []
    if message.tensors:
        try:
            body = safetensors.write(safetensors.from_torch(message.tensors), offset=_PREFIX.size + len(text))
        except TensorError as error:
            raise WireError(f"message '{message.kind}': {error}") from error
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), sum(len(piece) for piece in body))
    return b"".join([prefix, text, *body, bytes(message.padding)])


def decode(data: Buffer) -> Envelope:
    """Read what `encode` wrote. Tensors share the memory of ``data`` when that is writable (a bytearray).

    Torch is imported only when there are tensors. Nothing in ``data`` decides how much memory is taken.

    Raises:
        WireError: for anything else.
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
            arrived = safetensors.to_torch(safetensors.read(view[end : end + body_size])[0])
        except TensorError as error:
            raise WireError(str(error)) from error
    message = Message(header["kind"], header["fields"], arrived, header["sender"], header["padding"])
    return Envelope(message, header["incarnation"], header["sequence"])


_HEADER_TYPES = {"kind": str, "fields": dict, "sender": str, "incarnation": int, "sequence": int, "padding": int}
