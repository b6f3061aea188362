"""Conversion of message arrays between bytes and array libraries: numpy, torch, or a library of an installed package.

A message's arrays are encoded by the library of their type and decoded by the library that the process has chosen with
`choose`, by default torch. In between, an array is a `testbed.wire.tensors.Raw`: its name, bytes, type and shape.
`testbed.wire.tensors` reads and writes the file format, safetensors.
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
"""Entry point group of array libraries: the name of the library's own package -> a module with the functions of
`ArrayLibrary`."""
_MODULES = {"numpy": "testbed.wire.numpyarrays", "torch": "testbed.ml.arrays"}


class ArrayLibrary(Protocol):
    """The required functions of a module for sending and receiving arrays of one library."""

    def to_raw(self, arrays: Mapping[str, Any]) -> list[Raw]:
        """Return arrays of any shapes as bytes; contiguous arrays become views.

        Raises TensorError for a type that has no wire encoding.
        """

    def from_raw(self, raws: Sequence[Raw]) -> dict[str, Any]:
        """Return arrays of the given shapes, sharing writable memory with the buffer.

        Raises TensorError for types and shapes that the library lacks.
        """

    def copy(self, array: Any) -> Any:
        """Copy the values of an array for the receiver of a simulated message, without gradient or graph."""

    def mask(self, array: Any, gaps: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Return an array with zeros where ``gaps`` is True, and ``gaps`` as an array of the same library and shape.

        Gaps are the lost packets of a broadcast.
        """

    def without_values(self, array: Any) -> Any:
        """Return an array of the same shape and type whose values may be undefined, for timing-only runs."""


@cache
def library(name: str) -> ArrayLibrary:
    """Return a registered array library by name.

    Raises TensorError if no package registers the name.
    """
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    registered: ArrayLibrary | None = plugins.find(GROUP, name, ())
    if registered is None:
        raise TensorError(
            f"no installed package registers the array library '{name}': convert its arrays to numpy or torch arrays"
        )
    return registered


@cache
def _library_of(array_type: type) -> ArrayLibrary:
    for ancestor in array_type.__mro__:
        module = ancestor.__module__.partition(".")[0]
        # A subclass, such as torch.nn.Parameter, belongs to the library of its ancestor.
        if module in _MODULES or module in plugins.installed(GROUP):
            return library(module)
    # Not registered: raises TensorError with the name of the module.
    return library(array_type.__module__)


def library_of(array: Any) -> ArrayLibrary:
    """Return the library of an array; raises TensorError if none is registered for the array's type."""
    return _library_of(type(array))  # type: ignore[arg-type]  # mypy doubts that a class is hashable


class _Decoding:
    """The array library for all messages received by the process, since a program expects one type of array."""

    library_name = "torch"


def choose(name: str) -> None:
    """Decode the arrays of all further messages in the process with the named library, by default torch.

    Raises TensorError if no package registers the name.

    Example::

        arrays.choose("numpy")  # a device whose programs do not need torch
    """
    library(name)
    _Decoding.library_name = name


def is_array_type(hint: Any) -> bool:
    """Return whether an annotation is the array type of numpy or torch.

    A typed message treats fields with types of other libraries as plain values.
    """
    # By name, so that neither library is imported.
    return isinstance(hint, type) and (hint.__module__, hint.__name__) in (
        ("torch", "Tensor"),
        ("numpy", "ndarray"),
    )


def to_raw(arrays: Mapping[str, Any]) -> list[Raw]:
    """Return the arrays of a message as bytes; raises TensorError for a type without a wire encoding."""
    raws = []
    for name, array in arrays.items():
        # One message may mix arrays of several libraries.
        raws += library_of(array).to_raw({name: array})
    return raws


def from_raw(raws: Sequence[Raw]) -> dict[str, Any]:
    """Return arrays of the chosen library; raises TensorError for unsupported types and shapes."""
    return library(_Decoding.library_name).from_raw(raws)


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays of any registered libraries as one safetensors body."""
    return b"".join(tensors.write(to_raw(arrays)))


def unpack(body: Buffer) -> dict[str, Any]:
    """Return the arrays of a safetensors body by the chosen library; raises TensorError for malformed bytes."""
    raws, _ = tensors.read(body)
    return from_raw(raws)
