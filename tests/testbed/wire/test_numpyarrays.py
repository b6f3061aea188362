"""Arrays of numpy in messages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from testbed.wire import numpyarrays


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGESIZE"
    )


def test_arrays_without_values_take_no_memory() -> None:
    array = np.zeros((1 << 26,), np.float64)
    before = resident_bytes()
    blank = numpyarrays.without_values(array)
    assert (blank.shape, blank.dtype) == (array.shape, array.dtype)
    # The array has 512 MiB, none of which is written.
    assert resident_bytes() - before < 1 << 26
    blank[:3] = 1.0
