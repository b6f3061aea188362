"""Storage formats of values, and the number of bytes of weights or messages in each format.

``q8_0`` and ``q4_0`` are block formats of ggml (``ggml-common.h``): a block of 32 values has one scale of 16 bits, and
each value has 8 or 4 bits. ``q4_k_m`` mixes several block formats of ggml, so only its mean size is given here.
Vectors, such as the scales of a normalisation, are always stored in 32 bits.
"""

from __future__ import annotations

import math
from typing import Literal

Format = Literal["f32", "f16", "q8_0", "q4_0", "q4_k_m"]
"""Name of a storage format, as in the key `storage` of a scenario's model."""

BLOCK = 32
"""Values in a block of ``q8_0`` and ``q4_0``; a block has one scale."""

_BLOCKS: dict[Format, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "q8_0": (BLOCK, 2 + BLOCK),
    "q4_0": (BLOCK, 2 + BLOCK // 2),
    # ggml stores some matrices with 6 bits per value, and the others with 4. The mean is that of Llama-3-70B: 40 GiB by
    # appendix A.7 of arXiv 2504.08791v2, which are 39 bytes for 64 values, or 4.875 bits per value.
    "q4_k_m": (64, 39),
}
"""By format, the number of values in a block and the bytes of the block."""


def stored_bytes(values: int, storage: Format) -> int:
    """Return the bytes of ``values`` values in a format.

    A partly filled last block takes a whole block.

    Example:
        >>> stored_bytes(64, "q4_0")
        36
    """
    block, block_bytes = _BLOCKS[storage]
    return math.ceil(values / block) * block_bytes
