"""The numpy implementation of `testbed.wire.arrays.ArrayLibrary`."""

from __future__ import annotations

from typing import Any

from testbed.common.lazy import np, npt
from testbed.wire.tensors import from_numpy as to_raw
from testbed.wire.tensors import to_numpy as from_raw

__all__ = ["copy", "from_raw", "mask", "to_raw", "without_values"]


def copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array of any shape."""
    return np.array(array)


def mask(
    array: npt.NDArray[Any], gaps: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return an array with zeros where ``gaps`` is True, and ``gaps``; both have the same shape."""
    return np.where(gaps, np.zeros((), array.dtype), array), gaps


def without_values(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return zeros of the same shape and type, which take no memory until a program writes to them."""
    # `zeros_like` writes the zeros, so that a large array takes memory at once.
    return np.zeros(array.shape, array.dtype)
