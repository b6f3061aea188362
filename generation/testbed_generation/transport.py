"""How values travel between devices: in float32, or in blocks of 32 values of 8 bits with one scale (ggml's Q8_0)."""

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
        """Return the bytes of so many values.

        >>> Transport("q8_0").size(64)
        68
        """
        return stored_bytes(values, self.storage)

    def pack(self, values: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors that are sent for values; none without numerics."""
        if values is None:
            return {}
        if self.storage == "f32":
            return {"values": values.contiguous()}
        blocks = values.reshape(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        rounded = torch.where(scales > 0, blocks / scales, 0.0).round().to(torch.int8)
        # ggml stores the scale of a block in 16 bits.
        return {"values": rounded, "scales": scales.half()}

    def rounded(self, values: Tensor | None) -> Tensor | None:
        """Return values as they arrive."""
        return (
            None
            if values is None
            else self.unpack(self.pack(values), tuple(values.shape))
        )

    def unpack(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return the values that `pack` made tensors of; None where there are none."""
        if not tensors:
            return None
        values = tensors["values"]
        if self.storage == "q8_0":
            values = values.float() * tensors["scales"].float()
        return values.reshape(shape)
