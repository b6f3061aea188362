"""Lossy encoding of tensors in messages: fewer bits per value, or the largest values alone.

The encoding is named in a scenario (`Encoding`, `LargestPart`); a `Codec` carries it out. A codec encodes one tensor of
float32 as one or several tensors, its parts: int8 values and their scale, for example. `encode_message` replaces the
tensors of a message by their parts. The name of a part in the message is the tensor's name and a suffix of the part.
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

NumberFormat = Literal["f32", "f16", "bf16", "int8", "int8-channel"]
ENCODING_HELP = (
    "f32, f16, bf16, int8 with one scale for each tensor, or int8-channel with one for each output channel of a weight "
    "and each sample of an activation"
)
# Suffixes of parts begin with "~", which names of tensors do not have. The main part has the suffix "".
_SCALE = "~scale"
_INDEX = "~index"
_SHAPE = "~shape"
_OWN = "~own"
"""Beginning of the suffixes of a user's codec."""
KEY: Key = ("method", "transfer")
"""Key of a scenario's workload that errors about a user's codec name."""
_NO_CODES: Mapping[str, Code] = {}
_INT8_MAX = 127
"""Largest absolute value of an encoded int8: -128 has no positive counterpart."""


class LargestPart(ConfigModel):
    """Encoding by the largest values alone; the other values are not sent."""

    top_k: Fraction = Field(
        gt=0,
        le=1,
        description=(
            "share of each tensor's values that is sent, the largest by magnitude; "
            "omitted values are added to the next message (error feedback)"
        ),
    )


class OwnPart(NamedPart):
    """The encoding by a class in a file; further keys are the constructor's arguments."""

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


Encoding = NumberFormat | OwnPart
"""A number format, or a user's encoding."""


class CrossingPart(ConfigModel):
    """Encoding of the activations and gradients crossing a cut of the model."""

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
"""The parts of an encoded tensor, by the suffixes of their names."""


class Codec(Protocol):
    """Encodes a tensor for a message and decodes the result."""

    @property
    def share(self) -> float:
        """Approximate encoded bytes per byte of the tensor."""

    def pack(self, tensor: torch.Tensor) -> Parts:
        """Encode a tensor of float32, of any shape."""

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Decode a tensor of float32 in the original shape."""


@dataclass(frozen=True)
class _SixteenBits:
    """Values of 16 bits instead of 32."""

    type_name: str
    """Name of the type in torch."""
    share = 0.5

    def pack(self, tensor: torch.Tensor) -> Parts:
        return {"": tensor.to(getattr(torch, self.type_name))}

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float()


@dataclass(frozen=True)
class _Int8:
    """Values of 8 bits instead of 32, as multiples of a scale."""

    by_channel: bool = False
    """Whether each entry of the first axis has a scale of its own, instead of one scale for the tensor."""
    # The scales are neglected.
    share = 0.25

    def pack(self, tensor: torch.Tensor) -> Parts:
        scale = self._scale_of(tensor)
        # A channel of zeros has the scale 0; a divisor of 1 leaves its zeros unchanged.
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        multiples = (tensor / divisor).round()
        # The rounding of a scale near the smallest float32 numbers is so coarse that a multiple may exceed the maximum.
        values = multiples.clamp(-_INT8_MAX, _INT8_MAX)
        return {"": values.to(torch.int8), _SCALE: scale}

    def _scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the scale of which the largest value is 127 times: (1,), or (channels, 1, ...) if ``by_channel``."""
        if not tensor.numel():
            return tensor.new_zeros(1)
        # A vector, such as a bias, would have as many scales as values.
        has_scales = self.by_channel and tensor.ndim > 1
        channels = len(tensor) if has_scales else 1
        largest = tensor.reshape(channels, -1).abs().amax(1)
        scale = largest / _INT8_MAX
        if channels > 1:
            # Axes of size 1, so that the scales are broadcast over the values of their channels.
            further_axes = [1] * (tensor.ndim - 1)
            scale = scale.reshape(-1, *further_axes)
        return scale

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float() * parts[_SCALE]


@dataclass(frozen=True)
class _Largest:
    """The values of largest magnitude with their indices; the other values become zero."""

    sent_share: float
    """Share of the values that is sent, above 0."""

    @property
    def share(self) -> float:
        # Each value has an index, both of four bytes.
        return 2 * self.sent_share

    def pack(self, tensor: torch.Tensor) -> Parts:
        flat = tensor.reshape(-1)
        # Rounded up, so that at least one value of each tensor is sent.
        count = math.ceil(self.sent_share * len(flat))
        # Sorting would take time without a use, since the indices give the positions.
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
class _UserCodec:
    """A user's encoding, whose parts may have any names."""

    encoder: Any
    """An object of a user's class, with `pack` and `unpack`."""
    share: float

    def pack(self, tensor: torch.Tensor) -> Parts:
        packed = self.encoder.pack(tensor)
        # A class may pack a tensor into a single tensor instead of a mapping.
        parts_by_name = packed if isinstance(packed, Mapping) else {"": packed}
        parts = {}
        for name, part in parts_by_name.items():
            parts[_OWN + name] = part
        return parts

    def unpack(self, parts: Parts) -> torch.Tensor:
        packed: Any = {}
        for name, part in parts.items():
            packed[name.removeprefix(_OWN)] = part
        # A class that packed a tensor into a single tensor receives this tensor, without a mapping.
        if list(packed) == [""]:
            packed = packed[""]
        tensor: torch.Tensor = self.encoder.unpack(packed)
        return tensor


def make_codec(
    encoding: Encoding | LargestPart, codes: Mapping[str, Code] = _NO_CODES
) -> Codec | None:
    """Return the codec of an encoding; None for plain float32.

    ``codes`` are the files of user-defined codecs, by `NamedPart.title`. Raises `InputError` if the class is missing.

    >>> int8 = make_codec("int8")
    >>> int8.unpack(int8.pack(torch.tensor([0.0, 127.0, -127.0])))
    tensor([   0.,  127., -127.])
    """
    if isinstance(encoding, LargestPart):
        return _Largest(encoding.top_k)
    if isinstance(encoding, OwnPart):
        definition = usercode.function(codes[encoding.title], KEY)
        options = encoding.options()
        encoder = call_definition(definition, encoding, KEY, **options)
        return _UserCodec(encoder, encoding.share)
    codecs: dict[str, Codec] = {
        "f16": _SixteenBits("float16"),
        "bf16": _SixteenBits("bfloat16"),
        "int8": _Int8(),
        "int8-channel": _Int8(by_channel=True),
    }
    return codecs.get(encoding)


def encoded_share(encoding: Encoding | LargestPart) -> float:
    """Return the approximate encoded bytes per byte of float32.

    >>> encoded_share("f16"), encoded_share(LargestPart(top_k="1%"))
    (0.5, 0.02)
    """
    if isinstance(encoding, OwnPart):
        return encoding.share
    codec = make_codec(encoding)
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
    codes: Mapping[str, Code], **encodings: Encoding | LargestPart
) -> dict[str, TensorCodec]:
    """Return codecs by kind of message; kinds with plain float32 have none.

    ``encodings`` are by kind of message, and ``codes`` are the files of user-defined codecs, by `NamedPart.title`.
    """
    message_codecs = {}
    for kind, encoding in encodings.items():
        codec = make_codec(encoding, codes)
        if codec is not None:
            message_codecs[kind] = TensorCodec(codec)
    return message_codecs


def encode_message(message: Message, codec: Codec) -> Message:
    """Return a message with encoded float32 tensors; tensors of other types stay the same."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in message.tensors.items():
        # Labels and counters are integers, which must stay exact.
        if tensor.dtype != torch.float32:
            tensors[name] = tensor
            continue
        for suffix, part in codec.pack(tensor).items():
            tensors[name + suffix] = part
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )


def decode_message(message: Message, codec: Codec) -> Message:
    """Return the message encoded by `encode_message`, except for the loss of precision."""
    parts_by_tensor: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in message.tensors.items():
        name, tilde, suffix = key.partition("~")
        parts_by_tensor.setdefault(name, {})[tilde + suffix] = tensor
    tensors = {}
    for name, parts in parts_by_tensor.items():
        # `encode_message` leaves integers unencoded. The result of a codec has a part of floats or a suffix.
        is_unencoded = list(parts) == [""] and not parts[""].is_floating_point()
        tensors[name] = parts[""] if is_unencoded else codec.unpack(parts)
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )
