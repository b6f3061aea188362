"""A fast implementation of the safetensors format: one copy to write, none to read.

A body has eight bytes with the length of a JSON header (name -> dtype, shape, offsets), the header and the values. The
safetensors library needs 0.6 ms to write a megabyte, and as long to read one outside a ``bytes`` object; a gigabit link
transmits that megabyte in 8 ms. Here, values are joined once when written, and read tensors are views of the received
buffer. The tests read the output of each implementation with the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeAlias, TypeGuard

from testbed.common.lazy import np, npt

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_LIMIT = 1 << 20
"""Maximum size of the JSON header, in bytes; enough for ten thousand tensors."""
_ALIGNMENT = 64
"""Tensors begin at multiples of this number of bytes, so that a buffer is used without a copy."""
_MAX_ELEMENTS = 1 << 48
"""Maximum size of an axis and of a tensor in elements, far below the overflow of 64 bits."""
ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}
"""Size of a value of each type, in bytes."""
NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}
"""Names of the types in numpy and torch."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


class TensorError(ValueError):
    """Raised for an invalid safetensors body, and for a tensor without a valid encoding."""


@dataclass(frozen=True)
class Raw:
    """A tensor as bytes."""

    name: str
    dtype: str
    """The safetensors name of the type, such as ``F32``."""
    shape: tuple[int, ...]
    data: memoryview
    """The values in row-major order, little-endian."""


def write(
    tensors: Sequence[Raw], metadata: Mapping[str, str] | None = None, offset: int = 0
) -> list[Buffer]:
    """Return the pieces of a safetensors body, to be joined or sent one after the other.

    The values start at a multiple of 64 bytes, counted from ``offset`` bytes before the body, so that a receiver of a
    prefix and the body in one buffer has aligned values. Raises TensorError for duplicate names or too many tensors.

    >>> body = b"".join(write(from_numpy({"weight": np.ones((3, 4), np.float32)})))
    >>> float(to_numpy(read(body)[0])["weight"].sum())
    12.0
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        if tensor.name == "__metadata__" or tensor.name in header:
            raise TensorError(f"duplicate or reserved tensor name '{tensor.name}'")
        start, end = end, end + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # JSON allows trailing spaces, which align the values for torch and numpy. The length of the header takes 8 bytes.
    values_start = offset + 8 + len(text)
    text += b" " * (-values_start % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise TensorError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes; at most {HEADER_LIMIT} are allowed"
        )
    return [len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in tensors)]


def size(tensors: Mapping[str, Any], offset: int = 0) -> int:
    """Return the size of `write`'s result in bytes for tensors of any shapes; raises TensorError as `write` does."""
    # The loop counts a comma for each entry, one more than JSON has.
    header = len("{}") - 1
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = type_of(name, tensor)
        shape = ",".join(map(str, tensor.shape))
        entry = (
            f':{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}},'
        )
        header += len(quoted(name)) + len(entry)
    values_start = offset + 8 + header
    alignment_spaces = -values_start % _ALIGNMENT
    return values_start + alignment_spaces + end - offset


def type_of(name: str, tensor: Any) -> str:
    """Return the safetensors name of a tensor's type, for any shape.

    Raises TensorError if the format has no such type.
    """
    dtype = _DTYPES.get(str(tensor.dtype).rpartition(".")[2])
    if dtype is None:
        raise TensorError(
            f"tensor '{name}' has unsupported dtype {tensor.dtype}: convert it first"
        )
    return dtype


def read(body: Buffer) -> tuple[list[Raw], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors body; the tensors are views of the body.

    Raises TensorError for malformed bytes.
    """
    view = memoryview(body).cast("B")
    header, values = _split_header(view)
    metadata = header.pop("__metadata__", {})
    is_mapping = isinstance(metadata, dict)
    if not is_mapping or any(type(value) is not str for value in metadata.values()):
        raise TensorError("the metadata of the tensors must map text to text")
    entries = [_parse_entry(name, entry, len(values)) for name, entry in header.items()]
    # The safetensors format allows neither gaps nor overlaps.
    entries.sort(key=lambda entry: entry[2:])
    end = 0
    result = {}
    for name, (dtype, shape), first, last in entries:
        if first != end:
            raise TensorError(
                f"tensor '{name}' does not start where the one before it ends"
            )
        end = last
        result[name] = Raw(name, dtype, shape, values[first:last])
    if end != len(values):
        raise TensorError("trailing bytes after the last tensor")
    # In the order of the header, which is that of the sender.
    return [result[name] for name in header], metadata


def _split_header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the JSON header of a safetensors body and the bytes of all values. Raises TensorError."""
    if len(view) < 8:
        raise TensorError("truncated tensors: the length of the header is incomplete")
    length = int.from_bytes(view[:8], "little")
    if length > min(HEADER_LIMIT, len(view) - 8):
        raise TensorError("the header of the tensors exceeds its limit or the body")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise TensorError("the header of the tensors is not JSON") from error
    if not isinstance(header, dict):
        raise TensorError("the header of the tensors is not an object")
    return header, view[8 + length :]


def _parse_entry(
    name: str, entry: object, available: int
) -> tuple[str, tuple[str, tuple[int, ...]], int, int]:
    """Validate the header of a tensor; return (name, (dtype, shape), first byte, end byte)."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise TensorError(
            f"the header of tensor '{name}' must have the keys dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # A list is not hashable, so its type is checked before the look-up.
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise TensorError(f"tensor '{name}' has an unknown dtype")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise TensorError(f"tensor '{name}' lies outside the body")
    first, end = offsets
    if not first <= end <= available:
        raise TensorError(f"tensor '{name}' lies outside the body")
    if not _is_shape(shape):
        raise TensorError(f"tensor '{name}' has an invalid shape")
    if math.prod(shape) * ITEM_SIZES[dtype] != end - first:
        raise TensorError(f"the size of tensor '{name}' does not match its shape")
    return name, (dtype, tuple(shape)), first, end


def _is_shape(value: object) -> bool:
    # numpy before version 2 has at most 32 axes.
    if not _are_sizes(value) or len(value) > 32:
        return False
    # Zeros are skipped, so that an empty axis does not hide huge other ones.
    elements = math.prod(size for size in value if size)
    return elements <= _MAX_ELEMENTS


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # Exactly int, since True is an instance of int; bounded, since a product of huge numbers takes long.
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _MAX_ELEMENTS for item in value
    )


def from_numpy(arrays: Mapping[str, npt.NDArray[Any]]) -> list[Raw]:
    """Return numpy arrays of any shapes as bytes, as views where contiguous.

    Raises TensorError for a type without a wire encoding.
    """
    numpy_types = ITEM_SIZES.keys() - {"BF16"}
    dtypes = {_numpy_type(dtype): dtype for dtype in numpy_types}
    result = []
    for name, array in arrays.items():
        if array.dtype not in dtypes:
            raise TensorError(
                f"array '{name}' has unsupported dtype {array.dtype}: convert it first"
            )
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        result.append(Raw(name, dtypes[array.dtype], array.shape, flat.data))
    return result


def to_numpy(tensors: Sequence[Raw]) -> dict[str, npt.NDArray[Any]]:
    """Return numpy arrays of the tensors' shapes, sharing the memory of the buffer.

    Raises TensorError for bfloat16, which numpy lacks.
    """
    result = {}
    for raw in tensors:
        if raw.dtype == "BF16":
            raise TensorError(f"numpy has no type for tensor '{raw.name}' (bfloat16)")
        flat = np.frombuffer(raw.data, dtype=_numpy_type(raw.dtype))
        result[raw.name] = flat.reshape(raw.shape)
    return result


def _numpy_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(NAMES[dtype])
