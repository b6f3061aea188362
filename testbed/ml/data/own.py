"""The user's own data: a function in a file or package, ``.npz``, ``.safetensors``, tables, or images.

`load` reads a set as it is stored, checks the arrays, and splits off test samples if the set has none. The readers of
the formats follow the checks.

In files, arrays have the names ``train_images``, ``train_labels``, ``test_images`` and ``test_labels``, or ``x_train``,
``y_train``, ``x_test`` and ``y_test``. If a sample consists of several inputs of the network, such as tokens and a
mask, each input has an array ``train_NAME`` and ``test_NAME``. Pickles are rejected, since reading one runs code.

The split column (`column` of `workload.data.split`) is the column of a table, or the input, whose values decide which
device owns a sample; samples with equal values form a group.

In all functions, ``data_part`` is the section `workload.data` of the scenario.
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

StoredSamples: TypeAlias = "npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]]"
"""Samples as stored, before checks: one array, (samples, ...), or several inputs by name, (samples, ...) each."""
StoredPair: TypeAlias = "tuple[StoredSamples, npt.NDArray[Any]]"
"""Samples and labels as stored, before checks."""
CheckedPair: TypeAlias = "tuple[npt.NDArray[Any], npt.NDArray[Any]]"
"""Checked samples and labels, (samples, ...) both; several inputs are one row of numbers for each sample."""
Groups: TypeAlias = "npt.NDArray[np.int64] | None"
"""(samples,): the number of each sample's group by the split column; None without a split column."""
IGNORED = -100
"""The label of a token that counts neither in torch's cross-entropy nor as an answer."""
ENTRY_POINTS = "testbed.data"
"""Entry points under which an installed package registers data sets: ``name = "module:object"``. The object is a
`testbed.ml.data.catalog.DataSource`, or a function that returns (train, test) like a function of a Python file."""
# Keys of the scenario below `workload`, which errors name.
_NAME: Key = ("data", "name")
_FILE: Key = ("data", "file")
_PATH: Key = ("data", "path")
_ARRAY_NAMES = (
    (("train_images", "train_labels"), ("test_images", "test_labels")),
    (("x_train", "y_train"), ("x_test", "y_test")),
)
"""Accepted array names: ((training samples, training labels), (test samples, test labels)) of each convention."""
_HUGGING_FACE_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files of a folder written by Hugging Face's library `datasets`: of a `DatasetDict`, and of a `Dataset`."""
_VALUES_PER_BLOCK = 1 << 22
"""Values checked at a time, 16 MB of float32: a file may be larger than memory."""
_PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


class _StoredSet(NamedTuple):
    """A data set as stored in a file or returned by a function, before checks."""

    train: StoredPair
    test: StoredPair | None = None
    """None for a set without test samples."""
    groups: Groups = None
    """Groups of the training samples; None unless the reader has read the split column already."""


def load(data_part: DataPart, path: Path, test_share: float) -> Dataset:
    """Return all samples of the file or folder ``path``; raises `InputError` for malformed data.

    Bytes are scaled to [0, 1], and integers become int64. If the data have no test samples, ``test_share`` of the
    samples is used for tests. The last two sets are cached until their files change.
    """
    if is_packaged(data_part):
        # Messages show the name in place of a path. An imported package does not change.
        path = Path(data_part.name)
        modified = 0
    else:
        modified = _modification_time(data_part, path)
    split = data_part.split
    split_column = split.column if isinstance(split, SplitPart) else None
    # One cached set serves all runs of a sweep: these keys only choose among its samples.
    unlimited = data_part.model_copy(
        update={"train": None, "test": None, "split": "coordinator"}
    )
    # `lru_cache` requires arguments with a hash, which a text has.
    part_json = unlimited.model_dump_json()
    return _load_cached(part_json, path, modified, test_share, split_column)


def is_packaged(data_part: DataPart) -> bool:
    """Return whether the samples come from a function of an installed package."""
    if data_part.file is not None or data_part.path is not None:
        return False
    return callable(plugins.find(ENTRY_POINTS, data_part.name, _NAME))


def _modification_time(data_part: DataPart, path: Path) -> int:
    """Return the sum of the modification times, in ns, of a file, or of a folder and all files in the folder."""
    try:
        total = path.stat().st_mtime_ns
        if path.is_dir():
            for entry in path.rglob("*"):
                total += entry.stat().st_mtime_ns
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}: paths are relative to the scenario",
            _key_of(data_part),
        ) from None
    return total


def _key_of(data_part: DataPart) -> Key:
    """Return the key of the scenario naming the data, for errors."""
    return _PATH if data_part.file is None else _FILE


@lru_cache(maxsize=2)
def _load_cached(
    part_json: str,
    path: Path,
    modified: int,
    test_share: float,
    split_column: str | None,
) -> Dataset:
    """Read and check a set; ``modified`` only distinguishes the states of the files in the cache."""
    data_part = DataPart.model_validate_json(part_json)
    stored = _read_set(data_part, path, split_column)
    if split_column is not None and stored.groups is None:
        stored = _separate_column(stored, split_column)
    return _check_set(data_part, path, stored, test_share)


def _check_set(
    data_part: DataPart,
    path: Path,
    stored: _StoredSet,
    test_share: float,
) -> Dataset:
    """Return a set with checked arrays and test samples; raises `InputError` for malformed data."""
    key = _key_of(data_part)
    train, fields = _check_pair(stored.train, f"{path}: the training samples", key)
    groups = stored.groups
    if stored.test is None:
        train, test, groups = _hold_out(train, groups, test_share)
    else:
        test, test_fields = _check_pair(stored.test, f"{path}: the test samples", key)
        if fields != test_fields:
            names = _list_fields(fields)
            test_names = _list_fields(test_fields)
            text = f"{path}: training samples have {names}, test samples {test_names}"
            raise InputError(text, key)
    train, test = _match_types(train, test, path, key)
    _, train_labels = train
    _, test_labels = test
    classes = _count_classes(train_labels, test_labels, path, key)
    return Dataset(data_part.name, classes, *train, *test, groups, fields)


def _list_fields(fields: Fields) -> str:
    texts = [f"{field.name} {field.shape} {field.kind}" for field in fields]
    return ", ".join(texts)


# Checks


def _hold_out(
    train: CheckedPair, groups: Groups, share: float
) -> tuple[CheckedPair, CheckedPair, Groups]:
    """Move a share of the training samples to the test samples; return both and the groups of the training samples."""
    samples, labels = train
    # `holdout` takes the same share of each class. Labels that are not classes count as one class.
    classes = labels if is_class(labels) else np.zeros(len(labels), np.int64)
    train_indices, test_indices = holdout(classes, share)
    # Samples may be a file larger than memory; labels never are.
    test = (large.take(samples, test_indices), labels[test_indices])
    train = (large.take(samples, train_indices), labels[train_indices])
    train_groups = None if groups is None else groups[train_indices]
    return train, test, train_groups


def _match_types(
    train: CheckedPair,
    test: CheckedPair,
    path: Path,
    key: Key,
) -> tuple[CheckedPair, CheckedPair]:
    """Return training and test samples of one type; raises `InputError` for differing shapes or label types."""
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
        # One of the two may consist of whole numbers by chance.
        samples = samples.astype(np.float32)
        test_samples = test_samples.astype(np.float32)
    return (samples, labels), (test_samples, test_labels)


def _count_classes(
    train_labels: npt.NDArray[Any],
    test_labels: npt.NDArray[Any],
    path: Path,
    key: Key,
) -> int:
    """Return the number of classes, or of predicted values per sample; raises `InputError` for invalid labels."""
    if train_labels.dtype.kind == "f":
        # Labels of float32 are the values to predict: one for (samples,), several for (samples, ...).
        return math.prod(train_labels.shape[1:])
    # Classes are numbered from 0, and a class may occur among the test samples alone.
    highest = max(train_labels.max(initial=0), test_labels.max(initial=0))
    classes = 1 + int(highest)
    samples = len(train_labels) + len(test_labels)
    # A year or an identifier as the label would make a network of thousands of outputs.
    if is_class(train_labels) and classes > samples:
        raise InputError(
            f"{path}: labels up to {classes - 1} for {samples} samples: number the classes from 0",
            key,
        )
    return classes


def _read_set(data_part: DataPart, path: Path, split_column: str | None) -> _StoredSet:
    """Read a file or folder, or call the user's function.

    Raises `InputError` for keys of the scenario that apply to another kind of data.
    """
    if data_part.size is not None and not path.is_dir():
        raise InputError(
            "applies to folders of images only: remove the key", ("data", "size")
        )
    if data_part.path is None:
        _refuse_columns(data_part)
        return _from_function(data_part, path)
    if path.suffix in tables.SUFFIXES:
        table = tables.read(path, data_part.label, data_part.columns, split_column)
        train = (table.samples, table.labels)
        return _StoredSet(train, groups=table.groups)
    if any((path / name).is_file() for name in _HUGGING_FACE_FILES):
        return _from_hugging_face(data_part, path)
    _refuse_columns(data_part)
    # A folder without arrays contains a folder of images for each class.
    if path.is_dir() and not any(path.glob("*.npy")):
        return _from_folders(path, data_part.size)
    return _from_arrays(path)


def _refuse_columns(data_part: DataPart) -> None:
    """Raise `InputError` for keys of tables."""
    if data_part.label or data_part.columns:
        raise InputError(
            "names a table column, which requires a .csv or .parquet file",
            ("data", "label"),
        )


def _separate_column(stored: _StoredSet, split_column: str) -> _StoredSet:
    """Return a set with the split column as groups instead of as an input of the samples."""
    train, groups = _pop_column(stored.train, split_column)
    test = stored.test
    if test is not None:
        # Test samples are not split, but their inputs must be those of the training samples.
        test, _ = _pop_column(test, split_column)
    return _StoredSet(train, test, groups)


def _pop_column(pair: StoredPair, split_column: str) -> tuple[StoredPair, Groups]:
    """Return a pair whose samples lack the input ``split_column``, and the groups by the removed input.

    The groups are None for samples without this input.
    """
    samples, labels = pair
    if not isinstance(samples, Mapping) or split_column not in samples:
        # `testbed.ml.data.split` reports the missing column.
        return pair, None
    inputs = dict(samples)
    groups = tables.number_values(inputs.pop(split_column))
    return (_unwrap_single(inputs), labels), groups


def _check_pair(pair: StoredPair, subject: str, key: Key) -> tuple[CheckedPair, Fields]:
    """Return samples and labels of float32 or int64, and the inputs of a sample, () for a single input.

    In this and all other checks, ``subject`` names the samples at the beginning of an error, and ``key`` is the
    scenario's key of the error.
    """
    samples, labels = pair
    if isinstance(samples, Mapping):
        return _check_inputs(samples, labels, subject, key)
    _check_count(samples, labels, subject, key)
    if samples.ndim < 2:
        _raise_type_error(samples, subject, key)
    numbers = _convert_numbers(samples, subject, key)
    # `_check_inputs` keeps booleans: among several inputs they are a mask, which networks take as booleans.
    if numbers.dtype == bool:
        numbers = numbers.astype(np.float32)
    return (numbers, _convert_labels(labels, subject, key)), ()


def _check_inputs(
    inputs: Mapping[str, npt.NDArray[Any]],
    labels: npt.NDArray[Any],
    subject: str,
    key: Key,
) -> tuple[CheckedPair, Fields]:
    """Return several inputs as one row of numbers for each sample, with the labels and the fields."""
    if not inputs:
        raise InputError(f"{subject}: contain no inputs: give at least one array", key)
    for name, values in inputs.items():
        _check_count(values, labels, f"{subject}: input '{name}'", key)
    numbers = {}
    for name, values in inputs.items():
        numbers[name] = _convert_numbers(values, f"{subject}: input '{name}'", key)
    rows, fields = pack(numbers)
    return (rows, _convert_labels(labels, subject, key)), fields


def _check_count(
    values: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    subject: str,
    key: Key,
) -> None:
    """Raise `InputError` for arrays without samples, or with another number of labels."""
    has_axes = values.ndim > 0 and labels.ndim > 0
    if has_axes and len(values) == len(labels) > 0:
        return
    samples_text = _count_text(values)
    labels_text = _count_text(labels)
    raise InputError(
        f"{subject}: {samples_text} samples and {labels_text} labels: give each sample one label",
        key,
    )


def _count_text(values: npt.NDArray[Any]) -> str:
    """Return the text before "samples" or "labels" in an error; a single number has no length."""
    return str(len(values)) if values.ndim else "no array of"


def _raise_type_error(values: npt.NDArray[Any], subject: str, key: Key) -> NoReturn:
    """Raise `InputError` for samples other than arrays of numbers."""
    raise InputError(
        f"{subject}: an array {values.shape} of {values.dtype}: "
        "give numbers of (samples, ...), such as (samples, 3, 32, 32)",
        key,
    )


def _convert_numbers(
    values: npt.NDArray[Any], subject: str, key: Key
) -> npt.NDArray[Any]:
    """Return values of float32, int64 or bool, bytes scaled to [0, 1].

    Raises `InputError` for other types, for values that are not finite, and for images with the colours last.
    """
    # numpy's letters for unsigned integers, integers, floats and booleans.
    if values.dtype.kind not in "uifb":
        _raise_type_error(values, subject, key)
    if _has_colours_last(values.shape):
        text = f"{subject}: {values.shape} has the colours last: move them first with numpy.moveaxis(samples, -1, 1)"
        raise InputError(text, key)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind != "f" and values.dtype != np.uint8:
        # A file of int64 may be larger than memory, and must not be copied.
        return values.astype(np.int64, copy=False)
    numbers = _scale_numbers(values)
    if not _is_finite(numbers):
        raise InputError(
            f"{subject}: contain values that are not finite in float32: fix or remove them",
            key,
        )
    return numbers


def _scale_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bytes scaled to [0, 1], or floats, as float32; files of bytes or float32 unchanged."""
    is_bytes = values.dtype == np.uint8
    is_file = isinstance(values, np.memmap)
    if is_file and (is_bytes or values.dtype == np.float32):
        # The file may be larger than memory: `Dataset` scales bytes when samples are read.
        return values
    # A float64 beyond the range of float32 becomes infinite, which the caller reports.
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if is_bytes:
        numbers /= 255
    return numbers


def _has_colours_last(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is probably (samples, height, width, colours): square images with 1, 3 or 4 colours."""
    if len(shape) != 4:
        return False
    _, height, width, colours = shape
    is_square = height == width
    # In images of up to 4 pixels, the second axis could be the colours as well.
    return colours in (1, 3, 4) and is_square and width > 4


def _is_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether an array of any size, possibly larger than memory, is finite."""
    if values.dtype == np.uint8:
        return True
    values_per_sample = max(1, values[0].size)
    step = max(1, _VALUES_PER_BLOCK // values_per_sample)
    for begin in range(0, len(values), step):
        block = values[begin : begin + step]
        if not np.isfinite(block).all():
            return False
    return True


def _convert_labels(
    labels: npt.NDArray[Any], subject: str, key: Key
) -> npt.NDArray[Any]:
    """Return labels of float32 or int64; raises `InputError` for other types and negative classes."""
    is_float = labels.dtype.kind == "f"
    if is_float:
        smallest = -np.inf
    elif labels.ndim > 1:
        # Labels of tokens, some of which may be ignored.
        smallest = IGNORED
    else:
        smallest = 0
    # numpy's letters for unsigned integers, integers and floats.
    is_number = labels.dtype.kind in "uif"
    # Labels without values, such as (samples, 0), have no minimum.
    if is_number and labels.size and labels.min() >= smallest:
        # A float64 beyond the range of float32 becomes infinite, and is rejected below.
        with np.errstate(over="ignore"):
            numbers = labels.astype(np.float32 if is_float else np.int64)
        if np.isfinite(numbers).all():
            return numbers
    given = f"labels {labels.shape} of {labels.dtype}"
    text = f"{subject}: {given}: give whole numbers from 0 for classes, or finite numbers of float32 to predict"
    raise InputError(text, key)


# Functions


def _from_function(data_part: DataPart, path: Path) -> _StoredSet:
    """Call the function of the user's file or of a package, which returns (train, test).

    Both train and test are a pair of arrays or a torch data set; test may be None. Raises `InputError` for other
    results.
    """
    if data_part.file is None:
        package = plugins.installed(ENTRY_POINTS)[data_part.name]
        result = plugins.load(package, _NAME, lambda function: function())
    else:
        code = usercode.read(path, data_part.name, _FILE)
        result = usercode.call(code, _FILE)
    where = f"{path}: {data_part.name}"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InputError(
            f"{where} returned {type(result).__name__}: return (train, test)", _FILE
        )
    train, test = result
    if train is None:
        raise InputError(
            f"{where} returned no training samples: return (train, test)", _FILE
        )
    stored_train = _read_result(train, where)
    stored_test = None if test is None else _read_result(test, where)
    return _StoredSet(stored_train, stored_test)


def _read_result(result: Any, where: str) -> StoredPair:
    """Return the train or test result of the function as arrays.

    The result is a pair of arrays, or an indexable sequence of (sample, label). A sample may consist of several inputs,
    as a mapping or a tuple. A sequence may also have mappings that contain the label, as in data sets of Hugging Face.
    ``where`` names the function in errors.
    """
    try:
        if isinstance(result, tuple) and len(result) == 2:
            samples, labels = result
            return _read_inputs(samples, _to_array(labels))
        if not len(result):
            raise ValueError("the sequence has no samples")
        all_samples = []
        all_labels = []
        # A torch data set has a length, but iterating over it may never end.
        for index in range(len(result)):
            sample, label = _read_sample(result[index])
            all_samples.append(sample)
            all_labels.append(label)
        inputs = _stack_inputs(all_samples, padding=0)
        return inputs, _stack_samples(all_labels, padding=IGNORED)
    # Code of the user may raise any of these errors. The message adds the name of the function.
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        text = "samples and labels must be arrays with samples of one shape, or a data set of such pairs"
        raise InputError(f"{where}: {text}: {error}", _FILE) from None


def _read_inputs(samples: Any, labels: npt.NDArray[Any]) -> StoredPair:
    """Return samples as one array, or as one array for each of several inputs."""
    # A tuple as long as the labels has one entry for each sample; any other tuple has one for each input.
    has_inputs = isinstance(samples, tuple) and len(samples) != len(labels)
    if has_inputs and all(len(values) == len(labels) for values in samples):
        samples = _name_by_position(samples)
    if not isinstance(samples, Mapping):
        return _to_array(samples), labels
    arrays = {}
    for name, values in samples.items():
        arrays[name] = _to_array(values)
    return arrays, labels


def _name_by_position(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return inputs by the names "0", "1", ..., which the network's `forward` receives as positional arguments."""
    return {str(position): values for position, values in enumerate(inputs)}


def _read_sample(item: Any) -> tuple[Any, Any]:
    """Return a sample (a mapping for several inputs) and the label."""
    if not isinstance(item, Mapping):
        sample, label = item
        if isinstance(sample, tuple):
            sample = _name_by_position(sample)
        return sample, label
    for name in ("labels", "label"):
        if name in item:
            inputs = dict(item)
            label = inputs.pop(name)
            return inputs, label
    raise ValueError(
        f"a sample has the keys {', '.join(item)}: add 'label' or 'labels'"
    )


def _stack_inputs(samples: Sequence[Any], padding: int) -> StoredSamples:
    """Stack samples like `_stack_samples`, into one array for each of several inputs."""
    if not isinstance(samples[0], Mapping):
        return _stack_samples(samples, padding)
    arrays = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        arrays[name] = _stack_samples(values, padding)
    return _unwrap_single(arrays)


def _unwrap_single(inputs: dict[str, npt.NDArray[Any]]) -> StoredSamples:
    """Return the array of a single input, or the mapping of several inputs."""
    return inputs if len(inputs) > 1 else next(iter(inputs.values()))


def _stack_samples(samples: Sequence[Any], padding: int) -> npt.NDArray[Any]:
    """Stack samples or labels to (samples, ...), extending shorter first axes with ``padding``."""
    arrays = [_to_array(sample) for sample in samples]
    longest = 0
    for array in arrays:
        if array.ndim:
            longest = max(longest, len(array))
    padded = []
    for array in arrays:
        if array.ndim and len(array) < longest:
            # (before, after) of each axis: only the end of the first axis is padded.
            widths = [(0, 0)] * array.ndim
            widths[0] = (0, longest - len(array))
            array = np.pad(array, widths, constant_values=padding)
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
            return _StoredSet(train, _test_pair(path, arrays, test_names))
    # Other names are those of several inputs.
    inputs = _inputs_of(arrays, "train_")
    labels = inputs.pop("labels", None)
    test_inputs = _inputs_of(arrays, "test_")
    test_labels = test_inputs.pop("labels", None)
    if not inputs or labels is None:
        names = ", ".join(arrays) or "(none)"
        text = f"{path} has the arrays {names}: name them train_images and train_labels, or x_train and y_train"
        raise InputError(text, _PATH)
    if bool(test_inputs) != (test_labels is not None):
        raise InputError(
            f"{path} has test samples without labels, or labels without samples: give both or neither",
            _PATH,
        )
    test = None if test_labels is None else (test_inputs, test_labels)
    return _StoredSet((inputs, labels), test)


def _test_pair(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], names: tuple[str, str]
) -> StoredPair | None:
    """Return the test samples and test labels with these names; None if both are missing."""
    samples_name, labels_name = names
    samples = arrays.get(samples_name)
    labels = arrays.get(labels_name)
    if samples is not None and labels is not None:
        return samples, labels
    if samples is None and labels is None:
        return None
    raise InputError(
        f"{path} has one of {samples_name} and {labels_name}: add the other, or remove both",
        _PATH,
    )


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


def _from_hugging_face(data_part: DataPart, path: Path) -> _StoredSet:
    """Read data saved by the library `datasets`; each column other than the labels is an input of the samples."""
    library = require_extra(
        "datasets", "datasets", f"{path}: a data set of Hugging Face", _PATH
    )
    try:
        saved = library.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read by `datasets`: {error}", _PATH
        ) from None
    # `datasets` calls the training, validation and test samples splits.
    splits = saved if isinstance(saved, Mapping) else {"train": saved}
    if "train" not in splits:
        raise InputError(
            f"{path} has the splits {', '.join(splits)}: one must be named train", _PATH
        )
    train = _read_columns(data_part, splits["train"], path)
    for name in ("test", "validation"):
        if name in splits:
            return _StoredSet(train, _read_columns(data_part, splits[name], path))
    return _StoredSet(train)


def _read_columns(data_part: DataPart, rows: Any, path: Path) -> StoredPair:
    """Return the columns of the samples and of the labels from a data set of Hugging Face."""
    label, chosen = _choose_columns(data_part, list(rows.column_names), path)
    inputs = {}
    try:
        for name in chosen:
            inputs[name] = _stack_samples(rows[name], padding=0)
        labels = _stack_samples(rows[label], padding=IGNORED)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: samples must be numbers: name their `columns`: {error}", _PATH
        ) from None
    return _unwrap_single(inputs), labels


def _choose_columns(
    data_part: DataPart, names: Sequence[str], path: Path
) -> tuple[str, Sequence[str]]:
    """Return the column of the labels and the columns of a sample; raises `InputError` for unknown columns.

    Without keys in the scenario, the labels are called "label" or "labels", and all other columns form a sample.
    """
    has_plural = "labels" in names and "label" not in names
    label = data_part.label or ("labels" if has_plural else "label")
    if isinstance(data_part.columns, Mapping):
        raise InputError(
            "columns of such a data set are inputs by their own names: write a list",
            ("data", "columns"),
        )
    chosen = data_part.columns or [name for name in names if name != label]
    for name in (label, *chosen):
        if name not in names:
            key = "label" if name == label else "columns"
            raise InputError(
                f"{path} has no column {name}: available are {', '.join(names)}",
                ("data", key),
            )
    return label, chosen


# Readers of arrays


def _from_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an .npz file by name."""
    if not zipfile.is_zipfile(path):
        # numpy would regard the file as a pickle, and its error would advise to unpickle it.
        raise InputError(
            f"{path} is not an .npz file: write it with numpy.savez", _PATH
        )
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _from_npy_folder(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Memory-map the arrays of a folder, which may be larger than memory."""
    arrays = {}
    for file in path.glob("*.npy"):
        arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    return arrays


def _from_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .safetensors file by name."""
    arrays = {}
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping, cannot be iterated
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
        # numpy lacks some types of safetensors, such as bfloat16.
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
            # Reading a pickle runs code of its author.
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
    # The training images define the classes and their numbers.
    unknown = set(_class_folders(test)) - set(classes)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise InputError(
            f"{test}: the classes {names} have no training images: add some to {train}, or remove these folders",
            _PATH,
        )
    train_samples = _read_pictures(train, classes, size)
    return _StoredSet(train_samples, _read_pictures(test, classes, size))


def _class_folders(folder: Path) -> list[str]:
    """Return the names of the classes in alphabetical order; raises `InputError` for a class without images."""
    names = []
    for entry in folder.iterdir():
        # Tools create hidden folders, such as .ipynb_checkpoints.
        if entry.is_dir() and not entry.name.startswith("."):
            names.append(entry.name)
    if not names:
        raise InputError(
            f"{folder} contains no folders: put the images of each class into a folder named after the class",
            _PATH,
        )
    # Classes are numbered in this order, and file systems list folders in different orders.
    names.sort()
    empty = [name for name in names if not _picture_files(folder / name)]
    if empty:
        raise InputError(
            f"{folder}: no images of {', '.join(empty)}: add some or remove the folder",
            _PATH,
        )
    return names


def _picture_files(folder: Path) -> list[Path]:
    # Samples are numbered in this order, and file systems list files in different orders.
    files = sorted(folder.glob("*"))
    return [file for file in files if file.suffix.lower() in _PICTURE_SUFFIXES]


def _read_pictures(folder: Path, classes: list[str], size: str | None) -> StoredPair:
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
            raise InputError(
                f"{file} has {picture.height}x{picture.width} pixels, others {shape[1]}x{shape[2]}: write "
                "`size: HEIGHTxWIDTH`, and all images are fitted into this size",
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
