"""Data sets of the catalogue: contents, file formats, damaged files, and limits on samples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import DATASETS, describe, load
from testbed.ml.data.batches import batch, steps_per_epoch
from testbed.ml.data.catalog import train_labels
from testbed.ml.workload import DataPart
from tests.testbed.ml.data.writers import (
    draw_images,
    encode_idx,
    write_cifar,
    write_mnist,
)


def data_part(name: str, **limits: int) -> DataPart:
    return DataPart(name=name, **limits)


def test_every_data_set_of_catalogue_is_described() -> None:
    for name, source in DATASETS.items():
        assert describe(name) is source
        assert source.summary
        # Data sets in files, and only these, have download addresses.
        assert bool(source.files) == bool(source.remotes)


# --------------------------------------------------------------------------------------------------------------- digits


def test_digits_28_are_digits_enlarged_threefold_in_frame() -> None:
    small = load(data_part("digits"))
    large = load(data_part("digits-28"))
    assert large.shape == (1, 28, 28)
    # 8 pixels of 3x3 are 24, with a frame of 2: every third pixel from 3 is a centre.
    centres = large.train_images[:, :, 3:26:3, 3:26:3]
    assert np.array_equal(centres, small.train_images)
    assert large.train_images[:, :, :2].max() == 0
    assert large.train_images[..., 26:].max() == 0
    assert np.array_equal(large.test_labels, small.test_labels)


def test_digits_equal_those_of_scikit_learn() -> None:
    # Imported here, since the import takes a second.
    from sklearn.datasets import load_digits

    digits = load(data_part("digits"))
    original = load_digits()
    images = np.concatenate([digits.train_images, digits.test_images])
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    # Pixels of scikit-learn are integers from 0 to 16.
    pixels = map(tuple, np.round(images.reshape(-1, 64) * 16))
    expected = zip(map(tuple, original.data), original.target, strict=True)
    assert sorted(zip(pixels, labels, strict=True)) == sorted(expected)


def test_digits_have_scaled_images_and_stratified_test_samples() -> None:
    digits = load(data_part("digits"))
    assert digits.name == "digits"
    assert digits.classes == 10
    assert digits.shape == (1, 8, 8)
    assert len(digits.train_labels) == 1438
    assert len(digits.test_labels) == 359
    assert digits.train_images.dtype == np.float32
    assert digits.train_labels.dtype == np.int64
    assert digits.train_images.min() == 0
    assert digits.train_images.max() == 1
    # A fifth of each class; results depend on this division, which must not change.
    counts = [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert np.bincount(digits.test_labels).tolist() == counts


def test_limited_digits_are_first_samples() -> None:
    digits = load(data_part("digits"))
    limited = load(data_part("digits", train=100, test=10))
    assert np.array_equal(limited.train_images, digits.train_images[:100])
    assert np.array_equal(limited.test_labels, digits.test_labels[:10])


def test_cnn_learns_digits() -> None:
    import torch

    from testbed.ml.models import create

    digits = load(data_part("digits"))
    network = create("cnn", {}, digits.shape, digits.classes).build(0, 6, seed=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    samples, batch_size, epochs = 1438, 64, 8
    for step in range(epochs * steps_per_epoch(samples, batch_size)):
        indices = batch(samples, batch_size, 1, step)
        images = torch.from_numpy(digits.train_images[indices])
        labels = torch.from_numpy(digits.train_labels[indices])
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        answers = network(torch.from_numpy(digits.test_images)).argmax(1).numpy()
    assert (answers == digits.test_labels).mean() >= 0.95


# ------------------------------------------------------------------------------------------------- mnist, emnist, cifar


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_files_are_read(tmp_path: Path, name: str, compressed: bool) -> None:
    write_mnist(tmp_path, compressed=compressed)
    data = load(data_part(name, train=5), tmp_path)
    assert data.name == name
    assert data.shape == (1, 28, 28)
    assert len(data.train_labels) == 5
    assert data.train_images[2, 0] * 255 == pytest.approx(draw_images(6)[2])
    assert data.test_labels.tolist() == [0, 1, 2, 3]


def test_folder_key_replaces_folder_argument(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert load(DataPart(name="mnist", folder=str(tmp_path))).name == "mnist"


def test_test_files_alone_are_divided_into_training_and_test(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=None, test=50)
    data = load(data_part("mnist"), tmp_path)
    assert data.name == "mnist-t10k"
    # Of five samples of each class, one is a test sample.
    assert np.bincount(data.train_labels).tolist() == [4] * 10
    assert np.bincount(data.test_labels).tolist() == [1] * 10
    images = np.concatenate([data.train_images, data.test_images])[:, 0] * 255
    # The sum of its pixels identifies an image whatever its position.
    sums = sorted(map(float, images.sum((1, 2))))
    expected = sorted(map(float, draw_images(50).sum((1, 2))))
    assert sums == pytest.approx(expected)


def test_emnist_images_are_transposed_and_labels_start_at_zero(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        prefix = f"emnist-letters-{part}"
        images = encode_idx(draw_images(count))
        labels = encode_idx(np.arange(1, count + 1))
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    data = load(data_part("emnist-letters"), tmp_path)
    assert data.train_labels.tolist() == [0, 1, 2]
    assert data.train_images[1, 0] * 255 == pytest.approx(draw_images(3)[1].T)


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar_files_are_read(tmp_path: Path, folder: str) -> None:
    write_cifar(tmp_path / folder)
    data = load(data_part("cifar10"), tmp_path)
    assert data.shape == (3, 32, 32)
    # Two records in each of five files.
    assert data.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # The test file is the sixth.
    assert (data.test_images[0, :, 5, 7] * 255).tolist() == pytest.approx([50, 1, 2])


# ------------------------------------------------------------------------------------------------------- rejected files

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            TRAIN_IMAGES,
            lambda content: content[:-1],
            "truncated: its header announces 6x28x28 bytes, 4703 follow",
        ),
        (
            TRAIN_IMAGES,
            lambda content: content + b"x",
            "too long: its header announces",
        ),
        (
            TRAIN_IMAGES,
            lambda content: content[:9],
            "truncated: 9 bytes are less than the header of 16",
        ),
        (
            TRAIN_IMAGES,
            lambda content: b"",
            "wrong magic number : an IDX file of this kind has 00000803",
        ),
        (
            TRAIN_LABELS,
            lambda content: encode_idx(draw_images(6)),
            "wrong magic number 00000803: .* has 00000801",
        ),
        (
            TRAIN_LABELS,
            lambda content: encode_idx(np.arange(5)),
            "5 labels for the 6 images of train-images-idx3-ubyte",
        ),
        (
            TRAIN_LABELS,
            lambda content: encode_idx(np.arange(6) + 9),
            "label 14, but there are 10 classes",
        ),
        (
            TRAIN_IMAGES,
            lambda content: encode_idx(np.zeros((6, 8, 8))),
            "has images of 8x8 pixels, not of 28x28",
        ),
    ],
    ids=[
        "truncated",
        "trailing-byte",
        "truncated-header",
        "empty",
        "images-as-labels",
        "missing-label",
        "unknown-class",
        "other-image-size",
    ],
)
def test_damaged_idx_file_is_rejected(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path, compressed=False)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"{name}: {message}"):
        load(data_part("mnist"), tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda content: content[: len(content) // 2],
            "truncated: the gzip stream ends early",
        ),
        (lambda content: b"plainly not gzip", "damaged gzip file"),
        (
            lambda content: content[:20] + b"\xff" * 40 + content[60:],
            "damaged gzip file",
        ),
    ],
    ids=["truncated", "other-format", "overwritten"],
)
def test_damaged_gzip_file_is_rejected(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"{TRAIN_IMAGES}.gz: {message}"):
        load(data_part("mnist"), tmp_path)


def test_truncated_cifar_file_is_rejected(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    # Two records of 3073 bytes, less five.
    message = r"data_batch_3.bin: truncated: 6141 bytes are not a multiple of a record of 3073"
    with pytest.raises(InputError, match=message):
        load(data_part("cifar10"), tmp_path)


def test_cifar_label_beyond_classes_is_rejected(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes([10]) + bytes(3072))
    message = r"data_batch_3.bin: label 10, but there are 10 classes"
    with pytest.raises(InputError, match=message):
        load(data_part("cifar10"), tmp_path)


def test_missing_file_is_named_with_download_command(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / f"{TRAIN_LABELS}.gz").unlink()
    message = f"mnist needs {TRAIN_LABELS} in this folder .* `testbed setup data mnist` downloads"
    with pytest.raises(InputError, match=message):
        load(data_part("mnist"), tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10", r"needs data_batch_1.bin, .*test_batch.bin in this folder"),
        ("emnist", "emnist needs emnist-balanced-train-images-idx3-ubyte"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(data_part(name), tmp_path)


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .*nowhere does not exist"):
        load(data_part("mnist"), tmp_path / "nowhere")
    with pytest.raises(InputError, match="mnist is read from files: give their folder"):
        load(data_part("mnist"))


def test_unknown_name_is_rejected_with_closest_match() -> None:
    message = "unknown data set 'mnits': did you mean 'mnist'"
    with pytest.raises(InputError, match=message):
        load(data_part("mnits"))


def test_more_samples_than_available_are_rejected(tmp_path: Path) -> None:
    message = r"data.train: digits has 1438 training samples, not 1500"
    with pytest.raises(InputError, match=message):
        load(data_part("digits", train=1500))
    write_mnist(tmp_path)
    message = r"data.train: mnist has 6 training samples, not 7"
    with pytest.raises(InputError, match=message):
        train_labels(data_part("mnist", train=7), tmp_path)


# ------------------------------------------------------------------------------------------- synthetic data and labels


def test_synthetic_name_sets_shape_and_classes() -> None:
    data = load(data_part("synthetic-3x12x16-4", train=200, test=80))
    assert data.name == "synthetic-3x12x16-4"
    assert data.shape == (3, 12, 16)
    assert describe("synthetic-3x12x16-4").shape == data.shape
    assert np.bincount(data.train_labels).tolist() == [50] * 4
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1
    assert load(data_part("synthetic")).name == "synthetic-1x8x8"


def test_synthetic_classes_are_separable() -> None:
    data = load(data_part("synthetic-3x12x16-4", train=200, test=80))
    centres = []
    for label in range(4):
        centres.append(data.train_images[data.train_labels == label].mean(0))
    offsets = data.test_images[:, None] - np.stack(centres)
    nearest = (offsets**2).sum((2, 3, 4)).argmin(1)
    assert (nearest == data.test_labels).mean() > 0.95


def test_limited_synthetic_data_are_first_samples() -> None:
    data = load(data_part("synthetic-3x12x16-4", train=200))
    limited = load(data_part("synthetic-3x12x16-4", train=10))
    assert np.array_equal(limited.train_images, data.train_images[:10])


@pytest.mark.parametrize(
    "name", ["synthetic-3x32", "synthetic-0x3x3", "synthetic-1x8x8-1", "synthetics"]
)
def test_malformed_synthetic_name_is_rejected(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'"):
        load(data_part(name))


@pytest.mark.parametrize(
    "part",
    [
        data_part("digits", train=50),
        data_part("synthetic-1x4x4-7", train=30),
        data_part("synthetic"),
        data_part("mnist"),
        data_part("mnist", train=3),
    ],
    ids=lambda part: f"{part.name}-{part.train}",
)
def test_labels_read_alone_equal_labels_of_data(part: DataPart, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    labels = train_labels(part, tmp_path)
    assert np.array_equal(labels, load(part, tmp_path).train_labels)
