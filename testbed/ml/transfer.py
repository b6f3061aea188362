"""Lossy encoding of tensors in messages: fewer bits per value, or the largest values alone.

A codec encodes one tensor of float32 as one or several tensors, its parts: int8 values and their scale, for example.
`encode_message` replaces the tensors of a message by their parts, under the tensor's name with a suffix for each part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from testbed.common import usercode
from testbed.common.errors import Key
from testbed.common.part import ConfigModel
from testbed.common.quantities import Fraction
from testbed.common.usercode import Code
from testbed.ml.lazy import torch
from testbed.ml.training.named import call_definition
from testbed.ml.training.schema import NamedPart
from testbed.wire.message import Message

Precision = Literal["f32", "f16", "bf16", "int8", "int8-channel"]
ENCODING_HELP = (
    "f32, f16, bf16, int8 with one scale for each tensor, or int8-channel with one for each output channel of a weight "
    "and each sample of an activation"
)
# Suffixes of encoded parts: names of tensors have no "~".
_SCALE = "~scale"
_INDEX = "~index"
_SHAPE = "~shape"
_OWN = "~own"
"""Prefix of the suffixes of a user's codec."""
KEY: Key = ("method", "transfer")
"""Key of a scenario's workload that errors about a user's codec name."""
_NO_CODES: Mapping[str, Code] = {}
_INT8_MAX = 127
"""Largest absolute value of an encoded int8: -128 has no positive counterpart."""


class LargestPart(ConfigModel):
    """The largest values alone."""

    top_k: Fraction = Field(
        gt=0,
        le=1,
        description=(
            "share of each tensor's values that is sent, the largest by magnitude; "
            "omitted values are added to the next message (error feedback)"
        ),
    )


class OwnPart(NamedPart):
    """The encoding by a class in a file; further keys are its constructor's arguments."""

    name: str = Field(
        description="name of a class with `pack(tensor)` and `unpack(parts)`"
    )
    share: Fraction = Field(
        1.0, gt=0, description="encoded bytes per byte of a tensor, assumed by plans"
    )

    @model_validator(mode="after")
    def _of_a_file(self) -> Self:
        if self.file is None:
            raise ValueError("give the 'file' containing the class")
        return self


Encoding = Precision | OwnPart
"""Encoding of tensors of one kind."""


class CrossingPart(ConfigModel):
    """Encoding of activations and gradients between parts of the model."""

    activations: Encoding = Field("f32", description=ENCODING_HELP)
    gradients: Encoding = Field("f32", description=f"of activations: {ENCODING_HELP}")


class RoundEncodingPart(CrossingPart):
    """Encoding of messages between devices and their server."""

    weights: Encoding = Field("f32", description=f"from the server: {ENCODING_HELP}")
    updates: Encoding | LargestPart = Field(
        "f32",
        description=(
            f"to the server: {ENCODING_HELP}; or `{{top_k: 1%}}`. Unless it is f32, the "
            "changes by training are sent instead of the weights"
        ),
    )


UNENCODED = RoundEncodingPart()
"""Messages without lossy encoding."""

Parts = Mapping[str, "torch.Tensor"]
"""Encoded tensors by suffixes of the original name."""


class Codec(Protocol):
    """Encodes a tensor for a message and decodes the result."""

    @property
    def share(self) -> float:
        """Approximate encoded bytes per byte of the tensor."""

    def pack(self, tensor: torch.Tensor) -> Parts:
        """Encode a tensor of float32, of any shape."""

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Decode a tensor of float32 with its original shape."""


@dataclass(frozen=True)
class _Cast:
    """Values of 16 bits instead of 32."""

    type: str
    """Name of the type in torch."""
    share = 0.5

    def pack(self, tensor: torch.Tensor) -> Parts:
        return {"": tensor.to(getattr(torch, self.type))}

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float()


@dataclass(frozen=True)
class _Int8:
    """Values of 8 bits instead of 32, as multiples of a scale."""

    channels: bool = False
    """Whether each entry of the first axis has a scale of its own."""
    share = 0.25

    def pack(self, tensor: torch.Tensor) -> Parts:
        scale = self._scale_of(tensor)
        # A channel of zeros has the scale 0, by which nothing can be divided.
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        multiples = (tensor / divisor).round()
        # A scale near the smallest numbers of float32 is rounded so much that a multiple may exceed the bound.
        values = multiples.clamp(-_INT8_MAX, _INT8_MAX)
        return {"": values.to(torch.int8), _SCALE: scale}

    def _scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the scale by which the largest value becomes 127: (1,), or (channels, 1, ...) with ``channels``."""
        if not tensor.numel():
            return tensor.new_zeros(1)
        # A vector, such as a bias, has one value for each channel: there would be as many scales as values.
        channels = len(tensor) if self.channels and tensor.ndim > 1 else 1
        largest = tensor.reshape(channels, -1).abs().amax(1)
        scale = largest / _INT8_MAX
        if channels > 1:
            further_axes = [1] * (tensor.ndim - 1)
            scale = scale.reshape(-1, *further_axes)
        return scale

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float() * parts[_SCALE]


@dataclass(frozen=True)
class _Largest:
    """The values of largest magnitude with their places; the others become zero."""

    part: float
    """Share of the values that is sent, above 0."""

    @property
    def share(self) -> float:
        # A value and its index, each of four bytes.
        return 2 * self.part

    def pack(self, tensor: torch.Tensor) -> Parts:
        flat = tensor.reshape(-1)
        # At least one value of each tensor.
        count = math.ceil(self.part * len(flat))
        # In any order: the index tells the place of each value.
        index = torch.topk(flat.abs(), count, sorted=False).indices
        shape = torch.tensor(tensor.shape, dtype=torch.int64)
        return {"": flat[index], _INDEX: index.int(), _SHAPE: shape}

    def unpack(self, parts: Parts) -> torch.Tensor:
        shape = tuple(parts[_SHAPE].tolist())
        values = parts[""]
        index = parts[_INDEX].long()
        flat = values.new_zeros(math.prod(shape))
        return flat.index_put((index,), values).reshape(shape)


@dataclass(frozen=True)
class _Own:
    """A user's encoding, whose parts may have any names."""

    encoder: Any
    """An object of a user's class, with `pack` and `unpack`."""
    share: float

    def pack(self, tensor: torch.Tensor) -> Parts:
        packed = self.encoder.pack(tensor)
        own_parts = packed if isinstance(packed, Mapping) else {"": packed}
        parts = {}
        for name, part in own_parts.items():
            parts[_OWN + name] = part
        return parts

    def unpack(self, parts: Parts) -> torch.Tensor:
        packed: Any = {}
        for name, part in parts.items():
            packed[name.removeprefix(_OWN)] = part
        # A class that packs a tensor into one tensor unpacks one tensor.
        if list(packed) == [""]:
            packed = packed[""]
        tensor: torch.Tensor = self.encoder.unpack(packed)
        return tensor


def make_codec(
    how: Encoding | LargestPart, codes: Mapping[str, Code] = _NO_CODES
) -> Codec | None:
    """Return the codec of an encoding; None for plain float32.

    ``codes`` are the files of user-defined codecs, by `NamedPart.title`. Raises `InputError` if the class is missing.

    >>> int8 = make_codec("int8")
    >>> int8.unpack(int8.pack(torch.tensor([0.0, 127.0, -127.0])))
    tensor([   0.,  127., -127.])
    """
    if isinstance(how, LargestPart):
        return _Largest(how.top_k)
    if isinstance(how, OwnPart):
        definition = usercode.function(codes[how.title], KEY)
        encoder = call_definition(definition, how, KEY, **how.options())
        return _Own(encoder, how.share)
    casts: dict[str, Codec] = {
        "f16": _Cast("float16"),
        "bf16": _Cast("bfloat16"),
        "int8": _Int8(),
        "int8-channel": _Int8(channels=True),
    }
    return casts.get(how)


def encoded_share(how: Encoding | LargestPart) -> float:
    """Return the approximate encoded bytes per byte of float32.

    >>> encoded_share("f16"), encoded_share(LargestPart(top_k="1%"))
    (0.5, 0.02)
    """
    if isinstance(how, OwnPart):
        return how.share
    codec = make_codec(how)
    return 1.0 if codec is None else codec.share


@dataclass(frozen=True)
class TensorCodec:
    """Encodes the tensors of a message by a codec; a `testbed.messaging.mailbox.MessageCodec`."""

    codec: Codec

    def pack(self, message: Message) -> Message:
        """Return the encoded message."""
        return encode_message(message, self.codec)

    def unpack(self, message: Message) -> Message:
        """Return the decoded message."""
        return decode_message(message, self.codec)


def make_codecs(
    codes: Mapping[str, Code], **kinds: Encoding | LargestPart
) -> dict[str, TensorCodec]:
    """Return the codecs of messages by kind, without unencoded kinds.

    ``kinds`` are encodings by kind of message, and ``codes`` the text of files by `NamedPart.title`.
    """
    message_codecs = {}
    for kind, how in kinds.items():
        codec = make_codec(how, codes)
        if codec is not None:
            message_codecs[kind] = TensorCodec(codec)
    return message_codecs


def encode_message(message: Message, codec: Codec) -> Message:
    """Return a message with encoded tensors of float32; other values are unchanged."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in message.tensors.items():
        # Labels and counters are integers, which a rounded value would falsify.
        if tensor.dtype != torch.float32:
            tensors[name] = tensor
            continue
        for suffix, part in codec.pack(tensor).items():
            tensors[name + suffix] = part
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )


def decode_message(message: Message, codec: Codec) -> Message:
    """Return a message with decoded tensors."""
    parts_by_tensor: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in message.tensors.items():
        name, tilde, suffix = key.partition("~")
        parts_by_tensor.setdefault(name, {})[tilde + suffix] = tensor
    tensors = {}
    for name, parts in parts_by_tensor.items():
        # A single part of integers was not encoded: every codec has a part of floats, or a suffix.
        is_plain = list(parts) == [""] and not parts[""].is_floating_point()
        tensors[name] = parts[""] if is_plain else codec.unpack(parts)
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )
