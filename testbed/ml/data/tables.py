"""Tables in CSV or Parquet files: rows are samples, with a column for labels and optionally one for owners."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from testbed.common.errors import InputError, Key
from testbed.common.lazy import np, npt, require_extra
from testbed.ml.data import large

SUFFIXES = (".csv", ".parquet")
Columns = Sequence[str] | Mapping[str, Sequence[str]]
_PATH: Key = ("data", "path")
Kind: TypeAlias = "type[np.int64] | type[np.float32] | type[str]"
ROWS = 1 << 16
"""Number of rows read at a time."""


@dataclass(frozen=True)
class Table:
    """The rows of a table."""

    samples: npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
    """(rows, columns), of float32, or of int64 where all columns hold whole numbers or words; or so by input."""
    labels: npt.NDArray[Any]
    """(rows,) of classes from 0, or of float32."""
    groups: npt.NDArray[np.int64] | None
    """(rows,): the group of each row by the split column; None without a split column."""


def read(
    place: Path, label: str | None, columns: Columns | None, group: str | None
) -> Table:
    """Read a table; words become integers in alphabetical order, in labels and in inputs.

    ``label`` names the label column, ``columns`` those of a sample (None: all others), or, by input name, those of each
    input; ``group`` names the column for splitting samples among devices. The file is read several times in blocks of
    rows, so it may be larger than memory. Raises `InputError` for missing columns, empty cells, and files in another
    format.
    """
    inputs = _input_columns(place, label, columns, group)
    assert label is not None
    names = list(dict.fromkeys([label, *chain.from_iterable(inputs.values())]))
    kinds, rows = _column_kinds(place, names)
    words = _distinct_words(place, [name for name in names if kinds[name] is str])
    samples = {
        name: large.empty((rows, len(each)), _array_type(kinds, each))
        for name, each in inputs.items()
    }
    labels = np.empty(rows, _array_type(kinds, [label]))
    begin = 0
    for block in _read_blocks(place, names):
        some = slice(begin, begin + len(block[label]))
        begin = some.stop
        for name, each in inputs.items():
            for number, column in enumerate(each):
                samples[name][some, number] = _column_values(
                    block[column], kinds[column], words.get(column)
                )
        labels[some] = _column_values(block[label], kinds[label], words.get(label))
    return Table(
        samples if isinstance(columns, Mapping) else samples[""],
        labels,
        _read_groups(place, group),
    )


def _read_groups(place: Path, name: str | None) -> npt.NDArray[np.int64] | None:
    """Return a column as integers, numbering its values in alphabetical order."""
    if name is None:
        return None
    words = _distinct_words(place, [name])[name]
    parts = [
        _column_values(block[name], str, words) for block in _read_blocks(place, [name])
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _input_columns(
    place: Path, label: str | None, columns: Columns | None, group: str | None
) -> Mapping[str, Sequence[str]]:
    """Return the columns of each input by name, "" for a single input; raises `InputError` for unknown columns."""
    existing = _column_names(place)
    names = ", ".join(existing)
    if label is None:
        raise InputError(
            f"{place} has the columns {names}: name the one of the labels",
            ("data", "label"),
        )
    if columns is None:
        columns = [name for name in existing if name not in (label, group)]
    inputs: Mapping[str, Sequence[str]] = (
        columns if isinstance(columns, Mapping) else {"": columns}
    )
    chosen = [*chain.from_iterable(inputs.values())]
    keys = {label: "label", **dict.fromkeys(chosen, "columns")}
    if group:
        keys[group] = "split"
    for name, key in keys.items():
        if name not in existing:
            raise InputError(
                f"{place} has no column '{name}': there are {names}", ("data", key)
            )
    if not chosen:
        raise InputError(
            f"{place} has only the columns {names}: a sample needs at least one more",
            _PATH,
        )
    return inputs


def _array_type(kinds: Mapping[str, Kind], names: Sequence[str]) -> npt.DTypeLike:
    """Return the array type of some columns; words count as integers."""
    return np.float32 if any(kinds[name] is np.float32 for name in names) else np.int64


def _column_values(
    cells: npt.NDArray[Any], kind: Kind, words: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    return (
        cells.astype(kind)
        if words is None
        else np.searchsorted(words, _cell_texts(cells))
    )


def _column_names(place: Path) -> list[str]:
    if place.suffix == ".parquet":
        names = list(_open_parquet(place).schema_arrow.names)
    else:
        names, _ = next(_read_lines(place))
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InputError(f"{place}: has two columns '{twice[0]}': rename one", _PATH)
    return names


def _read_blocks(
    place: Path, names: Sequence[str]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the cells of some columns, (rows,) each, for `ROWS` rows at a time."""
    if place.suffix == ".parquet":
        try:
            for batch in _open_parquet(place).iter_batches(ROWS, columns=list(names)):
                yield {
                    name: batch.column(name).to_numpy(zero_copy_only=False)
                    for name in names
                }
        except (
            OSError,
            ValueError,
        ) as error:  # what pyarrow raises is a ValueError, too
            raise _no_parquet(place, error) from None
        return
    for header, rows in _read_lines(place):
        places = [header.index(name) for name in names]
        yield {
            name: np.array([row[column] for row in rows])
            for name, column in zip(names, places, strict=True)
        }


def _read_lines(place: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield blocks of `ROWS` lines of a CSV file, each preceded by the header line."""
    try:
        with place.open(newline="", encoding="utf-8-sig") as file:
            rows = (row for row in csv.reader(file) if row)
            header = [name.strip() for name in next(rows, [])]
            number = 2
            while some := list(islice(rows, ROWS)):
                for number, row in enumerate(some, number):  # noqa: B020 - counts on
                    if len(row) != len(header):
                        text = f"{place}:{number}: has {len(row)} cells, the first line {len(header)}"
                        raise InputError(text, _PATH)
                number += 1
                yield header, some
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{place}: cannot be read as CSV: {error}", _PATH) from None
    if number == 2:
        raise InputError(
            f"{place}: holds no rows: write the names of the columns, then a sample a line",
            _PATH,
        )


def _open_parquet(place: Path) -> Any:
    parquet = require_extra("pyarrow.parquet", "frames", f"{place}: Parquet", _PATH)
    try:
        return parquet.ParquetFile(place)
    except (OSError, ValueError) as error:
        raise _no_parquet(place, error) from None


def _no_parquet(place: Path, error: Exception) -> InputError:
    return InputError(f"{place}: cannot be read as Parquet: {error}", _PATH)


def _column_kinds(place: Path, names: Sequence[str]) -> tuple[dict[str, Kind], int]:
    """Return the kind of each column (integers, numbers or words) and the number of rows."""
    kinds, rows = dict.fromkeys(names, 0), 0
    wider: Sequence[Kind] = (np.int64, np.float32, str)
    for block in _read_blocks(place, names):
        for name in kinds:
            _refuse_empty(place, name, block[name], rows)
            kinds[name] = max(kinds[name], wider.index(_value_kind(block[name])))
        rows += len(block[names[0]])
    return {name: wider[width] for name, width in kinds.items()}, rows


def _refuse_empty(place: Path, name: str, cells: npt.NDArray[Any], before: int) -> None:
    if cells.dtype.kind in "iub":
        return
    empty = [
        row
        for row, text in enumerate(_cell_texts(cells))
        if text.strip().lower().lstrip("+-") in ("", "none", "nan")
    ]
    if empty:
        text = f"{place}: column '{name}' is empty in row {before + empty[0] + 1}: fill the cell or remove the row"
        raise InputError(text, _PATH)


def _value_kind(cells: npt.NDArray[Any]) -> Kind:
    if cells.dtype.kind in "iufb":
        return np.int64 if cells.dtype.kind in "iub" else np.float32
    for kind in (np.int64, np.float32):
        try:
            cells.astype(kind)
        except (ValueError, OverflowError):
            continue
        return kind
    return str


def _distinct_words(place: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the distinct words of some columns in alphabetical order."""
    distinct: dict[str, set[str]] = {name: set() for name in names}
    for block in _read_blocks(place, names) if names else ():
        for name, words in distinct.items():
            words.update(_cell_texts(block[name]))
    return {name: np.array(sorted(words)) for name, words in distinct.items()}


def _cell_texts(cells: npt.NDArray[Any]) -> list[str]:
    return [str(cell) for cell in cells]


def numbered(cells: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return values, (rows,), as integers in alphabetical order of the values."""
    return np.unique(_cell_texts(cells), return_inverse=True)[1].astype(np.int64)
