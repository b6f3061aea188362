"""The arrays that messages carry: numpy's, or those of a library registered under the entry points `testbed.arrays`.

The arrays of a message are written by the library of their type, and read by the library that the process has chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from testbed.common import plugins
from testbed.common.lazy import np, npt
from testbed.wire import tensors
from testbed.wire.tensors import Buffer, Raw, TensorError

GROUP = "testbed.arrays"
_MODULES = {"numpy": "testbed.wire.numpyarrays", "torch": "testbed.ml.arrays"}


class ArrayLibrary(Protocol):
    """The functions of a module that converts the arrays of one library."""

    def to_raw(self, arrays: Mapping[str, Any]) -> list[Raw]:
        """Return arrays as bytes: views where they are contiguous. Raises TensorError for types that do not travel."""

    def from_raw(self, raws: Sequence[Raw]) -> dict[str, Any]:
        """Return arrays, sharing writable memory; raises TensorError for types and shapes that the library lacks."""

    def copy(self, array: Any) -> Any:
        """Return a copy of the values alone, as a receiver is to see them."""

    def mask(self, array: Any, gaps: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Return an array with zeros in its gaps, and the gaps as an array of the same library."""

    def without_values(self, array: Any) -> Any:
        """Return an array of the same shape and type that need not have values."""


@cache
def library(name: str) -> ArrayLibrary:
    """Return the library of that name; raises TensorError for one that is not registered."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    found: ArrayLibrary | None = plugins.find(GROUP, name, ())
    if found is None:
        raise TensorError(f"values of {name} do not travel: convert them to arrays of numpy or torch")
    return found


@cache
def _library_of(kind: type) -> ArrayLibrary:
    for base in kind.__mro__:
        if (name := base.__module__.partition(".")[0]) in _MODULES or name in plugins.installed(GROUP):
            return library(name)
    return library(kind.__module__)


def library_of(array: Any) -> ArrayLibrary:
    """Return the library that an array belongs to; raises TensorError where none is registered."""
    return _library_of(type(array))  # type: ignore[arg-type]  # the hash of a class


class _Chosen:
    name = "torch"


def choose(name: str) -> None:
    """Read the arrays of this process's messages as those of this library from now on."""
    library(name)
    _Chosen.name = name


def is_array_type(hint: Any) -> bool:
    """Return whether an annotation is the array type of a library that this process has imported."""
    return isinstance(hint, type) and (hint.__module__, hint.__name__) in (("torch", "Tensor"), ("numpy", "ndarray"))


def to_raw(arrays: Mapping[str, Any]) -> list[Raw]:
    """Return the arrays of a message as bytes; raises TensorError for types that do not travel."""
    return [raw for name, array in arrays.items() for raw in library_of(array).to_raw({name: array})]


def from_raw(raws: Sequence[Raw]) -> dict[str, Any]:
    """Return arrays of the chosen library; raises TensorError for types and shapes that it lacks."""
    return library(_Chosen.name).from_raw(raws)


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as one safetensors body."""
    return b"".join(tensors.write(to_raw(arrays)))


def unpack(body: Buffer) -> dict[str, Any]:
    """Return the arrays of a safetensors body; raises TensorError for anything else."""
    return from_raw(tensors.read(body)[0])
