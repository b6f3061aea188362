"""The user's own data: what a function in a Python file returns, ``.npz``, ``.safetensors``, tables, pictures.

Arrays are called ``train_images``, ``train_labels``, ``test_images`` and ``test_labels``, or ``x_train``, ``y_train``,
``x_test`` and ``y_test``. Nothing is unpickled.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from testbed.common import usercode
from testbed.common.errors import InputError, Key
from testbed.data import pictures, tables
from testbed.data.dataset import Dataset
from testbed.data.split import holdout, is_class
from testbed.workload import SplitPart

if TYPE_CHECKING:
    from testbed.workload import DataPart

Samples = tuple[npt.NDArray[Any], npt.NDArray[Any]]
IGNORED = -100
"""The label of a token that counts neither in torch's cross-entropy nor as an answer."""
_FILE: Key = ("data", "file")
_PATH: Key = ("data", "path")
_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}


def load(part: DataPart, place: Path, test_share: float) -> Dataset:
    """Return all samples of the file or folder ``place``; raises `InputError` saying what is wrong with them.

    Bytes are scaled to [0, 1], other values taken as they are: whole numbers stay whole (int64). ``test_share`` is kept
    for the test part where the data have none. What was read last is kept, until the file changes.
    """
    try:
        changed = max(each.stat().st_mtime_ns for each in (place, *(place.rglob("*") if place.is_dir() else ())))
    except OSError as error:
        key = _PATH if part.file is None else _FILE
        raise InputError(f"{place} cannot be read: {error.strerror}: paths are relative to the scenario", key) from None
    group = part.split.column if isinstance(part.split, SplitPart) else None
    kept = part.model_copy(update={"train": None, "test": None, "split": "lead"})
    return _load(kept, place, changed, test_share, group)


@lru_cache(maxsize=2)
def _load(part: DataPart, place: Path, changed: int, test_share: float, group: str | None) -> Dataset:
    key = _PATH if part.file is None else _FILE
    train, test, groups = _read(part, place, group)
    train = _checked(train, f"{place}: the training samples", key)
    if test is None:
        kept, left = holdout(train[1] if is_class(train[1]) else np.zeros(len(train[1]), np.int64), test_share)
        train, test = (train[0][kept], train[1][kept]), (train[0][left], train[1][left])
        groups = None if groups is None else groups[kept]
    else:
        test = _checked(test, f"{place}: the test samples", key)
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = f"training samples are of {train[0].shape[1:]}, test samples of {test[0].shape[1:]}"
        text = f"{place}: {shapes}: give both one shape"
        raise InputError(text, key)
    if train[0].dtype != test[0].dtype:
        train, test = ((samples.astype(np.float32), labels) for samples, labels in (train, test))
    if train[1].dtype != test[1].dtype or train[1].shape[1:] != test[1].shape[1:]:
        raise InputError(f"{place}: training and test labels differ in shape or type: give both the same", key)
    if train[1].dtype.kind == "f":
        return replace(Dataset(part.name, math.prod(train[1].shape[1:]), *train, *test), groups=groups)
    classes = 1 + int(max(train[1].max(initial=0), test[1].max(initial=0)))
    if is_class(train[1]) and classes > (count := len(train[1]) + len(test[1])):
        raise InputError(f"{place}: labels up to {classes - 1} for {count} samples: number the classes from 0", key)
    return replace(Dataset(part.name, classes, *train, *test), groups=groups)


def _read(
    part: DataPart, place: Path, group: str | None
) -> tuple[Samples, Samples | None, npt.NDArray[np.int64] | None]:
    """Return training and test samples as they lie in a file or folder, and which values split the former."""
    if part.size is not None and not place.is_dir():
        raise InputError("fits pictures of a folder into one size: leave it out", ("data", "size"))
    if part.file is None and place.suffix in tables.SUFFIXES:
        table = tables.read(place, part.label, part.columns, group)
        return (table.samples, table.labels), None, table.groups
    if part.label or part.columns:
        raise InputError("names a column of a table, and this is no .csv or .parquet", ("data", "label"))
    if part.file is not None:
        return *_from_function(part, place), None
    return *(_from_folders(place, part.size) if place.is_dir() else _from_arrays(place)), None


def _checked(samples: Samples, what: str, key: Key) -> Samples:
    """Return samples and labels, (samples, ...) both, as every data set has them: of float32 or int64."""
    values, labels = samples
    if values.ndim < 1 or labels.ndim < 1 or len(values) != len(labels) or not len(values):
        counts = ["no array of" if not each.ndim else str(len(each)) for each in samples]
        raise InputError(f"{what}: {counts[0]} samples and {counts[1]} labels: give each sample one label", key)
    if values.ndim < 2 or values.dtype.kind not in "uifb":
        is_ = f"an array {values.shape} of {values.dtype}"
        text = f"{what}: {is_}: give numbers of (samples, ...), such as (samples, 3, 32, 32)"
        raise InputError(text, key)
    if values.ndim == 4 and values.shape[-1] in (1, 3, 4) and values.shape[1] == values.shape[2] > 4:
        text = f"{what}: {values.shape} has the colours last, and torch has them first: numpy.moveaxis(samples, -1, 1)"
        raise InputError(text, key)
    least = -np.inf if labels.dtype.kind == "f" else 0 if labels.ndim == 1 else IGNORED
    if labels.dtype.kind not in "uif" or labels.min() < least or not np.isfinite(labels).all():
        is_ = f"labels {labels.shape} of {labels.dtype}"
        text = f"{what}: {is_}: give whole numbers from 0 for classes, or finite numbers of float32 for what is learned"
        raise InputError(text, key)
    with np.errstate(over="ignore"):
        scaled = values.astype(np.float32)
    if values.dtype == np.uint8:
        scaled /= 255
    if not np.isfinite(scaled).all():
        raise InputError(f"{what}: hold values that are no finite numbers of float32: mend or leave them out", key)
    whole = values.dtype.kind in "ui" and values.dtype != np.uint8
    return (
        values.astype(np.int64) if whole else scaled,
        labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64),
    )


def _from_function(part: DataPart, place: Path) -> tuple[Samples, Samples | None]:
    """Call the user's function: it returns train and test, each a pair of arrays or a torch data set; None: no test."""
    code = usercode.read(place, part.name, _FILE)
    found = usercode.call(code, _FILE)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise InputError(f"{place}: {part.name} returned {type(found).__name__}: return (train, test)", _FILE)
    train, test = (None if each is None else _pair(each, f"{place}: {part.name}") for each in found)
    if train is None:
        raise InputError(f"{place}: {part.name} returned no training samples: return (train, test)", _FILE)
    return train, test


def _pair(part: Any, where: str) -> Samples:
    """Return one part of a set as arrays: a pair of them, or of whatever has a length and pairs by number."""
    if isinstance(part, tuple) and len(part) == 2:
        samples, labels = part
    else:
        try:
            pairs = [part[number] for number in range(len(part))]
            samples, labels = [_array(sample) for sample, _ in pairs], [_array(label) for _, label in pairs]
        except (TypeError, ValueError, KeyError) as error:
            text = f"{where}: each of train and test has to be (samples, labels), or a data set of such pairs: {error}"
            raise InputError(text, _FILE) from None
    try:
        return _array(samples), _array(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{where}: samples and labels have to be arrays, each sample of one shape: {error}", _FILE
        ) from None


def _array(values: Any) -> npt.NDArray[Any]:
    """Return an array; a picture of Pillow's has its channels first, as torch wants them."""
    if hasattr(values, "detach"):
        values = values.detach()
    array = np.asarray(values)
    if hasattr(values, "getbands"):
        return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array


def _from_arrays(place: Path) -> tuple[Samples, Samples | None]:
    arrays = _arrays(place)
    for train_images, train_labels, test_images, test_labels in _NAMES:
        if train_images in arrays and train_labels in arrays:
            train = arrays[train_images], arrays[train_labels]
            if test_images in arrays and test_labels in arrays:
                return train, (arrays[test_images], arrays[test_labels])
            if test_images in arrays or test_labels in arrays:
                raise InputError(f"{place} holds one of {test_images} and {test_labels}: it needs both or none", _PATH)
            return train, None
    wanted = " or ".join(f"{names[0]} and {names[1]}" for names in _NAMES)
    raise InputError(f"{place} holds {', '.join(arrays) or 'nothing'}: it needs {wanted}", _PATH)


def _arrays(place: Path) -> Mapping[str, npt.NDArray[Any]]:
    try:
        if place.suffix == ".npz":
            if not zipfile.is_zipfile(place):  # else numpy advises to unpickle it
                raise InputError(f"{place} is no .npz file: write it by numpy.savez", _PATH)
            with np.load(place, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if place.suffix == ".safetensors":
            with safe_open(place, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except TypeError as error:  # a type that numpy lacks
        raise InputError(f"{place}: cannot be read: {error}: write it as float32", _PATH) from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, SafetensorError) as error:
        unpickled = "holds Python objects, and nothing is unpickled: write arrays of numbers"
        text = unpickled if "pickle" in str(error) else f"cannot be read: {error}"
        raise InputError(f"{place}: {text}", _PATH) from None
    raise InputError(
        f"{place}: is neither .npz, .safetensors, .csv nor .parquet, nor a folder with one of images for each class",
        _PATH,
    )


def _from_folders(place: Path, size: str | None) -> tuple[Samples, Samples | None]:
    """Read pictures in a folder for each class, itself in ``train`` and ``test`` where there are these two."""
    if (place / "train").is_dir() and (place / "test").is_dir():
        classes = _classes(place / "train")
        if unlike := set(_classes(place / "test")) - set(classes):
            raise InputError(f"{place / 'test'}: there are no training images of {', '.join(sorted(unlike))}", _PATH)
        return _pictures(place / "train", classes, size), _pictures(place / "test", classes, size)
    return _pictures(place, _classes(place), size), None


def _classes(folder: Path) -> list[str]:
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not names:
        raise InputError(f"{folder} holds no folders: put the images of each class into one, named by the class", _PATH)
    if empty := [name for name in names if not _files(folder / name)]:
        raise InputError(f"{folder}: there are no images of {', '.join(empty)}: add some or remove the folder", _PATH)
    return names


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*")) if file.suffix.lower() in _PICTURES]


def _pictures(folder: Path, classes: list[str], size: str | None) -> Samples:
    found = [
        (file, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in _files(folder / name)
    ]
    shape: tuple[int, int, int] | None = None
    if size is not None:
        height, width = (int(each) for each in size.split("x"))
        shape = (3, height, width)
    images = []
    for file, _ in found:
        try:
            picture = pictures.read(file)
        except InputError as error:
            raise InputError(error.text, _PATH) from None
        shape = shape or (3, picture.height, picture.width)
        if size is None and (picture.height, picture.width) != shape[1:]:
            here = f"{picture.height}x{picture.width}, others of {shape[1]}x{shape[2]}"
            raise InputError(f"{file} is of {here}: write `size: HEIGHTxWIDTH`, and all are fitted into it", _PATH)
        images.append(pictures.letterbox(picture, shape))
    return np.stack(images), np.asarray([label for _, label in found])
