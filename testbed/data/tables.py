"""Tables with named columns, as CSV or Parquet: rows are samples, a column their labels, another one who owns them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from testbed.common.errors import InputError, Key
from testbed.common.lazy import need

SUFFIXES = (".csv", ".parquet")
Columns = Sequence[str] | Mapping[str, Sequence[str]]
_PATH: Key = ("data", "path")


@dataclass(frozen=True)
class Table:
    """The rows of a table."""

    samples: npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
    """(rows, columns), of float32, or of int64 where all columns hold whole numbers or words; or so by input."""
    labels: npt.NDArray[Any]
    """(rows,) of classes from 0, or of float32."""
    groups: npt.NDArray[np.int64] | None
    """(rows,), which value of the column by which the samples are split a row has; None: there is none."""


def read(place: Path, label: str | None, columns: Columns | None, group: str | None) -> Table:
    """Read a table; words become whole numbers in the order of the alphabet, in labels as elsewhere.

    ``label`` names the column of the labels, ``columns`` those of a sample (None: all others), or by name those of each
    of its inputs, ``group`` the one by which samples are split among devices. Raises `InputError` for columns that are
    not there, cells that hold nothing, and a file that is no table.
    """
    cells = _parquet(place) if place.suffix == ".parquet" else _csv(place)
    names = ", ".join(cells)
    if label is None:
        raise InputError(f"{place} has the columns {names}: name the one of the labels", ("data", "label"))
    inputs: Mapping[str, Sequence[str]] = columns if isinstance(columns, Mapping) else {}
    plain = columns if columns is not None else [name for name in cells if name not in (label, group)]
    chosen = [name for names in inputs.values() for name in names] or list(plain)
    keys = {label: "label", **dict.fromkeys(chosen, "columns"), **({group: "split"} if group else {})}
    for name, key in keys.items():
        if name not in cells:
            raise InputError(f"{place} has no column '{name}': there are {names}", ("data", key))
    if not chosen:
        raise InputError(f"{place} has no columns but {names}: a sample needs one at least", _PATH)
    values = {name: _numbers(place, name, cells[name]) for name in chosen}

    def together(names: Sequence[str]) -> npt.NDArray[Any]:
        whole = all(values[name].dtype.kind == "i" for name in names)
        return np.stack([values[name].astype(np.int64 if whole else np.float32) for name in names], axis=1)

    groups = None if group is None else numbered(cells[group])
    samples = {name: together(names) for name, names in inputs.items()} or together(chosen)
    return Table(samples, _numbers(place, label, cells[label]), groups)


def _csv(place: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with place.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{place}: cannot be read as CSV: {error}", _PATH) from None
    if len(rows) < 2:
        raise InputError(f"{place}: holds no rows: write the names of the columns, then a sample a line", _PATH)
    header, *body = rows
    for number, row in enumerate(body, 2):
        if len(row) != len(header):
            raise InputError(f"{place}:{number}: has {len(row)} cells, the first line {len(header)}", _PATH)
    names = [name.strip() for name in header]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InputError(f"{place}: has two columns '{twice[0]}': rename one", _PATH)
    return {name: np.array(column) for name, column in zip(names, zip(*body, strict=True), strict=True)}


def _parquet(place: Path) -> dict[str, npt.NDArray[Any]]:
    parquet = need("pyarrow.parquet", "frames", f"{place}: Parquet", _PATH)
    try:
        table = parquet.read_table(place)
    except (OSError, ValueError) as error:  # what pyarrow raises is a ValueError, too
        raise InputError(f"{place}: cannot be read as Parquet: {error}", _PATH) from None
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _numbers(place: Path, name: str, cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column's cells as whole numbers, numbers, or words numbered in the order of the alphabet."""
    empty = [row for row, cell in enumerate(cells) if str(cell).strip().lower().lstrip("+-") in ("", "none", "nan")]
    if empty:
        text = f"{place}: column '{name}' holds nothing in row {empty[0] + 1}: fill it or leave the row out"
        raise InputError(text, _PATH)
    if cells.dtype.kind in "iufb":
        return cells.astype(np.int64 if cells.dtype.kind in "iub" else np.float32)
    for kind in (np.int64, np.float32):
        try:
            return cells.astype(kind)
        except ValueError:
            continue
    return numbered(cells)


def numbered(cells: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return values, (rows,), as whole numbers in the order of the alphabet."""
    return np.unique([str(cell) for cell in cells], return_inverse=True)[1].astype(np.int64)
