"""Samples of several inputs, such as tokens and a mask, stored as one row of numbers for each sample.

Data sets, batches and messages handle rows like any other samples. Before the forward, a row is cut into the named
inputs, each with its shape and type.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from testbed.common.errors import InputError
from testbed.common.lazy import np, npt
from testbed.ml.lazy import torch

EXACT = 2**24
"""Largest integer up to which float32 is exact."""


@dataclass(frozen=True)
class Field:
    """One of several inputs of a sample."""

    name: str
    """Name of the input, or its position from 0 if inputs are passed in order."""
    shape: tuple[int, ...]
    """Shape of one sample; () for a single number."""
    kind: Literal["float32", "int64", "bool"]


Fields = tuple[Field, ...]
"""The inputs of a sample, in the order of their values in a row."""


@dataclass(frozen=True)
class InputSpec:
    """The input of a network."""

    shape: tuple[int, ...]
    """Shape of a sample; for several inputs, the shape of its row."""
    integers: bool = False
    """Whether samples are int64 instead of float32."""
    fields: Fields = ()
    """The inputs of a sample, if there are several."""


def all_whole(fields: Sequence[Field]) -> bool:
    """Return whether no input is float32, so that a row is stored as int64."""
    return all(each.kind != "float32" for each in fields)


def width(fields: Sequence[Field]) -> int:
    """Return the length of a row.

    >>> width([Field("tokens", (128,), "int64"), Field("age", (), "float32")])
    129
    """
    return sum(math.prod(each.shape) for each in fields)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], Fields]:
    """Return rows, (samples, values), of float32, or of int64 if all inputs are integers, and their fields.

    ``arrays`` are (samples, ...) each, of float32, int64 or bool. Raises `InputError` for integers that float32 cannot
    represent exactly beside float inputs.

    >>> rows, fields = pack({"a": np.ones((2, 3), np.int64), "b": np.zeros(2, bool)})
    >>> rows
    array([[1, 1, 1, 0],
           [1, 1, 1, 0]])
    """
    fields = []
    for name, array in arrays.items():
        kind: Any = array.dtype.name
        fields.append(Field(name, array.shape[1:], kind))
    is_whole = all_whole(fields)
    if not is_whole:
        # Integers become float32 beside the other inputs.
        for name, array in arrays.items():
            if array.dtype.kind == "i" and abs(array).max(initial=0) > EXACT:
                raise InputError(
                    f"input '{name}' has whole numbers above {EXACT}, inexact in float32: renumber the values",
                    ("data",),
                )
    dtype = np.int64 if is_whole else np.float32
    columns = []
    for array in arrays.values():
        flat = array.reshape(len(array), -1)
        columns.append(flat.astype(dtype))
    return np.concatenate(columns, axis=1), tuple(fields)


def entry(
    samples: torch.Tensor,
    begin: int,
    end: int,
    shape: tuple[int, ...],
    kind: str,
) -> torch.Tensor:
    """Return one input of a batch, (samples, *shape), from rows, (samples, values).

    The input has the values ``begin`` to ``end`` (exclusive) of a row, and ``kind`` names its type.
    """
    values = samples[:, begin:end].reshape(samples.shape[0], *shape)
    return values.to(getattr(torch, kind))


def entries(
    fields: Sequence[Field],
) -> dict[str, tuple[int, int, tuple[int, ...], str]]:
    """Return by input name the arguments of `entry` besides the rows.

    >>> entries([Field("tokens", (128,), "int64"), Field("age", (), "float32")])["age"]
    (128, 129, (), 'float32')
    """
    slices: dict[str, tuple[int, int, tuple[int, ...], str]] = {}
    begin = 0
    for each in fields:
        end = begin + math.prod(each.shape)
        slices[each.name] = (begin, end, each.shape, each.kind)
        begin = end
    return slices


def arguments(
    forward: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments that pass ``inputs`` to ``forward``.

    Inputs named by numbers are passed by position, others by keyword, or as one mapping if ``forward`` has a single
    parameter of another name. Raises `InputError` if the names do not fit.

    >>> def forward(tokens, mask): ...
    >>> arguments(forward, {"mask": 1, "tokens": 2})
    ([], {'mask': 1, 'tokens': 2})
    """
    if all(name.isdecimal() for name in inputs):
        return list(inputs.values()), {}
    names = []
    required = []
    accepts_any_keyword = False
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.name == "self":
            continue
        names.append(parameter.name)
        if parameter.kind is parameter.VAR_KEYWORD:
            accepts_any_keyword = True
        has_default = parameter.default is not parameter.empty
        if not has_default and parameter.kind is not parameter.VAR_POSITIONAL:
            required.append(parameter)
    if accepts_any_keyword or inputs.keys() <= set(names):
        return [], dict(inputs)
    if len(required) == 1 and inputs.keys().isdisjoint(names):
        # One argument, by any name, is a mapping of all inputs.
        return [dict(inputs)], {}
    raise InputError(
        f"forward takes {', '.join(names)}, and the data have {', '.join(inputs)}: give them the same names",
        ("model", "file"),
    )
