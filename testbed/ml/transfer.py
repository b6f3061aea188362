"""Lossy encoding of tensors in messages: fewer bits per value, or the largest values alone."""

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
from testbed.ml.training.named import make
from testbed.ml.training.schema import NamedPart
from testbed.wire.message import Message

Precision = Literal["f32", "f16", "bf16", "int8", "int8-channel"]
HOW = (
    "f32, f16, bf16, int8 with one scale for each tensor, or int8-channel with one for each output channel of a weight "
    "and each sample of an activation"
)
_SCALE, _INDEX, _SHAPE, _OWN = "~scale", "~index", "~shape", "~own"
KEY: Key = ("method", "transfer")
_NO_CODES: Mapping[str, Code] = {}


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


Way = Precision | OwnPart
"""Encoding of tensors of one kind."""


class CrossingPart(ConfigModel):
    """Encoding of activations and gradients between parts of the model."""

    activations: Way = Field("f32", description=HOW)
    gradients: Way = Field("f32", description=f"of activations: {HOW}")


class RoundsPart(CrossingPart):
    """Encoding of messages between devices and their server."""

    weights: Way = Field("f32", description=f"from the server: {HOW}")
    updates: Way | LargestPart = Field(
        "f32",
        description=f"to the server: {HOW}; or `{{top_k: 1%}}`. Unless it is f32, what travels is what training has "
        "changed",
    )


AS_IT_IS = RoundsPart()

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
    type: str
    share = 0.5

    def pack(self, tensor: torch.Tensor) -> Parts:
        return {"": tensor.to(getattr(torch, self.type))}

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float()


@dataclass(frozen=True)
class _Int8:
    channels: bool = False
    """Whether each entry of the first axis has a scale of its own."""
    share = 0.25

    def pack(self, tensor: torch.Tensor) -> Parts:
        scale = tensor.new_zeros(1)
        if tensor.numel():
            channels = len(tensor) if self.channels and tensor.ndim > 1 else 1
            scale = tensor.reshape(channels, -1).abs().amax(1) / 127
            if channels > 1:
                scale = scale.reshape(-1, *[1] * (tensor.ndim - 1))
        values = (
            (tensor / torch.where(scale > 0, scale, torch.ones_like(scale)))
            .round()
            .clamp(-127, 127)
        )
        return {"": values.to(torch.int8), _SCALE: scale}

    def unpack(self, parts: Parts) -> torch.Tensor:
        return parts[""].float() * parts[_SCALE]


@dataclass(frozen=True)
class _Largest:
    part: float

    @property
    def share(self) -> float:
        return 2 * self.part  # a value and where it belongs

    def pack(self, tensor: torch.Tensor) -> Parts:
        flat = tensor.reshape(-1)
        index = torch.topk(
            flat.abs(), math.ceil(self.part * len(flat)), sorted=False
        ).indices
        return {
            "": flat[index],
            _INDEX: index.int(),
            _SHAPE: torch.tensor(tensor.shape, dtype=torch.int64),
        }

    def unpack(self, parts: Parts) -> torch.Tensor:
        shape = tuple(parts[_SHAPE].tolist())
        flat = parts[""].new_zeros(math.prod(shape))
        return flat.index_put((parts[_INDEX].long(),), parts[""]).reshape(shape)


@dataclass(frozen=True)
class _Own:
    made: Any
    """An object of a user's class, with `pack` and `unpack`."""
    share: float

    def pack(self, tensor: torch.Tensor) -> Parts:
        packed = self.made.pack(tensor)
        parts = packed if isinstance(packed, Mapping) else {"": packed}
        return {_OWN + name: part for name, part in parts.items()}

    def unpack(self, parts: Parts) -> torch.Tensor:
        given = {name.removeprefix(_OWN): part for name, part in parts.items()}
        tensor: torch.Tensor = self.made.unpack(
            given[""] if list(given) == [""] else given
        )
        return tensor


def codec(
    how: Way | LargestPart, codes: Mapping[str, Code] = _NO_CODES
) -> Codec | None:
    """Return the codec of an encoding; None for plain float32.

    ``codes`` has the text of files by `NamedPart.title`. Raises `InputError` for a file without such a class.
    """
    if isinstance(how, LargestPart):
        return _Largest(how.top_k)
    if isinstance(how, OwnPart):
        return _Own(
            make(usercode.function(codes[how.title], KEY), how, KEY, **how.options()),
            how.share,
        )
    casts: dict[str, Codec] = {
        "f16": _Cast("float16"),
        "bf16": _Cast("bfloat16"),
        "int8": _Int8(),
        "int8-channel": _Int8(channels=True),
    }
    return casts.get(how)


def share(how: Way | LargestPart) -> float:
    """Return the approximate encoded bytes per byte of float32."""
    if isinstance(how, OwnPart):
        return how.share
    encoding = codec(how)
    return 1.0 if encoding is None else encoding.share


@dataclass(frozen=True)
class TensorCodec:
    """Encodes the tensors of a message by a codec; a `testbed.messaging.mailbox.MessageCodec`."""

    by: Codec

    def pack(self, message: Message) -> Message:
        """Return the encoded message."""
        return packed(message, self.by)

    def unpack(self, message: Message) -> Message:
        """Return the decoded message."""
        return unpacked(message, self.by)


def codecs(
    codes: Mapping[str, Code], **kinds: Way | LargestPart
) -> dict[str, TensorCodec]:
    """Return the codecs of messages by kind, omitting unencoded kinds."""
    by_kind = {kind: codec(how, codes) for kind, how in kinds.items()}
    return {
        kind: TensorCodec(each) for kind, each in by_kind.items() if each is not None
    }


def packed(message: Message, by: Codec) -> Message:
    """Return a message with encoded tensors of float32; other values are unchanged."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in message.tensors.items():
        parts = by.pack(tensor) if tensor.dtype == torch.float32 else {"": tensor}
        tensors |= {name + ending: part for ending, part in parts.items()}
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )


def unpacked(message: Message, by: Codec) -> Message:
    """Return a message with decoded tensors."""
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in message.tensors.items():
        name, stroke, ending = key.partition("~")
        whole.setdefault(name, {})[stroke + ending] = tensor
    tensors = {
        name: by.unpack(parts)
        if "" not in parts or len(parts) > 1 or parts[""].is_floating_point()
        else parts[""]
        for name, parts in whole.items()
    }
    return Message(
        message.kind, message.fields, tensors, message.sender, message.padding
    )
