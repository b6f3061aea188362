"""The user's own data: a function in a file or package, ``.npz``, ``.safetensors``, tables, or images.

`load` reads a set as it is stored, checks the arrays, and splits off test samples if the set has none.

Arrays are called ``train_images``, ``train_labels``, ``test_images`` and ``test_labels``, or ``x_train``, ``y_train``,
``x_test`` and ``y_test``; several inputs are ``train_NAME`` and ``test_NAME`` beside the labels. Nothing is unpickled.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from safetensors import SafetensorError, safe_open

from testbed.common import plugins, usercode
from testbed.common.errors import InputError, Key
from testbed.common.lazy import np, npt, require_extra
from testbed.ml.data import large, pictures, tables
from testbed.ml.data.dataset import Dataset
from testbed.ml.data.split import holdout, is_class
from testbed.ml.fields import Fields, pack
from testbed.ml.workload import DataPart, SplitPart

Values: TypeAlias = "npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]]"
"""Samples, (samples, ...), or several inputs by name."""
Samples: TypeAlias = "tuple[Values, npt.NDArray[Any]]"
"""Samples and labels as stored, before checks."""
Arrays: TypeAlias = "tuple[npt.NDArray[Any], npt.NDArray[Any]]"
"""Checked samples and labels, (samples, ...) both; several inputs are one row of numbers for each sample."""
Groups: TypeAlias = "npt.NDArray[np.int64] | None"
"""(samples,): the group of each sample by the split column."""
IGNORED = -100
"""The label of a token that counts neither in torch's cross-entropy nor as an answer."""
GROUP = "testbed.data"
"""Entry points under which an installed package registers data sets: ``name = "module:object"``, where the object is a
`DataSource` or a function as of a Python file."""
_NAME: Key = ("data", "name")
_FILE: Key = ("data", "file")
_PATH: Key = ("data", "path")
_ARRAY_NAMES = (
    (("train_images", "train_labels"), ("test_images", "test_labels")),
    (("x_train", "y_train"), ("x_test", "y_test")),
)
"""Accepted names of the arrays of training samples and labels, and of test samples and labels."""
_NEEDED = "train_images and train_labels or x_train and y_train"
_HUGGING_FACE = ("dataset_dict.json", "dataset_info.json")
"""Files that data sets of Hugging Face have on disk, of several parts or of one."""
_VALUES_AT_ONCE = 1 << 22
"""Number of values checked at once, of a file that may be larger than memory."""
_PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


class _StoredSet(NamedTuple):
    """A data set as stored in a file or returned by a function, before checks."""

    train: Samples
    test: Samples | None = None
    """None for a set without a test part."""
    groups: Groups = None
    """Groups of the training samples; None unless the file has a split column beside the samples."""


def load(part: DataPart, path: Path, test_share: float) -> Dataset:
    """Return all samples of the file or folder ``path``; raises `InputError` for malformed data.

    Bytes are scaled to [0, 1]; other values stay as they are, and integers stay int64. If the data have no test part,
    ``test_share`` of the samples is used for tests. The last two results are cached until their files change.
    """
    if is_packaged(part):
        # Messages show the name in place of a path. An imported package does not change.
        path = Path(part.name)
        changed = 0
    else:
        changed = _time_of_change(part, path)
    column = part.split.column if isinstance(part.split, SplitPart) else None
    # One cached set serves all runs of a sweep: these keys only choose among its samples.
    unlimited = part.model_copy(
        update={"train": None, "test": None, "split": "coordinator"}
    )
    # As text, since the key of a cache needs a hash.
    text = unlimited.model_dump_json()
    return _load_cached(text, path, changed, test_share, column)


def is_packaged(part: DataPart) -> bool:
    """Return whether the samples come from a function of an installed package."""
    if part.file is not None or part.path is not None:
        return False
    return callable(plugins.find(GROUP, part.name, _NAME))


def _time_of_change(part: DataPart, path: Path) -> int:
    """Return the sum of the modification times, in ns, of a file, or of a folder and all files in the folder."""
    try:
        total = path.stat().st_mtime_ns
        if path.is_dir():
            for each in path.rglob("*"):
                total += each.stat().st_mtime_ns
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}: paths are relative to the scenario",
            _key_of(part),
        ) from None
    return total


def _key_of(part: DataPart) -> Key:
    """Return the key of the scenario naming the data, for errors."""
    return _PATH if part.file is None else _FILE


@lru_cache(maxsize=2)
def _load_cached(
    text: str,
    path: Path,
    changed: int,
    test_share: float,
    column: str | None,
) -> Dataset:
    """Read and check a set; ``text`` is the data part as JSON, ``changed`` distinguishes states of the files."""
    part = DataPart.model_validate_json(text)
    stored = _read_set(part, path, column)
    if column is not None and stored.groups is None:
        stored = _separate_column(stored, column)
    return _check_set(part, path, stored, test_share)


def _check_set(
    part: DataPart,
    path: Path,
    stored: _StoredSet,
    test_share: float,
) -> Dataset:
    """Return a set with checked arrays and a test part; raises `InputError` for malformed data."""
    key = _key_of(part)
    train, fields = _check_part(stored.train, f"{path}: the training samples", key)
    groups = stored.groups
    if stored.test is None:
        train, test, groups = _hold_out(train, groups, test_share)
    else:
        test, test_fields = _check_part(stored.test, f"{path}: the test samples", key)
        if fields != test_fields:
            names = _list_fields(fields)
            test_names = _list_fields(test_fields)
            text = f"{path}: training samples have {names}, test samples {test_names}"
            raise InputError(text, key)
    train, test = _match_types(train, test, path, key)
    _, train_labels = train
    _, test_labels = test
    classes = _count_classes(train_labels, test_labels, path, key)
    return Dataset(part.name, classes, *train, *test, groups, fields)


def _list_fields(fields: Fields) -> str:
    texts = [f"{each.name} {each.shape} {each.kind}" for each in fields]
    return ", ".join(texts)


# Checks


def _hold_out(
    train: Arrays, groups: Groups, share: float
) -> tuple[Arrays, Arrays, Groups]:
    """Move a share of the training samples to the test part; groups remain for training samples alone."""
    samples, labels = train
    # Without classes there is nothing to balance: all samples count as one class.
    classes = labels if is_class(labels) else np.zeros(len(labels), np.int64)
    kept, moved = holdout(classes, share)
    # Samples may be a file larger than memory; labels never are.
    test = (large.take(samples, moved), labels[moved])
    train = (large.take(samples, kept), labels[kept])
    kept_groups = None if groups is None else groups[kept]
    return train, test, kept_groups


def _match_types(
    train: Arrays,
    test: Arrays,
    path: Path,
    key: Key,
) -> tuple[Arrays, Arrays]:
    """Return both parts with samples of one type; raises `InputError` for differing shapes or label types."""
    samples, labels = train
    test_samples, test_labels = test
    shape = samples.shape[1:]
    test_shape = test_samples.shape[1:]
    if shape != test_shape:
        raise InputError(
            f"{path}: training samples are of {shape}, test samples of {test_shape}: give both one shape",
            key,
        )
    has_same_type = labels.dtype == test_labels.dtype
    if not has_same_type or labels.shape[1:] != test_labels.shape[1:]:
        raise InputError(
            f"{path}: training and test labels differ in shape or type: give both the same",
            key,
        )
    if samples.dtype != test_samples.dtype:
        # One part may consist of integers by chance.
        samples = samples.astype(np.float32)
        test_samples = test_samples.astype(np.float32)
    return (samples, labels), (test_samples, test_labels)


def _count_classes(
    train: npt.NDArray[Any],
    test: npt.NDArray[Any],
    path: Path,
    key: Key,
) -> int:
    """Return the number of classes, or of predicted values per sample; raises `InputError` for invalid labels."""
    if train.dtype.kind == "f":
        # Labels of float32 are the values to predict: one for (samples,), several for (samples, ...).
        return math.prod(train.shape[1:])
    # Classes are numbered from 0, and a class may occur among the test samples alone.
    highest = max(train.max(initial=0), test.max(initial=0))
    classes = 1 + int(highest)
    count = len(train) + len(test)
    # A year or an identifier as the label would make a network of thousands of outputs.
    if is_class(train) and classes > count:
        raise InputError(
            f"{path}: labels up to {classes - 1} for {count} samples: number the classes from 0",
            key,
        )
    return classes


def _read_set(part: DataPart, path: Path, column: str | None) -> _StoredSet:
    """Read a file or folder, or call a function; ``column`` is the name of the split column, None without one.

    Raises `InputError` for keys that the kind of data does not have.
    """
    if part.size is not None and not path.is_dir():
        raise InputError(
            "applies to folders of images only: remove the key", ("data", "size")
        )
    if part.path is None:
        _refuse_columns(part)
        return _from_function(part, path)
    if path.suffix in tables.SUFFIXES:
        table = tables.read(path, part.label, part.columns, column)
        train = (table.samples, table.labels)
        return _StoredSet(train, groups=table.groups)
    if any((path / name).is_file() for name in _HUGGING_FACE):
        return _from_hugging_face(part, path)
    _refuse_columns(part)
    # A folder with arrays is a set of arrays; any other folder has a folder of images for each class.
    if path.is_dir() and not any(path.glob("*.npy")):
        return _from_folders(path, part.size)
    return _from_arrays(path)


def _refuse_columns(part: DataPart) -> None:
    """Raise `InputError` for keys of tables."""
    if part.label or part.columns:
        raise InputError(
            "names a table column, which requires a .csv or .parquet file",
            ("data", "label"),
        )


def _separate_column(stored: _StoredSet, column: str) -> _StoredSet:
    """Return a set with the split column as groups instead of as an input of the samples."""
    train, groups = _pop_column(stored.train, column)
    test = stored.test
    if test is not None:
        # Test samples have no owners.
        test, _ = _pop_column(test, column)
    return _StoredSet(train, test, groups)


def _pop_column(samples: Samples, column: str) -> tuple[Samples, Groups]:
    """Return samples without the input ``column``, and the input as groups; None for samples without this input."""
    values, labels = samples
    if not isinstance(values, Mapping) or column not in values:
        # `testbed.ml.data.split` reports the missing column.
        return samples, None
    inputs = dict(values)
    groups = tables.number_values(inputs.pop(column))
    return (_only_or_all(inputs), labels), groups


def _check_part(samples: Samples, what: str, key: Key) -> tuple[Arrays, Fields]:
    """Return validated samples and labels, (samples, ...) both, of float32 or int64, and the fields.

    ``what`` names the samples in errors, and ``key`` is the key of the scenario.
    """
    values, labels = samples
    if isinstance(values, Mapping):
        return _check_inputs(values, labels, what, key)
    _check_count(values, labels, what, key)
    if values.ndim < 2:
        _refuse_type(values, what, key)
    numbers = _convert_numbers(values, what, key)
    # Among several inputs booleans stay: a mask is passed to the network as such.
    if numbers.dtype == bool:
        numbers = numbers.astype(np.float32)
    return (numbers, _convert_labels(labels, what, key)), ()


def _check_inputs(
    inputs: Mapping[str, npt.NDArray[Any]],
    labels: npt.NDArray[Any],
    what: str,
    key: Key,
) -> tuple[Arrays, Fields]:
    """Return several inputs as one row of numbers for each sample, with the labels and the fields."""
    if not inputs:
        raise InputError(f"{what}: contain no inputs: give at least one array", key)
    for name, values in inputs.items():
        _check_count(values, labels, f"{what}: input '{name}'", key)
    numbers = {}
    for name, values in inputs.items():
        numbers[name] = _convert_numbers(values, f"{what}: input '{name}'", key)
    rows, fields = pack(numbers)
    return (rows, _convert_labels(labels, what, key)), fields


def _check_count(
    values: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    what: str,
    key: Key,
) -> None:
    """Raise `InputError` for arrays without samples, or with another number of labels."""
    has_axes = values.ndim > 0 and labels.ndim > 0
    if has_axes and len(values) == len(labels) > 0:
        return
    samples_text = _length_text(values)
    labels_text = _length_text(labels)
    raise InputError(
        f"{what}: {samples_text} samples and {labels_text} labels: give each sample one label",
        key,
    )


def _length_text(values: npt.NDArray[Any]) -> str:
    """Return the length of an array, for an error; a single number has none."""
    return str(len(values)) if values.ndim else "no array of"


def _refuse_type(values: npt.NDArray[Any], what: str, key: Key) -> NoReturn:
    """Raise `InputError` for samples other than arrays of numbers."""
    raise InputError(
        f"{what}: an array {values.shape} of {values.dtype}: "
        "give numbers of (samples, ...), such as (samples, 3, 32, 32)",
        key,
    )


def _convert_numbers(values: npt.NDArray[Any], what: str, key: Key) -> npt.NDArray[Any]:
    """Return values of float32, int64 or bool, bytes scaled to [0, 1].

    Raises `InputError` for other types, for values that are not finite, and for images with the colours last.
    """
    # numpy's letters for unsigned, integer, float and boolean.
    if values.dtype.kind not in "uifb":
        _refuse_type(values, what, key)
    if _has_colours_last(values.shape):
        text = f"{what}: {values.shape} has the colours last, and torch has them first: numpy.moveaxis(samples, -1, 1)"
        raise InputError(text, key)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind != "f" and values.dtype != np.uint8:
        # Without a copy of a file that may be larger than memory, if it has this type already.
        return values.astype(np.int64, copy=False)
    numbers = _scale_numbers(values)
    if not _is_finite(numbers):
        raise InputError(
            f"{what}: contain values that are not finite in float32: fix or remove them",
            key,
        )
    return numbers


def _scale_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bytes scaled to [0, 1], or floats, as float32; files of bytes or float32 unchanged."""
    is_bytes = values.dtype == np.uint8
    is_file = isinstance(values, np.memmap)
    if is_file and (is_bytes or values.dtype == np.float32):
        # It may be larger than memory, and stays a file: `Dataset` scales its bytes as samples are read.
        return values
    # Too large a float64 becomes infinite, which the caller reports.
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if is_bytes:
        numbers /= 255
    return numbers


def _has_colours_last(shape: tuple[int, ...]) -> bool:
    """Return whether samples look like (height, width, colours): square, and larger than any number of colours."""
    if len(shape) != 4:
        return False
    _, height, width, colours = shape
    # Grey, RGB, and RGB with transparency.
    return colours in (1, 3, 4) and height == width > 4


def _is_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether an array of any size, possibly larger than memory, is finite."""
    if values.dtype == np.uint8:
        return True
    values_per_sample = max(1, values[0].size)
    step = max(1, _VALUES_AT_ONCE // values_per_sample)
    for begin in range(0, len(values), step):
        block = values[begin : begin + step]
        if not np.isfinite(block).all():
            return False
    return True


def _convert_labels(labels: npt.NDArray[Any], what: str, key: Key) -> npt.NDArray[Any]:
    """Return labels of float32 or int64; raises `InputError` for other types and negative classes."""
    is_float = labels.dtype.kind == "f"
    smallest = -np.inf if is_float else 0
    if not is_float and labels.ndim > 1:
        # Labels of tokens, some of which may be ignored.
        smallest = IGNORED
    if labels.dtype.kind in "uif" and labels.min() >= smallest:
        # Too large a float64 becomes infinite, and is refused.
        with np.errstate(over="ignore"):
            numbers = labels.astype(np.float32 if is_float else np.int64)
        if np.isfinite(numbers).all():
            return numbers
    given = f"labels {labels.shape} of {labels.dtype}"
    text = f"{what}: {given}: give whole numbers from 0 for classes, or finite numbers of float32 for what is learned"
    raise InputError(text, key)


# Functions


def _from_function(part: DataPart, path: Path) -> _StoredSet:
    """Call the user's function, which returns (train, test).

    Each of the two is a pair of arrays or a torch data set; test may be None. Raises `InputError` for other results.
    """
    if part.file is None:
        package = plugins.installed(GROUP)[part.name]
        result = plugins.load(package, _NAME, lambda function: function())
    else:
        code = usercode.read(path, part.name, _FILE)
        result = usercode.call(code, _FILE)
    where = f"{path}: {part.name}"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InputError(
            f"{where} returned {type(result).__name__}: return (train, test)", _FILE
        )
    train, test = result
    if train is None:
        raise InputError(
            f"{where} returned no training samples: return (train, test)", _FILE
        )
    stored_train = _read_part(train, where)
    stored_test = None if test is None else _read_part(test, where)
    return _StoredSet(stored_train, stored_test)


def _read_part(part: Any, where: str) -> Samples:
    """Return the training or test part of a set as arrays, from a pair of arrays or an indexable sequence of pairs.

    Samples may consist of several inputs, as a mapping or a tuple. Samples of a sequence may also be mappings that
    contain the label, as in data sets of Hugging Face. ``where`` names the function in errors.
    """
    try:
        if isinstance(part, tuple) and len(part) == 2:
            samples, labels = part
            return _read_inputs(samples, _to_array(labels))
        all_samples = []
        all_labels = []
        # By index and not by iteration: a torch data set need not end an iteration.
        for number in range(len(part)):
            sample, label = _read_sample(part[number])
            all_samples.append(sample)
            all_labels.append(label)
        inputs = _stack_inputs(all_samples, filling=0)
        return inputs, _stack_samples(all_labels, filling=IGNORED)
    # The user's objects may raise any of these: the message names the function, and their text says the rest.
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        text = "samples and labels must be arrays with samples of one shape, or a data set of such pairs"
        raise InputError(f"{where}: {text}: {error}", _FILE) from None


def _read_inputs(samples: Any, labels: npt.NDArray[Any]) -> Samples:
    """Return samples as one array, or as one array for each of several inputs."""
    # A tuple as long as the labels is a tuple of samples.
    is_group = isinstance(samples, tuple) and len(samples) != len(labels)
    if is_group and all(len(each) == len(labels) for each in samples):
        samples = _number_inputs(samples)
    if not isinstance(samples, Mapping):
        return _to_array(samples), labels
    arrays = {}
    for name, values in samples.items():
        arrays[name] = _to_array(values)
    return arrays, labels


def _number_inputs(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of a tuple by position, the names of inputs passed to `forward` in order."""
    numbered = {}
    for place, values in enumerate(inputs):
        numbered[str(place)] = values
    return numbered


def _read_sample(item: Any) -> tuple[Any, Any]:
    """Return a sample (a mapping for several inputs) and its label."""
    if not isinstance(item, Mapping):
        sample, label = item
        if isinstance(sample, tuple):
            sample = _number_inputs(sample)
        return sample, label
    for name in ("labels", "label"):
        if name in item:
            inputs = dict(item)
            label = inputs.pop(name)
            return inputs, label
    raise ValueError(f"a sample has {', '.join(item)}, and no 'label' or 'labels'")


def _stack_inputs(samples: Sequence[Any], filling: int) -> Values:
    """Stack samples into one array, or into one array for each of several inputs; shorter ones end with ``filling``."""
    if not isinstance(samples[0], Mapping):
        return _stack_samples(samples, filling)
    arrays = {}
    for name in samples[0]:
        arrays[name] = _stack_samples([each[name] for each in samples], filling)
    return _only_or_all(arrays)


def _only_or_all(inputs: dict[str, npt.NDArray[Any]]) -> Values:
    """Return the array of a single input, or the mapping of several inputs."""
    return inputs if len(inputs) > 1 else next(iter(inputs.values()))


def _stack_samples(values: Sequence[Any], filling: int) -> npt.NDArray[Any]:
    """Stack samples, (samples, ...), padding shorter ones to the longest along the first axis with ``filling``."""
    arrays = [_to_array(each) for each in values]
    longest = 0
    for array in arrays:
        if array.ndim:
            longest = max(longest, len(array))
    padded = []
    for array in arrays:
        if array.ndim and len(array) < longest:
            # At the end of the first axis, and nowhere else.
            widths = [(0, 0)] * array.ndim
            widths[0] = (0, longest - len(array))
            array = np.pad(array, widths, constant_values=filling)
        padded.append(array)
    return np.stack(padded)


def _to_array(values: Any) -> npt.NDArray[Any]:
    """Convert a value to an array; Pillow images become channels first, as in torch."""
    # Neither torch nor Pillow is imported here: their objects are recognised by a method that others lack.
    if hasattr(values, "detach"):
        # A tensor that requires gradients has no array.
        values = values.detach()
    array = np.asarray(values)
    if not hasattr(values, "getbands"):
        return array
    # A grey image has no axis of colours.
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


# Arrays in files


def _from_arrays(path: Path) -> _StoredSet:
    """Read a file or folder of arrays; raises `InputError` for missing arrays."""
    arrays = _read_arrays(path)
    for (samples_name, labels_name), test_names in _ARRAY_NAMES:
        if samples_name in arrays and labels_name in arrays:
            train = (arrays[samples_name], arrays[labels_name])
            return _StoredSet(train, _test_part(path, arrays, test_names))
    # Samples of several inputs.
    inputs = _inputs_of(arrays, "train_")
    labels = inputs.pop("labels", None)
    test_inputs = _inputs_of(arrays, "test_")
    test_labels = test_inputs.pop("labels", None)
    if not inputs or labels is None:
        names = ", ".join(arrays) or "nothing"
        raise InputError(f"{path} holds {names}: it needs {_NEEDED}", _PATH)
    if bool(test_inputs) != (test_labels is not None):
        raise InputError(
            f"{path} has test samples without labels, or labels without samples: give both or neither",
            _PATH,
        )
    test = None if test_labels is None else (test_inputs, test_labels)
    return _StoredSet((inputs, labels), test)


def _test_part(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], names: tuple[str, str]
) -> Arrays | None:
    """Return the arrays of test samples and test labels, which have the given names; None if both are missing."""
    given = [arrays[name] for name in names if name in arrays]
    if not given:
        return None
    if len(given) == 1:
        raise InputError(
            f"{path} holds one of {' and '.join(names)}: it needs both or none", _PATH
        )
    samples, labels = given
    return samples, labels


def _inputs_of(
    arrays: Mapping[str, npt.NDArray[Any]], prefix: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays with a prefix in their names, keyed by the rest of the name."""
    inputs = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            inputs[name.removeprefix(prefix)] = array
    return inputs


# Data sets of Hugging Face


def _from_hugging_face(part: DataPart, path: Path) -> _StoredSet:
    """Read data saved by `datasets`; each column is an input of the samples, one column alone the only input."""
    library = require_extra(
        "datasets", "datasets", f"{path}: a data set of Hugging Face", _PATH
    )
    try:
        saved = library.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read by `datasets`: {error}", _PATH
        ) from None
    parts = saved if isinstance(saved, Mapping) else {"train": saved}
    if "train" not in parts:
        raise InputError(
            f"{path} holds {', '.join(parts)}: one must be named train", _PATH
        )
    train = _read_columns(part, parts["train"], path)
    # Without a test part, the validation part is used for tests.
    for name in ("test", "validation"):
        if name in parts:
            return _StoredSet(train, _read_columns(part, parts[name], path))
    return _StoredSet(train)


def _read_columns(part: DataPart, rows: Any, path: Path) -> Samples:
    """Return the chosen columns of a data set of Hugging Face, and the labels."""
    label, chosen = _choose_columns(part, list(rows.column_names), path)
    inputs = {}
    try:
        for name in chosen:
            inputs[name] = _stack_samples(rows[name], filling=0)
        labels = _stack_samples(rows[label], filling=IGNORED)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: samples must be numbers: name their `columns`: {error}", _PATH
        ) from None
    return _only_or_all(inputs), labels


def _choose_columns(
    part: DataPart, names: Sequence[str], path: Path
) -> tuple[str, Sequence[str]]:
    """Return the column of the labels and the columns of a sample; raises `InputError` for unknown columns.

    Without keys in the scenario, the labels are called "label" or "labels", and all other columns form a sample.
    """
    has_plural = "labels" in names and "label" not in names
    label = part.label or ("labels" if has_plural else "label")
    if isinstance(part.columns, Mapping):
        raise InputError(
            "columns of such a data set are inputs by their own names: write a list",
            ("data", "columns"),
        )
    chosen = part.columns or [name for name in names if name != label]
    for name in (label, *chosen):
        if name not in names:
            key = "label" if name == label else "columns"
            raise InputError(
                f"{path} has no column {name}: there are {', '.join(names)}",
                ("data", key),
            )
    return label, chosen


# Readers of arrays


def _from_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an .npz file by name."""
    if not zipfile.is_zipfile(path):
        # numpy would take the file for a pickle, and advise to load it as such.
        raise InputError(
            f"{path} is not an .npz file: write it with numpy.savez", _PATH
        )
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _from_npy_folder(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of a folder into memory: they may be larger than memory."""
    arrays = {}
    for file in path.glob("*.npy"):
        arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    return arrays


def _from_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .safetensors file by name."""
    arrays = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            arrays[name] = file.get_tensor(name)
    return arrays


def _read_arrays(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    """Return the arrays of a file or folder by name; raises `InputError` for unreadable and other files."""
    try:
        if path.is_dir():
            return _from_npy_folder(path)
        if path.suffix == ".npz":
            return _from_npz(path)
        if path.suffix == ".safetensors":
            return _from_safetensors(path)
    except TypeError as error:
        # numpy lacks the type, such as bfloat16.
        raise InputError(
            f"{path}: cannot be read: {error}: write it as float32", _PATH
        ) from None
    except (
        OSError,
        ValueError,
        zipfile.BadZipFile,
        EOFError,
        SafetensorError,
    ) as error:
        text = f"cannot be read: {error}"
        if "pickle" in str(error):
            # A pickle runs code of whoever wrote it.
            text = "contains Python objects, which are not unpickled for safety: write arrays of numbers"
        raise InputError(f"{path}: {text}", _PATH) from None
    raise InputError(
        f"{path}: must be .npz, .safetensors, .csv or .parquet, or a folder with a folder of images for each class",
        _PATH,
    )


# Folders of images


def _from_folders(path: Path, size: str | None) -> _StoredSet:
    """Read images from one folder per class, optionally below ``train`` and ``test``."""
    train = path / "train"
    test = path / "test"
    if not train.is_dir() or not test.is_dir():
        samples = _read_pictures(path, _class_folders(path), size)
        return _StoredSet(samples)
    classes = _class_folders(train)
    # The classes are numbered by the training images.
    unknown = set(_class_folders(test)) - set(classes)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise InputError(f"{test}: no training images of {names}", _PATH)
    train_samples = _read_pictures(train, classes, size)
    return _StoredSet(train_samples, _read_pictures(test, classes, size))


def _class_folders(folder: Path) -> list[str]:
    """Return the names of the classes in alphabetical order; raises `InputError` for a class without images."""
    names = []
    for each in folder.iterdir():
        # A hidden folder, such as .ipynb_checkpoints, is no class.
        if each.is_dir() and not each.name.startswith("."):
            names.append(each.name)
    if not names:
        raise InputError(
            f"{folder} contains no folders: put the images of each class into a folder named after the class",
            _PATH,
        )
    # Sorted, since file systems differ in their order and classes are numbered by it.
    names.sort()
    empty = [name for name in names if not _picture_files(folder / name)]
    if empty:
        raise InputError(
            f"{folder}: no images of {', '.join(empty)}: add some or remove the folder",
            _PATH,
        )
    return names


def _picture_files(folder: Path) -> list[Path]:
    # In one order on all file systems, since samples are numbered by it.
    files = sorted(folder.glob("*"))
    return [file for file in files if file.suffix.lower() in _PICTURE_SUFFIXES]


def _read_pictures(folder: Path, classes: list[str], size: str | None) -> Samples:
    """Return the images of classes, (samples, 3, height, width), and the classes' numbers, (samples,).

    ``size`` is HEIGHTxWIDTH; None for images that all have one size. Raises `InputError` for other images.
    """
    shape: tuple[int, int, int] | None = None
    if size is not None:
        height, width = map(int, size.split("x"))
        shape = (3, height, width)
    images = []
    labels = []
    for file, label in _labelled_files(folder, classes):
        try:
            picture = pictures.read(file)
        except InputError as error:
            raise InputError(error.text, _PATH) from None
        pixels = (picture.height, picture.width)
        # Without a size in the scenario, the first image decides.
        shape = shape or (3, *pixels)
        if size is None and pixels != shape[1:]:
            here = f"{picture.height}x{picture.width}, others of {shape[1]}x{shape[2]}"
            raise InputError(
                f"{file} is of {here}: write `size: HEIGHTxWIDTH`, and all are fitted into it",
                _PATH,
            )
        images.append(pictures.letterbox(picture, shape))
        labels.append(label)
    return np.stack(images), np.asarray(labels)


def _labelled_files(folder: Path, classes: list[str]) -> Iterator[tuple[Path, int]]:
    """Yield the images of all classes with the numbers of their classes."""
    for label, name in enumerate(classes):
        # A class may have no test images.
        if (folder / name).is_dir():
            for file in _picture_files(folder / name):
                yield file, label
