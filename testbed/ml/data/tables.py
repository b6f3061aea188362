"""Data sets as tables in CSV or Parquet files: a row is a sample, and one column has the labels.

The split column, if a scenario names one, decides which device owns a row: rows with equal values form a group.

Columns of words become integers, numbered in alphabetical order. Tables may be larger than memory, so all functions
read blocks of `ROWS` rows. The columns of a block are numpy arrays, (rows,) each: of text from CSV, and of the column's
type from Parquet.
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
"""Suffixes of files that are read as tables."""
Columns = Sequence[str] | Mapping[str, Sequence[str]]
"""Names of the columns that form a sample, or by input name those of each input."""
_PATH: Key = ("data", "path")
"""Key of the scenario's workload that errors about the file name."""
Kind: TypeAlias = "type[np.int64] | type[np.float32] | type[str]"
"""The kind of a column: integers, numbers or words."""
ROWS = 1 << 16
"""Number of rows read at a time: some 10 MB for 20 columns."""


@dataclass(frozen=True)
class Table:
    """The rows of a table."""

    samples: npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
    """(rows, columns), of float32, or of int64 if all columns have integers or words. An array for each input by name,
    if `Columns` are named by input."""
    labels: npt.NDArray[Any]
    """(rows,) of classes from 0, or of float32."""
    groups: npt.NDArray[np.int64] | None
    """(rows,): a number for each value of the split column; None without a split column."""


def read(
    path: Path,
    label: str | None,
    columns: Columns | None,
    split_column: str | None,
) -> Table:
    """Read a table.

    ``label`` and ``split_column`` are names of columns. Without ``columns``, all columns besides these two form a
    sample. Raises `InputError` for missing columns, empty cells, and files in another format.
    """
    columns_by_input = _input_columns(path, label, columns, split_column)
    # `_input_columns` rejects a missing name.
    assert label is not None
    # A column of several inputs is read once.
    sample_columns = chain.from_iterable(columns_by_input.values())
    names = list(dict.fromkeys([label, *sample_columns]))
    # The file is read three times: for the kinds of the columns, for their words, and for the arrays. The kind of a
    # column and the numbers of its words are known only after the last row.
    kinds, rows = _column_kinds(path, names)
    word_columns = [name for name in names if kinds[name] is str]
    words = _distinct_words(path, word_columns)
    samples = {}
    for input_name, input_columns in columns_by_input.items():
        shape = (rows, len(input_columns))
        samples[input_name] = large.empty(shape, _array_type(kinds, input_columns))
    labels = np.empty(rows, _array_type(kinds, [label]))
    begin = 0
    for block in _read_blocks(path, names):
        end = begin + len(block[label])
        numbers = {}
        for column in names:
            cells = block[column]
            numbers[column] = _column_values(cells, kinds[column], words.get(column))
        for input_name, input_columns in columns_by_input.items():
            for position, column in enumerate(input_columns):
                samples[input_name][begin:end, position] = numbers[column]
        labels[begin:end] = numbers[label]
        begin = end
    groups = _read_groups(path, split_column)
    if isinstance(columns, Mapping):
        return Table(samples, labels, groups)
    # `_input_columns` calls a single input "".
    return Table(samples[""], labels, groups)


def _read_groups(path: Path, split_column: str | None) -> npt.NDArray[np.int64] | None:
    """Return the split column as integers, numbering the values in alphabetical order; None without a split column."""
    if split_column is None:
        return None
    words = _distinct_words(path, [split_column])[split_column]
    # numpy refuses to concatenate zero arrays, which a table without rows would have.
    blocks: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    for block in _read_blocks(path, [split_column]):
        blocks.append(_column_values(block[split_column], str, words))
    return np.concatenate(blocks)


def _input_columns(
    path: Path,
    label: str | None,
    columns: Columns | None,
    split_column: str | None,
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
        columns = [name for name in existing if name not in (label, split_column)]
    columns_by_input = columns if isinstance(columns, Mapping) else {"": columns}
    sample_columns = list(chain.from_iterable(columns_by_input.values()))
    # By column, the key of the scenario that names the column, for errors.
    keys = {label: "label", **dict.fromkeys(sample_columns, "columns")}
    if split_column:
        keys[split_column] = "split"
    for name, key in keys.items():
        if name not in existing:
            raise InputError(
                f"{path} has no column '{name}': available are {names}", ("data", key)
            )
    if not sample_columns:
        raise InputError(
            f"{path} has only the columns {names}: a sample needs at least one column besides the label",
            _PATH,
        )
    return columns_by_input


def _array_type(kinds: Mapping[str, Kind], names: Sequence[str]) -> npt.DTypeLike:
    """Return the array type of some columns; words count as integers."""
    has_fractions = any(kinds[name] is np.float32 for name in names)
    return np.float32 if has_fractions else np.int64


def _column_values(
    cells: npt.NDArray[Any], kind: Kind, words: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    """Return cells as numbers, (rows,); ``words`` are the sorted words of the column, None for columns of numbers."""
    if words is None:
        return cells.astype(kind)
    # Every cell is one of the words, so the position for its insertion is the position of the word.
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
    """Yield the cells of some columns of a Parquet file, as `_read_blocks` does."""
    try:
        for rows in _open_parquet(path).iter_batches(ROWS, columns=list(names)):
            block = {}
            for name in names:
                # Columns with missing values need a copy, since no numpy array can share their memory.
                block[name] = rows.column(name).to_numpy(zero_copy_only=False)
            yield block
    except (OSError, ValueError) as error:
        # Errors of pyarrow are ValueErrors.
        raise _parquet_error(path, error) from None


def _read_lines(path: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield (header, up to `ROWS` rows) of a CSV file; rows and header are lists of cells.

    Raises `InputError` for a line with another number of cells than the header, and for a file without rows.
    """
    has_rows = False
    try:
        # Spreadsheets write a byte order mark, which "utf-8-sig" drops.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            # The reader returns an empty list for an empty line, which `filter` drops.
            first_row = next(filter(None, reader), [])
            header = [name.strip() for name in first_row]
            rows = _complete_rows(path, reader, len(header))
            while block := list(islice(rows, ROWS)):
                has_rows = True
                yield header, block
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV: {error}", _PATH) from None
    if not has_rows:
        raise InputError(
            f"{path}: has no rows: write a line with the names of the columns, then one line per sample",
            _PATH,
        )


def _complete_rows(path: Path, reader: Any, columns: int) -> Iterator[list[str]]:
    """Yield the rows of a `csv.reader` without empty lines; raises `InputError` for rows without all columns."""
    for row in reader:
        if not row:
            continue
        if len(row) != columns:
            # The reader counts lines of the file, among them empty ones.
            text = f"{path}:{reader.line_num}: has {len(row)} cells, the first line {columns}"
            raise InputError(text, _PATH)
        yield row


def _open_parquet(path: Path) -> Any:
    parquet = require_extra("pyarrow.parquet", "frames", f"{path}: Parquet", _PATH)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _parquet_error(path, error) from None


def _parquet_error(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as Parquet: {error}", _PATH)


def _column_kinds(path: Path, names: Sequence[str]) -> tuple[dict[str, Kind], int]:
    """Return the kind of each column (integers, numbers or words) and the number of rows."""
    # Each kind can represent the values of the kinds before it. The kind of a column is the widest one of its blocks.
    narrowest_first: Sequence[Kind] = (np.int64, np.float32, str)
    positions = dict.fromkeys(names, 0)
    rows = 0
    for block in _read_blocks(path, names):
        for name in names:
            _reject_empty_cells(path, name, block[name], rows)
            position = narrowest_first.index(_value_kind(block[name]))
            positions[name] = max(positions[name], position)
        rows += len(block[names[0]])
    kinds = {}
    for name, position in positions.items():
        kinds[name] = narrowest_first[position]
    return kinds, rows


def _reject_empty_cells(
    path: Path, name: str, cells: npt.NDArray[Any], rows_before: int
) -> None:
    """Raise `InputError` for an empty cell; ``rows_before`` is the number of rows before the block."""
    # numpy's letters for integers, unsigned integers and booleans: arrays of these types have no empty cells.
    if cells.dtype.kind in "iub":
        return
    for row, text in enumerate(_cell_texts(cells), rows_before + 1):
        # pandas writes an empty cell as NaN, and Parquet returns None.
        content = text.strip().lower().lstrip("+-")
        if content in ("", "none", "nan"):
            raise InputError(
                f"{path}: column '{name}' is empty in row {row}: fill the cell or remove the row",
                _PATH,
            )


def _value_kind(cells: npt.NDArray[Any]) -> Kind:
    """Return the narrowest kind able to represent all cells of a block."""
    if cells.dtype.kind in "iub":
        return np.int64
    if cells.dtype.kind == "f":
        return np.float32
    # Text from CSV: numpy parses the cells, and raises an error for other text than numbers of this kind.
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
    sorted_words = {}
    for name, words in distinct.items():
        sorted_words[name] = np.array(sorted(words))
    return sorted_words


def _cell_texts(cells: npt.NDArray[Any]) -> list[str]:
    # Parquet's columns of words are arrays of Python objects, CSV's are arrays of text.
    return [str(cell) for cell in cells]


def number_values(cells: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the values of a column, (rows,), as integers in alphabetical order of the values.

    >>> number_values(np.array(["north", "south", "north", "east"]))
    array([1, 2, 1, 0])
    """
    _, numbers = np.unique(_cell_texts(cells), return_inverse=True)
    return numbers.astype(np.int64)
