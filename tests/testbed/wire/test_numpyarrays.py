"""Numpy arrays in messages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from testbed.wire import numpyarrays


def resident_bytes() -> int:
    # The second number of statm is the resident set in pages.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_array_without_values_uses_no_memory() -> None:
    array = np.zeros((1 << 26,), np.float64)
    before = resident_bytes()
    blank = numpyarrays.without_values(array)
    assert (blank.shape, blank.dtype) == (array.shape, array.dtype)
    # Of the array's 512 MiB, no page is written, and less than 64 MiB become resident.
    assert resident_bytes() - before < 1 << 26
    # Values can still be written.
    blank[:3] = 1.0
