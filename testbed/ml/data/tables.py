"""Tables in CSV or Parquet files: rows are samples, with a column for labels and optionally one for owners.

Tables may be larger than memory: all functions read blocks of `ROWS` rows. The cells of a block are numpy arrays,
(rows,) each: texts from CSV, and the type of the column from Parquet.
"""

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
"""The kind of a column: integers, numbers or words."""
ROWS = 1 << 16
"""Number of rows read at a time."""


@dataclass(frozen=True)
class Table:
    """The rows of a table."""

    samples: npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
    """(rows, columns), of float32, or of int64 if all columns hold integers or words; an array for each input by name,
    if the columns are named by input."""
    labels: npt.NDArray[Any]
    """(rows,) of classes from 0, or of float32."""
    groups: npt.NDArray[np.int64] | None
    """(rows,): the group of each row by the split column; None without a split column."""


def read(
    path: Path,
    label: str | None,
    columns: Columns | None,
    group: str | None,
) -> Table:
    """Read a table; words become integers in alphabetical order, in labels and in inputs.

    ``label`` names the label column, ``columns`` those of a sample (None: all others), or, by input name, those of each
    input; ``group`` names the column for splitting samples among devices. The file is read several times in blocks of
    rows, so it may be larger than memory. Raises `InputError` for missing columns, empty cells, and files in another
    format.
    """
    inputs = _input_columns(path, label, columns, group)
    assert label is not None
    # A column may serve several inputs, and is read once.
    chosen = chain.from_iterable(inputs.values())
    names = list(dict.fromkeys([label, *chosen]))
    # A first reading finds the types, a second the words, a third fills the arrays: a column's type depends on its last
    # row, too.
    kinds, rows = _column_kinds(path, names)
    word_columns = [name for name in names if kinds[name] is str]
    words = _distinct_words(path, word_columns)
    samples = {}
    for name, own_columns in inputs.items():
        shape = (rows, len(own_columns))
        samples[name] = large.empty(shape, _array_type(kinds, own_columns))
    labels = np.empty(rows, _array_type(kinds, [label]))
    begin = 0
    for block in _read_blocks(path, names):
        end = begin + len(block[label])
        numbers = {}
        for column in names:
            cells = block[column]
            numbers[column] = _column_values(cells, kinds[column], words.get(column))
        for name, own_columns in inputs.items():
            for place_in_row, column in enumerate(own_columns):
                samples[name][begin:end, place_in_row] = numbers[column]
        labels[begin:end] = numbers[label]
        begin = end
    groups = _read_groups(path, group)
    if isinstance(columns, Mapping):
        return Table(samples, labels, groups)
    return Table(samples[""], labels, groups)


def _read_groups(path: Path, name: str | None) -> npt.NDArray[np.int64] | None:
    """Return a column as integers, numbering its values in alphabetical order."""
    if name is None:
        return None
    words = _distinct_words(path, [name])[name]
    # The empty array, for a table without rows.
    parts: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    for block in _read_blocks(path, [name]):
        parts.append(_column_values(block[name], str, words))
    return np.concatenate(parts)


def _input_columns(
    path: Path,
    label: str | None,
    columns: Columns | None,
    group: str | None,
) -> Mapping[str, Sequence[str]]:
    """Return the columns of each input by name, "" for a single input; raises `InputError` for unknown columns."""
    existing = _column_names(path)
    names = ", ".join(existing)
    # Any column might be the label, so there is no default.
    if label is None:
        raise InputError(
            f"{path} has the columns {names}: name the one of the labels",
            ("data", "label"),
        )
    if columns is None:
        columns = [name for name in existing if name not in (label, group)]
    inputs = columns if isinstance(columns, Mapping) else {"": columns}
    chosen = list(chain.from_iterable(inputs.values()))
    # The key of the scenario that names each column, for errors.
    keys = {label: "label", **dict.fromkeys(chosen, "columns")}
    if group:
        keys[group] = "split"
    for name, key in keys.items():
        if name not in existing:
            raise InputError(
                f"{path} has no column '{name}': there are {names}", ("data", key)
            )
    if not chosen:
        raise InputError(
            f"{path} has only the columns {names}: a sample needs at least one column besides the label",
            _PATH,
        )
    return inputs


def _array_type(kinds: Mapping[str, Kind], names: Sequence[str]) -> npt.DTypeLike:
    """Return the array type of some columns; words count as integers."""
    has_fractions = any(kinds[name] is np.float32 for name in names)
    return np.float32 if has_fractions else np.int64


def _column_values(
    cells: npt.NDArray[Any], kind: Kind, words: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    """Return cells as numbers, (rows,); ``words`` are all words of the column in order, None for numbers."""
    if words is None:
        return cells.astype(kind)
    # All cells are among the words, so the place of each is its number.
    return np.searchsorted(words, _cell_texts(cells))


def _column_names(path: Path) -> list[str]:
    """Return the names of all columns; raises `InputError` for two columns of one name."""
    if path.suffix == ".parquet":
        names = list(_open_parquet(path).schema_arrow.names)
    else:
        names, _ = next(_read_lines(path))
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"{path}: has two columns '{name}': rename one", _PATH)
    return names


def _read_blocks(
    path: Path, names: Sequence[str]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the cells of some columns, (rows,) each, for `ROWS` rows at a time."""
    if path.suffix == ".parquet":
        yield from _read_parquet_blocks(path, names)
        return
    for header, rows in _read_lines(path):
        block = {}
        for name in names:
            column = header.index(name)
            block[name] = np.array([row[column] for row in rows])
        yield block


def _read_parquet_blocks(
    path: Path, names: Sequence[str]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the same as `_read_blocks` for a Parquet file."""
    try:
        for batch in _open_parquet(path).iter_batches(ROWS, columns=list(names)):
            block = {}
            for name in names:
                # A copy, since columns with missing values have no array to share.
                block[name] = batch.column(name).to_numpy(zero_copy_only=False)
            yield block
    except (OSError, ValueError) as error:
        # Errors of pyarrow are ValueErrors, too.
        raise _no_parquet(path, error) from None


def _read_lines(path: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield blocks of `ROWS` lines of a CSV file, each preceded by the header line.

    Raises `InputError` for a line with another number of cells than the header, and for a file without rows.
    """
    # The number of the line for errors; the first line is the header.
    number = 1
    try:
        # Spreadsheets write a byte order mark, which "utf-8-sig" drops.
        with path.open(newline="", encoding="utf-8-sig") as file:
            # An empty line is an empty row: no row of a table has no cells.
            rows = filter(None, csv.reader(file))
            header = [name.strip() for name in next(rows, [])]
            while block := list(islice(rows, ROWS)):
                for row in block:
                    number += 1
                    if len(row) != len(header):
                        text = f"{path}:{number}: has {len(row)} cells, the first line {len(header)}"
                        raise InputError(text, _PATH)
                yield header, block
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV: {error}", _PATH) from None
    if number == 1:
        raise InputError(
            f"{path}: has no rows: write a line with the names of the columns, then one line per sample",
            _PATH,
        )


def _open_parquet(path: Path) -> Any:
    parquet = require_extra("pyarrow.parquet", "frames", f"{path}: Parquet", _PATH)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _no_parquet(path, error) from None


def _no_parquet(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as Parquet: {error}", _PATH)


def _column_kinds(path: Path, names: Sequence[str]) -> tuple[dict[str, Kind], int]:
    """Return the kind of each column (integers, numbers or words) and the number of rows."""
    # Each kind holds all values of the kinds before: a column is as wide as its widest block.
    widening: Sequence[Kind] = (np.int64, np.float32, str)
    widths = dict.fromkeys(names, 0)
    rows = 0
    for block in _read_blocks(path, names):
        for name in names:
            _refuse_empty(path, name, block[name], rows)
            width = widening.index(_value_kind(block[name]))
            widths[name] = max(widths[name], width)
        rows += len(block[names[0]])
    kinds = {}
    for name, width in widths.items():
        kinds[name] = widening[width]
    return kinds, rows


def _refuse_empty(path: Path, name: str, cells: npt.NDArray[Any], before: int) -> None:
    """Raise `InputError` for an empty cell; ``before`` is the number of rows before the block."""
    # numpy's letters for integers, unsigned ones and booleans, which are never missing.
    if cells.dtype.kind in "iub":
        return
    for row, text in enumerate(_cell_texts(cells), before + 1):
        # NaN and None are how pandas and Parquet write an empty cell.
        content = text.strip().lower().lstrip("+-")
        if content in ("", "none", "nan"):
            raise InputError(
                f"{path}: column '{name}' is empty in row {row}: fill the cell or remove the row",
                _PATH,
            )


def _value_kind(cells: npt.NDArray[Any]) -> Kind:
    """Return the narrowest kind for all cells of a block."""
    if cells.dtype.kind in "iub":
        return np.int64
    if cells.dtype.kind == "f":
        return np.float32
    # Texts, from CSV: numpy parses them, and refuses those that are no number of this kind.
    for kind in (np.int64, np.float32):
        try:
            cells.astype(kind)
        except (ValueError, OverflowError):
            continue
        return kind
    return str


def _distinct_words(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the distinct words of some columns in alphabetical order."""
    if not names:
        return {}
    distinct: dict[str, set[str]] = {name: set() for name in names}
    for block in _read_blocks(path, names):
        for name, words in distinct.items():
            words.update(_cell_texts(block[name]))
    in_order = {}
    for name, words in distinct.items():
        in_order[name] = np.array(sorted(words))
    return in_order


def _cell_texts(cells: npt.NDArray[Any]) -> list[str]:
    # As Python's texts, since Parquet's columns of words are arrays of objects.
    return [str(cell) for cell in cells]


def number_values(cells: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return values, (rows,), as integers in alphabetical order of the values.

    >>> number_values(np.array(["north", "south", "north", "east"]))
    array([1, 2, 1, 0])
    """
    _, numbers = np.unique(_cell_texts(cells), return_inverse=True)
    return numbers.astype(np.int64)
