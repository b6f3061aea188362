"""Samples of several inputs, as one row of numbers each: they are kept, sent and carried across cuts like any others.

A network is handed its inputs again by name: the row is cut, each part given its shape and its type.
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
"""Whole numbers up to this one are exact in float32."""


@dataclass(frozen=True)
class Field:
    """One of several inputs of a sample."""

    name: str
    """Or its number from 0, where inputs are handed over in their order."""
    shape: tuple[int, ...]
    """Shape of one sample; (): one number."""
    kind: Literal["float32", "int64", "bool"]


Fields = tuple[Field, ...]


@dataclass(frozen=True)
class Entering:
    """What enters a network."""

    shape: tuple[int, ...]
    """Shape of a sample; of one of several inputs, that of its row."""
    integers: bool = False
    """Whether samples are of int64, and not of float32."""
    fields: Fields = ()
    """The inputs that a sample consists of, where there are several."""


def all_whole(fields: Sequence[Field]) -> bool:
    """Say whether no input is of float32: a row of them then is of int64."""
    return all(each.kind != "float32" for each in fields)


def width(fields: Sequence[Field]) -> int:
    """Return the length of a row."""
    return sum(math.prod(each.shape) for each in fields)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], Fields]:
    """Return rows, (samples, values) of float32, or of int64 where all is whole, and what they consist of.

    ``arrays`` are (samples, ...) each, of float32, int64 or bool. Raises `InputError` for whole numbers that are not
    exact beside numbers of float32.
    """
    fields = tuple(Field(name, each.shape[1:], each.dtype.name) for name, each in arrays.items())  # type: ignore[arg-type]
    whole = all_whole(fields)
    for name, each in arrays.items():
        if each.dtype.kind == "i" and not whole and abs(each).max(initial=0) > EXACT:
            text = f"input '{name}' has whole numbers above {EXACT}, which are not exact beside float32: number anew"
            raise InputError(text, ("data",))
    rows = [each.reshape(len(each), -1).astype(np.int64 if whole else np.float32) for each in arrays.values()]
    return np.concatenate(rows, axis=1), fields


def entry(samples: torch.Tensor, begin: int, end: int, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Return one input of a batch, (samples, *shape), of rows, (samples, values)."""
    return samples[:, begin:end].reshape(samples.shape[0], *shape).to(getattr(torch, kind))


def entries(fields: Sequence[Field]) -> dict[str, tuple[int, int, tuple[int, ...], str]]:
    """Return by name what `entry` takes beside the rows."""
    found: dict[str, tuple[int, int, tuple[int, ...], str]] = {}
    begin = 0
    for each in fields:
        end = begin + math.prod(each.shape)
        found[each.name] = (begin, end, each.shape, each.kind)
        begin = end
    return found


def arguments(forward: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return how ``forward`` takes inputs by name: in order, by name, or all as one mapping; raises `InputError`."""
    parameters = [each for each in inspect.signature(forward).parameters.values() if each.name != "self"]
    if all(name.isdecimal() for name in inputs):
        return list(inputs.values()), {}
    names = {each.name for each in parameters}
    if inputs.keys() <= names or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return [], dict(inputs)
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    if len(required) == 1 and not names & inputs.keys():
        return [dict(inputs)], {}
    taken = ", ".join(each.name for each in parameters)
    text = f"forward takes {taken}, and the data have {', '.join(inputs)}: give them the same names"
    raise InputError(text, ("model", "file"))
