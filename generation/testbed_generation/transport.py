"""Formats of values on the wire: float32, or blocks of 32 values of 8 bits with one scale (ggml's Q8_0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from testbed_generation.formats import BLOCK, stored_bytes


@dataclass(frozen=True)
class Transport:
    """A format of values on the wire."""

    storage: Literal["f32", "q8_0"] = "f32"

    def size(self, values: int) -> int:
        """Return the bytes of ``values`` values.

        >>> Transport("q8_0").size(64)
        68
        """
        return stored_bytes(values, self.storage)

    def pack(self, values: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors to send for some values; an empty dictionary without numerics."""
        if values is None:
            return {}
        if self.storage == "f32":
            return {"values": values.contiguous()}
        blocks = values.reshape(-1, BLOCK)
        # The largest magnitude of a block becomes 127, the largest signed number of 8 bits.
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        # A block of zeros has the scale 0, by which nothing can be divided.
        rounded = torch.where(scales > 0, blocks / scales, 0.0).round().to(torch.int8)
        # ggml stores the scale of a block in 16 bits.
        return {"values": rounded, "scales": scales.half()}

    def round_trip(self, values: Tensor | None) -> Tensor | None:
        """Return values as their receivers unpack them: rounded by the format."""
        if values is None:
            return None
        return self.unpack(self.pack(values), tuple(values.shape))

    def unpack(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return the values of tensors from `pack`, in the given shape; None without tensors."""
        if not tensors:
            return None
        values = tensors["values"]
        if self.storage == "q8_0":
            values = values.float() * tensors["scales"].float()
        return values.reshape(shape)
