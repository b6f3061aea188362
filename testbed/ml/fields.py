"""Samples of several inputs, such as tokens and a mask, stored as one row of numbers for each sample.

Data sets, batches and messages handle rows like any other samples. `pack` makes the rows from the inputs, and a `Field`
describes the values of one input within a row. Before the forward of a network, `entry` cuts each input out of the rows
again, and `arguments` decides how the network's `forward` receives the inputs.
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
"""The largest integer up to which float32 represents all integers exactly."""


@dataclass(frozen=True)
class Field:
    """The description of one of several inputs of a sample."""

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
    """Return whether all inputs are integers or booleans, so that a row is stored as int64."""
    return all(field.kind != "float32" for field in fields)


def width(fields: Sequence[Field]) -> int:
    """Return the number of values in a row.

    >>> width([Field("tokens", (128,), "int64"), Field("age", (), "float32")])
    129
    """
    return sum(math.prod(field.shape) for field in fields)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], Fields]:
    """Return rows, (samples, values), and the fields of a row.

    ``arrays`` are the inputs by name, (samples, ...) each, of float32, int64 or bool. Rows are int64 if no input is
    float32; otherwise all inputs become float32. Raises `InputError` for integers beyond `EXACT` in this case.

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

    The input is the values ``begin`` to ``end`` (exclusive) of a row. ``kind`` is the name of the input's type in
    torch.
    """
    values = samples[:, begin:end].reshape(samples.shape[0], *shape)
    return values.to(getattr(torch, kind))


def entries(
    fields: Sequence[Field],
) -> dict[str, tuple[int, int, tuple[int, ...], str]]:
    """Return the arguments of `entry` after the rows, by input name: begin, end, shape and kind.

    >>> entries([Field("tokens", (128,), "int64"), Field("age", (), "float32")])["age"]
    (128, 129, (), 'float32')
    """
    arguments_by_name: dict[str, tuple[int, int, tuple[int, ...], str]] = {}
    begin = 0
    for field in fields:
        end = begin + math.prod(field.shape)
        arguments_by_name[field.name] = (begin, end, field.shape, field.kind)
        begin = end
    return arguments_by_name


def arguments(
    forward: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments passing ``inputs`` to ``forward``.

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
        # A function such as forward(batch), whose parameter is not an input, receives all inputs as a mapping.
        return [dict(inputs)], {}
    raise InputError(
        f"forward has the parameters {', '.join(names)}, but the data have the inputs {', '.join(inputs)}: give both "
        "the same names",
        ("model", "file"),
    )
