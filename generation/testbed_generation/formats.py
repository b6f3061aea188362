"""Storage formats of weights: how many bytes a matrix takes in each.

The block formats are those of ggml (``ggml-common.h``): a block of 32 values has one scale of 16 bits, and each value
has 8 or 4 bits. Vectors, such as the scales of a normalisation, are always stored in 32 bits.
"""

from __future__ import annotations

import math
from typing import Literal

Format = Literal["f32", "f16", "q8_0", "q4_0", "q4_k_m"]
"""Storage format of weight matrices."""

BLOCK = 32
"""Values in a block of the formats with one scale a block."""

_BLOCKS: dict[Format, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "q8_0": (BLOCK, 2 + BLOCK),
    "q4_0": (BLOCK, 2 + BLOCK // 2),
    # Some matrices have 6 bits. The mean is that of Llama-3-70B, 40 GiB by appendix A.7 of arXiv 2504.08791v2.
    "q4_k_m": (64, 39),
}
"""Values of a block, and its bytes."""


def stored_bytes(values: int, storage: Format) -> int:
    """Return the bytes of a matrix of ``values`` values; a partly filled last block takes a whole block.

    Example:
        >>> stored_bytes(64, "q4_0")
        36
    """
    block, block_bytes = _BLOCKS[storage]
    return math.ceil(values / block) * block_bytes
