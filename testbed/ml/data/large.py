"""Arrays that may be larger than memory."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from testbed.common.lazy import np, npt

LARGE = 1 << 28
"""Minimum size in bytes of an array backed by a file."""
_BLOCK = 1 << 22
"""Number of values copied at once."""


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array, (*shape); a large one is backed by an unnamed temporary file."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= LARGE:
        return np.empty(shape, dtype)
    # /tmp may lie in memory; /var/tmp does not.
    lasting = "/var/tmp" if Path("/var/tmp").is_dir() else None
    folder = os.environ.get("TMPDIR", lasting)
    # The mapping keeps the file, which has no name, until the array is freed.
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def take(values: npt.NDArray[Any], indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a copy of some values, (indices, ...), backed by a file if large."""
    shape = values.shape[1:]
    copied = empty((len(indices), *shape), values.dtype)
    values_per_sample = max(1, math.prod(shape))
    step = max(1, _BLOCK // values_per_sample)
    for begin in range(0, len(indices), step):
        block = slice(begin, begin + step)
        copied[block] = values[indices[block]]
    return copied
