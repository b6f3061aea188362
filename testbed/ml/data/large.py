"""Arrays that may be larger than memory: large ones are memory maps of temporary files."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from testbed.common.lazy import np, npt

MAX_IN_MEMORY = 1 << 28
"""Maximum size in bytes of an array in memory, 256 MB: a larger one is backed by a file."""
_VALUES_PER_BLOCK = 1 << 22
"""Number of values copied at a time, 16 MB of float32."""


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array; an array beyond `MAX_IN_MEMORY` is backed by an unnamed temporary file."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= MAX_IN_MEMORY:
        return np.empty(shape, dtype)
    # /tmp may be in memory; /var/tmp is on a disk.
    disk_folder = "/var/tmp" if Path("/var/tmp").is_dir() else None
    folder = os.environ.get("TMPDIR", disk_folder)
    # The file has no name. Its mapping into memory keeps the content until the array is freed.
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def take(values: npt.NDArray[Any], indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a copy of the entries of the first axis with these indices, (indices, ...), made by `empty`."""
    shape = values.shape[1:]
    copied = empty((len(indices), *shape), values.dtype)
    values_per_sample = max(1, math.prod(shape))
    step = max(1, _VALUES_PER_BLOCK // values_per_sample)
    for begin in range(0, len(indices), step):
        block = slice(begin, begin + step)
        copied[block] = values[indices[block]]
    return copied
