"""Storage formats of weights: how many bytes a matrix takes in each.

The block formats are those of ggml (``ggml-common.h``): a block of 32 values has one scale of 16 bits, and each value
has 8 or 4 bits. Vectors, such as the scales of a normalisation, are always stored in 32 bits.
"""

from __future__ import annotations

import math
from typing import Literal

Format = Literal["f32", "f16", "q8_0", "q4_0"]
"""Storage format of weight matrices."""

BLOCK = 32
"""Values in a block of the quantised formats."""

_BLOCK_BYTES: dict[Format, int] = {
    "f32": 4 * BLOCK,
    "f16": 2 * BLOCK,
    "q8_0": 2 + BLOCK,
    "q4_0": 2 + BLOCK // 2,
}


def stored_bytes(values: int, storage: Format) -> int:
    """Return the bytes of a matrix of so many values; a partly filled last block takes a whole block.

    Example:
        >>> stored_bytes(64, "q4_0")
        36
    """
    if storage in ("f32", "f16"):
        return values * _BLOCK_BYTES[storage] // BLOCK
    return math.ceil(values / BLOCK) * _BLOCK_BYTES[storage]
