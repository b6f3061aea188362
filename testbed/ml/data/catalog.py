"""The catalogue of data sets, and `load`, which reads a set of the catalogue or of the user.

Most sets are files in a folder. ``synthetic`` sets are computed, ``digits`` are embedded, photographs come from
scikit-learn or a file, and the user's own sets are read by `testbed.ml.data.own`.

Nothing here downloads files: `testbed.ml.data.fetch` does so for the command `testbed setup data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from testbed.common import plugins
from testbed.common.errors import InputError, Key, nearest
from testbed.common.lazy import np, npt
from testbed.ml.data import files, own, pictures, synthetic, tables
from testbed.ml.data.dataset import Dataset
from testbed.ml.data.files import Bytes
from testbed.ml.data.split import holdout
from testbed.ml.fields import Fields, InputSpec
from testbed.ml.workload import DataPart

Samples = tuple[Bytes, Bytes]
"""Images and labels as stored in the files, (samples, channels, height, width) and (samples,)."""
LARGE_DIGITS = "digits-28"
"""Name of the digits enlarged to MNIST's size."""
DIGITS = ("digits", LARGE_DIGITS)
"""Names of the sets that are stored in this package."""
DIGITS_TRAIN = 1438
"""Number of training samples of `DIGITS`, four fifths of 1,797, as a constant: checks then need not read the file."""
TEST_SHARE = 0.2
"""Share of the samples used for tests if a set has no test samples."""
DATA_FOLDER = Path("data")
"""Parent of the folders created by `testbed setup data`; searched if a scenario gives no folder."""
SYSTEM_DATA_FOLDER = Path("/usr/share/datasets")
"""Folder of Debian's data packages, such as dataset-fashion-mnist; searched next."""


def data_place(name: str) -> Path:
    """Return the default folder of a set: the first existing one, or the one to create."""
    own_folder = DATA_FOLDER / name
    for place in (own_folder, SYSTEM_DATA_FOLDER / name):
        if place.is_dir():
            return place
    return own_folder


@dataclass(frozen=True)
class Remote:
    """A file to download: addresses, checksum, and the members to keep of an archive."""

    name: str
    bases: tuple[str, ...]
    """Addresses of the folder that holds the file, tried in this order."""
    md5: str
    members: tuple[str, ...] = ()
    """Names of the files to extract; empty keeps the downloaded file itself."""


@dataclass(frozen=True)
class DataSource:
    """One data set of the catalogue."""

    name: str
    summary: str
    shape: tuple[int, ...]
    """(channels, height, width) of one image; user data may have any shape."""
    classes: int
    """Number of classes; 0 for a set without labels."""
    files: tuple[str, ...] = ()
    """Files of the set, each plain or with ``.gz``; empty for sets without a folder."""
    remotes: tuple[Remote, ...] = ()
    """Downloads from which `testbed setup data` creates the files."""
    read: Callable[[DataSource, Path], tuple[str, Samples, Samples]] | None = None
    """Function of the source and a folder: returns the name of the data read, training and test samples. None for
    ``synthetic`` sets, which `load` generates."""
    from_path: bool = False
    """Whether the scenario names the set's single file."""
    integers: bool = False
    """Whether samples are integers, such as tokens."""
    fields: Fields = ()
    """The inputs of a sample, if there are several."""

    @property
    def input_spec(self) -> InputSpec:
        """The input of a network trained on the set."""
        return InputSpec(self.shape, self.integers, self.fields)


def _required_files(source: DataSource, *folders: Path) -> list[Path]:
    """Return the files of a set, each from the first folder containing it; raises `InputError` for missing files."""
    paths = []
    missing = []
    for name in source.files:
        path = _find_first(name, folders)
        if path is None:
            missing.append(name)
        else:
            paths.append(path)
    if missing:
        raise InputError(
            f"{folders[0]}: {source.name} needs {', '.join(missing)} in this folder (plain or .gz); "
            f"`testbed setup data {source.name}` downloads what is missing"
        )
    return paths


def _find_first(name: str, folders: Sequence[Path]) -> Path | None:
    """Return a file from the first folder containing the file; None if all folders lack the file."""
    for folder in folders:
        path = files.find(folder, name)
        if path is not None:
            return path
    return None


def _hold_out_tests(samples: Samples) -> tuple[Samples, Samples]:
    """Divide the samples of a set without test samples into training and test samples."""
    images, labels = samples
    train_indices, test_indices = holdout(labels.astype(np.int64), TEST_SHARE)
    train = (images[train_indices], labels[train_indices])
    test = (images[test_indices], labels[test_indices])
    return train, test


# Readers of sets, for `DataSource.read`


def _read_mnist(source: DataSource, folder: Path) -> tuple[str, Samples, Samples]:
    """Read MNIST or a set in the same files; a folder with the test files alone is a smaller set with another name."""

    def read_pair(images: Path, labels: Path) -> Samples:
        height, width = source.shape[1:]
        return files.read_idx_pair(images, labels, (height, width), source.classes)

    train_images, train_labels, test_images, test_labels = (
        files.find(folder, name) for name in source.files
    )
    has_train_files = train_images is not None or train_labels is not None
    if not has_train_files and test_images is not None and test_labels is not None:
        # Users may copy the test files alone, a seventh of the download. Results then name the smaller set.
        samples = read_pair(test_images, test_labels)
        return f"{source.name}-t10k", *_hold_out_tests(samples)
    paths = _required_files(source, folder)
    train = read_pair(*paths[:2])
    test = read_pair(*paths[2:])
    return source.name, train, test


def _read_emnist(source: DataSource, folder: Path) -> tuple[str, Samples, Samples]:
    """Read a split of EMNIST; raises `InputError` for labels outside the split's classes."""
    # EMNIST numbers letters from 1.
    first_label = 1 if source.name == "emnist-letters" else 0

    def read_pair(images: Path, labels: Path) -> Samples:
        pixels, targets = files.read_idx_pair(
            images, labels, (28, 28), source.classes + first_label
        )
        if targets.min() < first_label:
            raise InputError(
                f"{labels}: label {targets.min()}, but the classes are numbered from {first_label}"
            )
        # EMNIST stores its images column by column, so height and width are exchanged.
        return pixels.transpose(0, 1, 3, 2), targets - np.uint8(first_label)

    paths = _required_files(source, folder)
    train = read_pair(*paths[:2])
    test = read_pair(*paths[2:])
    return source.name, train, test


def _read_cifar10(source: DataSource, folder: Path) -> tuple[str, Samples, Samples]:
    """Read CIFAR-10's binary version: five files of training samples, and one of test samples."""
    # The archive has its files in a folder of this name.
    unpacked = folder / "cifar-10-batches-bin"
    *train, test = _required_files(source, folder, unpacked)
    return source.name, files.read_cifar(train), files.read_cifar([test])


@cache
def _digits_table() -> npt.NDArray[np.uint8]:
    """Return a row for each digit: 64 grey levels up to 16, then the class.

    The file is the test part of the UCI set "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998,
    CC BY 4.0), as scikit-learn's `load_digits` has it.
    """
    table = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return table.astype(np.uint8)


def _read_digits(source: DataSource, folder: Path) -> tuple[str, Samples, Samples]:
    """Read the embedded digits, of 8x8 pixels or enlarged to MNIST's 28x28."""
    table = _digits_table()
    levels = table[:, :-1].reshape(-1, 1, 8, 8)
    labels = table[:, -1].copy()
    # Levels 0 to 16 are scaled to the range of a byte, which the other sets have.
    images = np.round(levels * (255 / 16)).astype(np.uint8)
    if source.name == LARGE_DIGITS:
        # MNIST's 28 pixels are 3 x 8 and a border of 2 at each edge.
        enlarged = images.repeat(3, axis=2).repeat(3, axis=3)
        no_border = (0, 0)
        border = (2, 2)
        images = np.pad(enlarged, (no_border, no_border, border, border))
    return source.name, *_hold_out_tests((images, labels))


def _read_pictures(source: DataSource, path: Path) -> tuple[str, Samples, Samples]:
    """Read photographs as test samples with the label 0: without labels, training is impossible."""
    photographs = [pictures.read(path)] if source.from_path else pictures.photos()
    fitted = []
    for picture in photographs:
        fitted.append(pictures.letterbox(picture, source.shape))
    images = np.stack(fitted)
    labels = np.zeros(len(images), dtype=np.uint8)
    no_samples = (images[:0], labels[:0])
    return source.name, no_samples, (images, labels)


_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Files of MNIST, and of Fashion-MNIST under the same names."""


def _mnist_remotes(
    bases: tuple[str, ...], md5s: tuple[str, str, str, str]
) -> tuple[Remote, ...]:
    """Return the downloads of `_MNIST_FILES`, from their checksums in the same order."""
    remotes = []
    for name, md5 in zip(_MNIST_FILES, md5s, strict=True):
        remotes.append(Remote(f"{name}.gz", bases, md5))
    return tuple(remotes)


def _emnist_source(name: str, split: str, summary: str, classes: int) -> DataSource:
    """Return a split of EMNIST; all splits are in one archive."""
    parts = (
        "train-images-idx3",
        "train-labels-idx1",
        "test-images-idx3",
        "test-labels-idx1",
    )
    names = tuple(f"emnist-{split}-{part}-ubyte" for part in parts)
    archive = Remote(
        "gzip.zip",
        bases=("https://biometrics.nist.gov/cs_links/EMNIST/",),
        md5="58c8d27c78d21e728a6bc7b3cc06412e",
        members=tuple(f"{file}.gz" for file in names),
    )
    return DataSource(
        name,
        summary,
        shape=(1, 28, 28),
        classes=classes,
        files=names,
        remotes=(archive,),
        read=_read_emnist,
    )


_CIFAR_FILES = (
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
)
"""Five files of training samples, then the file of the test samples."""

DATASETS: dict[str, DataSource] = {
    source.name: source
    for source in (
        DataSource(
            "digits",
            "1,797 handwritten digits of 8x8, from scikit-learn",
            shape=(1, 8, 8),
            classes=10,
            read=_read_digits,
        ),
        DataSource(
            LARGE_DIGITS,
            "the same, three times as large in a frame of 2: 28x28 as MNIST",
            shape=(1, 28, 28),
            classes=10,
            read=_read_digits,
        ),
        DataSource(
            "mnist",
            "70,000 handwritten digits of 28x28",
            shape=(1, 28, 28),
            classes=10,
            files=_MNIST_FILES,
            remotes=_mnist_remotes(
                bases=(
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "http://yann.lecun.com/exdb/mnist/",
                ),
                md5s=(
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
            ),
            read=_read_mnist,
        ),
        DataSource(
            "fashion-mnist",
            "70,000 articles of clothing of 28x28",
            shape=(1, 28, 28),
            classes=10,
            files=_MNIST_FILES,
            remotes=_mnist_remotes(
                bases=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
                md5s=(
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            read=_read_mnist,
        ),
        _emnist_source(
            "emnist",
            split="balanced",
            summary="131,600 letters and digits of 28x28, equally many of each of 47 classes",
            classes=47,
        ),
        _emnist_source(
            "emnist-letters",
            split="letters",
            summary="145,600 letters of 28x28, large and small as one class",
            classes=26,
        ),
        _emnist_source(
            "emnist-digits",
            split="digits",
            summary="280,000 handwritten digits of 28x28",
            classes=10,
        ),
        DataSource(
            "cifar10",
            "60,000 colour photographs of 32x32",
            shape=(3, 32, 32),
            classes=10,
            files=_CIFAR_FILES,
            remotes=(
                Remote(
                    "cifar-10-binary.tar.gz",
                    bases=("https://www.cs.toronto.edu/~kriz/",),
                    md5="c32a1d4ab5d03f1284b67883e8d87530",
                    members=_CIFAR_FILES,
                ),
            ),
            read=_read_cifar10,
        ),
        DataSource(
            "photos",
            "two photographs, from scikit-learn; photos-HxW of any size",
            shape=(3, *pictures.SIZE),
            classes=0,
            read=_read_pictures,
        ),
        DataSource(
            "image",
            "a picture of your own, its file named by `path`; image-HxW of any size",
            shape=(3, *pictures.SIZE),
            classes=0,
            read=_read_pictures,
            from_path=True,
        ),
        DataSource(
            "synthetic",
            "made up: synthetic-CxHxW[-CLASSES] of any size, prototypes and noise",
            shape=(1, 8, 8),
            classes=10,
        ),
    )
}


def describe(name: str) -> DataSource:
    """Describe a set without reading any file; raises `InputError` for an unknown name.

    >>> describe("synthetic-3x32x32-100").shape
    (3, 32, 32)
    """
    if name in DATASETS:
        return DATASETS[name]
    if pictures.is_picture(name):
        kind, shape = pictures.parse(name)
        return replace(DATASETS[kind], name=name, shape=shape)
    if name.startswith("synthetic"):
        synthetic_shape, classes = synthetic.parse(name)
        summary = DATASETS["synthetic"].summary
        return DataSource(name, summary, synthetic_shape, classes)
    packaged = plugins.find(own.ENTRY_POINTS, name, ("data", "name"))
    if isinstance(packaged, DataSource):
        return replace(packaged, name=name)
    if callable(packaged):
        # Only a call of the function shows shape and classes: see `describe_part`.
        summary = plugins.summarize(packaged)
        return DataSource(name, summary, shape=(), classes=0)
    if packaged is not None:
        raise InputError(
            f"the package's data set '{name}' must be a DataSource or a function",
            ("data", "name"),
        )
    raise InputError(
        f"unknown data set '{name}': {nearest(name, list_names())}", ("data", "name")
    )


def list_names() -> list[str]:
    """Return the names of all data sets; data sets of installed packages come last."""
    return list({**DATASETS, **plugins.installed(own.ENTRY_POINTS)})


def part_of(text: str) -> DataPart:
    """Return the data named on a command line: a set, a file or folder, FILE.py:FUNCTION or TABLE:LABEL.

    >>> part_of("own.py:load").file
    'own.py'
    >>> part_of("mnist").name
    'mnist'
    """
    # A name after a colon is a function of a Python file, or the label column of a table.
    file, _, name = text.rpartition(":")
    if file.endswith(".py"):
        return DataPart(file=file, name=name)
    if file.endswith(tables.SUFFIXES):
        return DataPart(path=file, label=name)
    if Path(text).suffix or Path(text).is_dir():
        return DataPart(path=text)
    return DataPart(name=text)


def is_own(part: DataPart) -> bool:
    """Return whether the samples come from the user or a package's function instead of the catalogue."""
    if part.file is not None:
        return True
    if part.name in DATASETS or pictures.is_picture(part.name):
        return False
    if part.path is not None:
        return True
    return not part.name.startswith("synthetic") and own.is_packaged(part)


def describe_part(part: DataPart, path: Path) -> DataSource:
    """Describe the data of a scenario; raises `InputError`.

    Reads the user's own data, whose shape and classes are unknown otherwise.
    """
    if not is_own(part):
        return describe(part.name)
    dataset = own.load(part, path, TEST_SHARE)
    return DataSource(
        part.name,
        "",
        dataset.shape,
        dataset.classes,
        integers=dataset.integers,
        fields=dataset.fields,
    )


def train_labels(part: DataPart, folder: Path) -> npt.NDArray[Any]:
    """Return the labels of a scenario's training samples, (samples, ...); raises `InputError` like `load`."""
    if is_own(part):
        return _limit_samples(own.load(part, folder, TEST_SHARE), part).train_labels
    source = describe(part.name)
    if source.read is None:
        return synthetic.train_labels(part.name, part.train)
    name, train, _ = source.read(source, folder)
    _, labels = train
    _check_limit(name, "train", len(labels), part.train)
    return labels[: part.train].astype(np.int64)


def train_groups(part: DataPart, folder: Path) -> npt.NDArray[np.int64] | None:
    """Return a number for each value of the column by which a scenario splits the training samples, (samples,).

    None for a split by other rules; raises `InputError`.
    """
    if not is_own(part):
        return None
    return _limit_samples(own.load(part, folder, TEST_SHARE), part).groups


def known_samples(part: DataPart) -> int | None:
    """Return the number of training samples of a scenario; None if only the data files show the number.

    >>> known_samples(DataPart(name="digits"))
    1438
    """
    if part.train is not None:
        return part.train
    if part.name.startswith("synthetic"):
        return synthetic.TRAIN
    return DIGITS_TRAIN if part.name in DIGITS else None


def problems(part: DataPart, path: Path) -> Iterator[tuple[Key, str]]:
    """Yield (key, problem) for the files of a catalogue set and for the number of requested samples.

    The keys are relative to ``workload.data``. ``path`` is the folder or the file of the set. Samples are not read.
    Raises `InputError` for an unknown name.
    """
    source = describe(part.name)
    if source.files:
        yield from _folder_problems(source, part.name, path)
    elif source.from_path and part.path is not None and not path.is_file():
        yield (
            ("path",),
            f"{path} not found: give the path of an image, relative to the scenario file",
        )
    if part.name in DIGITS and part.train is not None and part.train > DIGITS_TRAIN:
        yield (
            ("train",),
            f"{part.name} has {DIGITS_TRAIN} training samples, not {part.train}: use fewer",
        )


def _folder_problems(
    source: DataSource, name: str, folder: Path
) -> Iterator[tuple[Key, str]]:
    """Yield (key, problem) for the folder of a catalogue set; only headers of files are read."""
    found = [files.find(folder, file) for file in source.files]
    present = [path for path in found if path is not None]
    download = f"`testbed setup data {name}` downloads them"
    if not folder.is_dir():
        yield (
            ("folder",),
            f"{name} is read from files, but the folder {folder} does not exist: {download}",
        )
    elif not present:
        yield ("folder",), f"{folder} contains no file of {name}: {download}"
    for file in present:
        # Only IDX files of images declare the size of an image.
        if "-images-" not in file.name:
            continue
        try:
            files.check_images(file, source.shape[1:])
        except InputError as error:
            yield ("folder",), str(error)


def load(part: DataPart, folder: Path | None = None, *, blank: bool = False) -> Dataset:
    """Read the set named by a scenario, with files from ``folder`` (``part.folder`` if None).

    For a set stored in one file, ``folder`` is that file (``part.path`` if None). With ``blank``, images are black and
    only labels are read.

    Raises `InputError` for an unknown name, missing or damaged files, and too few samples.

    >>> digits = load(DataPart(name="digits", train=100))
    >>> digits.train_images.shape, digits.classes
    ((100, 1, 8, 8), 10)
    """
    if is_own(part):
        own_path = folder or Path(part.path or part.file or "")
        dataset = _limit_samples(own.load(part, own_path, TEST_SHARE), part)
        return dataset.blank() if blank else dataset
    source = describe(part.name)
    if source.read is None:
        return synthetic.make(part.name, part.train, part.test, blank=blank)
    path = _data_path(source, part, folder)
    name, train, test = source.read(source, path)
    train_images, train_labels = _take_first(name, "train", train, part.train)
    test_images, test_labels = _take_first(name, "test", test, part.test)
    dataset = Dataset(
        name, source.classes, train_images, train_labels, test_images, test_labels
    )
    return dataset.blank() if blank else dataset


def _data_path(source: DataSource, part: DataPart, folder: Path | None) -> Path:
    """Return the file or folder to read; raises `InputError` for a missing folder."""
    if not source.files:
        named = part.path if source.from_path else None
        return folder or Path(named or "")
    download = f"`testbed setup data {part.name}`"
    if folder is None and part.folder:
        folder = Path(part.folder)
    if folder is None:
        text = f"{part.name} is read from files: give their folder; {download} downloads them"
        raise InputError(text, ("data", "folder"))
    if not folder.is_dir():
        raise InputError(
            f"the folder {folder} does not exist; {download} creates it",
            ("data", "folder"),
        )
    return folder


def _limit_samples(dataset: Dataset, part: DataPart) -> Dataset:
    """Return a set reduced to the first samples, as many as a scenario uses."""
    _check_limit(part.name, "train", len(dataset.train_labels), part.train)
    _check_limit(part.name, "test", len(dataset.test_labels), part.test)
    # `slice(None)`, without a limit, selects all samples.
    train = slice(part.train)
    test = slice(part.test)
    return replace(
        dataset,
        train_images=dataset.train_images[train],
        train_labels=dataset.train_labels[train],
        groups=None if dataset.groups is None else dataset.groups[train],
        test_images=dataset.test_images[test],
        test_labels=dataset.test_labels[test],
    )


def _take_first(
    name: str,
    limit_key: str,
    samples: Samples,
    limit: int | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the first ``limit`` samples, with pixels scaled to [0, 1]; arguments as of `_check_limit`."""
    images, labels = samples
    _check_limit(name, limit_key, len(images), limit)
    # The limit first: a float takes four times the memory of a byte.
    scaled = images[:limit].astype(np.float32)
    scaled /= 255
    return scaled, labels[:limit].astype(np.int64)


def _check_limit(name: str, limit_key: str, samples: int, limit: int | None) -> None:
    """Raise `InputError` if the limit of a scenario exceeds the available number of samples.

    ``limit_key`` is the limit's key below `data`: "train" for training samples, "test" for test samples.
    """
    kind = "training" if limit_key == "train" else "test"
    if limit is not None and limit > samples:
        raise InputError(
            f"{name} has {samples} {kind} samples, not {limit}: use fewer",
            ("data", limit_key),
        )
