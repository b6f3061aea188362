"""Tuning of the C library's allocator."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""Bytes; glibc's maximum on 64 bits, see mallopt(3)."""


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory for reuse until the process ends.

    By default, glibc returns blocks of some megabytes to the kernel, and the kernel provides each page again, zeroed,
    at its next use. A simulation that repeatedly creates large tensors spent a tenth of its processor time on zeroing.
    With another C library, the function has no effect.
    """
    # musl, the C library of Alpine, has no such function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
