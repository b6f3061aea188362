"""Data sets: published formats read and refused, splits that lose nothing, batches that come again, downloads."""

import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import HostError, InputError
from testbed.ml.data import DATASETS, describe, load
from testbed.ml.data.batches import batch, cut_batch, steps_per_epoch
from testbed.ml.data.catalog import Remote, train_labels
from testbed.ml.data.fetch import fetch
from testbed.ml.data.split import holdout
from testbed.ml.workload import DataPart

LABELS = np.repeat(np.arange(5), [40, 30, 20, 7, 3])


def idx(values: np.ndarray) -> bytes:
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28))


def write_mnist(
    folder: Path, train: int | None = 6, test: int | None = 4, zipped: bool = True
) -> None:
    for part, count in (("train", train), ("t10k", test)):
        if count is not None:
            for name, values in (
                ("images-idx3", images(count)),
                ("labels-idx1", np.arange(count) % 10),
            ):
                path = folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
                path.write_bytes(gzip.compress(idx(values)) if zipped else idx(values))


def part(name: str, **limits: int) -> DataPart:
    return DataPart(name=name, **limits)


def test_large_digits_are_the_small_ones_three_times_as_large_in_a_frame() -> None:
    small, large = load(part("digits")), load(part("digits-28"))
    assert large.shape == (1, 28, 28)
    assert np.array_equal(large.train_images[:, :, 3:26:3, 3:26:3], small.train_images)
    assert large.train_images[:, :, :2].max() == large.train_images[..., 26:].max() == 0
    assert np.array_equal(large.test_labels, small.test_labels)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # here, since it takes a second

    digits, theirs = load(part("digits")), load_digits()
    pixels = np.concatenate([digits.train_images, digits.test_images]).reshape(-1, 64)
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert sorted(
        zip(map(tuple, np.round(pixels * 16)), labels, strict=True)
    ) == sorted(zip(map(tuple, theirs.data), theirs.target, strict=True))
    assert (digits.name, digits.classes, digits.shape) == ("digits", 10, (1, 8, 8))
    assert (len(digits.train_labels), len(digits.test_labels)) == (1438, 359)
    assert digits.train_images.dtype == np.float32
    assert digits.train_labels.dtype == np.int64
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    # Each class keeps its share, and the split never changes.
    assert np.bincount(digits.test_labels).tolist() == [
        36,
        36,
        35,
        37,
        36,
        36,
        36,
        36,
        35,
        36,
    ]
    again = load(part("digits", train=100, test=10))
    assert np.array_equal(again.train_images, digits.train_images[:100])
    assert np.array_equal(again.test_labels, digits.test_labels[:10])


def test_the_small_network_learns_the_digits() -> None:
    import torch

    from testbed.ml.models import create

    digits = load(part("digits"))
    network = create("cnn", {}, digits.shape, digits.classes).build(0, 6, seed=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(8 * steps_per_epoch(1438, 64)):
        chosen = batch(1438, 64, 1, step)
        loss = torch.nn.functional.cross_entropy(
            network(torch.from_numpy(digits.train_images[chosen])),
            torch.from_numpy(digits.train_labels[chosen]),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        answers = network(torch.from_numpy(digits.test_images)).argmax(1).numpy()
    assert (answers == digits.test_labels).mean() >= 0.95


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_files(tmp_path: Path, name: str, zipped: bool) -> None:
    write_mnist(tmp_path, zipped=zipped)
    found = load(part(name, train=5), tmp_path)
    assert (
        found.name,
        found.shape,
        len(found.train_labels),
        len(found.test_labels),
    ) == (name, (1, 28, 28), 5, 4)
    assert found.train_images[2, 0] * 255 == pytest.approx(images(6)[2])
    assert found.test_labels.tolist() == [0, 1, 2, 3]


def test_folder_of_the_scenario_is_the_default(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert load(DataPart(name="mnist", folder=str(tmp_path))).name == "mnist"


def test_a_test_part_alone_is_split_and_named_for_it(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=None, test=50)
    found = load(part("mnist"), tmp_path)
    assert found.name == "mnist-t10k"
    assert np.bincount(found.train_labels).tolist() == [4] * 10
    assert np.bincount(found.test_labels).tolist() == [1] * 10
    together = np.concatenate([found.train_images, found.test_images])[:, 0] * 255
    assert sorted(map(float, together.sum((1, 2)))) == pytest.approx(
        sorted(map(float, images(50).sum((1, 2))))
    )


def test_emnist_is_turned_upright_and_numbered_from_zero(tmp_path: Path) -> None:
    for kind, count in (("train", 3), ("test", 2)):
        (tmp_path / f"emnist-letters-{kind}-images-idx3-ubyte").write_bytes(
            idx(images(count))
        )
        (tmp_path / f"emnist-letters-{kind}-labels-idx1-ubyte").write_bytes(
            idx(np.arange(1, count + 1))
        )
    found = load(part("emnist-letters"), tmp_path)
    assert found.train_labels.tolist() == [0, 1, 2]
    assert found.train_images[1, 0] * 255 == pytest.approx(images(3)[1].T)


def write_cifar(folder: Path, records: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    for index, name in enumerate(
        [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]
    ):
        content = [
            bytes([index])
            + bytes([index * 10]) * 1024
            + bytes([1]) * 1024
            + bytes([2]) * 1024
        ] * records
        (folder / f"{name}.bin").write_bytes(b"".join(content))


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar_files(tmp_path: Path, inner: str) -> None:
    write_cifar(tmp_path / inner)
    found = load(part("cifar10"), tmp_path)
    assert found.shape == (3, 32, 32)
    assert found.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (found.test_images[0, :, 5, 7] * 255).tolist() == pytest.approx([50, 1, 2])


TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
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
            lambda content: idx(images(6)),
            "wrong magic number 00000803: .* has 00000801",
        ),
        (
            TRAIN_LABELS,
            lambda content: idx(np.arange(5)),
            "5 labels for the 6 images of train-images-idx3-ubyte",
        ),
        (
            TRAIN_LABELS,
            lambda content: idx(np.arange(6) + 9),
            "label 14, but there are 10 classes",
        ),
        (
            TRAIN_IMAGES,
            lambda content: idx(np.zeros((6, 8, 8))),
            "has images of 8x8 pixels, not of 28x28",
        ),
    ],
)
def test_damaged_idx_files(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path, zipped=False)
    (tmp_path / name).write_bytes(spoil((tmp_path / name).read_bytes()))
    with pytest.raises(InputError, match=f"{name}: {message}"):
        load(part("mnist"), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda content: content[: len(content) // 2],
            "truncated: the gzip stream ends early",
        ),
        (lambda content: b"plainly not gzip", "not a sound gzip file"),
        (
            lambda content: content[:20] + b"\xff" * 40 + content[60:],
            "not a sound gzip file",
        ),
    ],
)
def test_damaged_gzip_files(
    tmp_path: Path, spoil: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InputError, match=f"{TRAIN_IMAGES}.gz: {message}"):
        load(part("mnist"), tmp_path)


def test_damaged_cifar_files(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(
        InputError,
        match=r"data_batch_3.bin: truncated: 6141 bytes are no whole records of 3073",
    ):
        load(part("cifar10"), tmp_path)
    path.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(
        InputError, match=r"data_batch_3.bin: label 10, but there are 10 classes"
    ):
        load(part("cifar10"), tmp_path)


def test_missing_files_and_unknown_names(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / f"{TRAIN_LABELS}.gz").unlink()
    with pytest.raises(
        InputError,
        match=f"mnist needs {TRAIN_LABELS} there .* `testbed setup data mnist` downloads",
    ):
        load(part("mnist"), tmp_path)
    with pytest.raises(
        InputError, match=r"needs data_batch_1.bin, .*test_batch.bin there"
    ):
        load(part("cifar10"), tmp_path)
    with pytest.raises(
        InputError, match="emnist needs emnist-balanced-train-images-idx3-ubyte"
    ):
        load(part("emnist"), tmp_path)
    with pytest.raises(InputError, match=r"the folder .*nowhere does not exist"):
        load(part("mnist"), tmp_path / "nowhere")
    with pytest.raises(InputError, match="mnist is read from files: give their folder"):
        load(part("mnist"))
    with pytest.raises(
        InputError, match="unknown data set 'mnits': did you mean 'mnist'"
    ):
        load(part("mnits"))
    with pytest.raises(
        InputError, match=r"data.train: digits has 1438 samples in this part, not 1500"
    ):
        load(part("digits", train=1500))


def test_synthetic_sets_are_named_so_and_can_be_learned() -> None:
    made = load(part("synthetic-3x12x16-4", train=200, test=80))
    assert made.name == "synthetic-3x12x16-4"
    assert describe("synthetic-3x12x16-4").shape == made.shape == (3, 12, 16)
    assert np.bincount(made.train_labels).tolist() == [50] * 4
    assert (made.train_images.min(), made.train_images.max()) == (0, 1)
    centres = np.stack(
        [made.train_images[made.train_labels == label].mean(0) for label in range(4)]
    )
    distance = ((made.test_images[:, None] - centres) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == made.test_labels).mean() > 0.95
    assert np.array_equal(
        load(part("synthetic-3x12x16-4", train=10)).train_images, made.train_images[:10]
    )
    assert load(part("synthetic")).name == "synthetic-1x8x8"


@pytest.mark.parametrize(
    "name", ["synthetic-3x32", "synthetic-0x3x3", "synthetic-1x8x8-1", "synthetics"]
)
def test_malformed_synthetic_names_are_rejected(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'"):
        load(part(name))


@pytest.mark.parametrize(
    "part",
    [
        DataPart(name="digits", train=50),
        DataPart(name="synthetic-1x4x4-7", train=30),
        DataPart(name="synthetic"),
        DataPart(name="mnist"),
        DataPart(name="mnist", train=3),
    ],
)
def test_labels_are_read_without_images_being_widened(
    part: DataPart, tmp_path: Path
) -> None:
    write_mnist(tmp_path)
    assert np.array_equal(
        train_labels(part, tmp_path), load(part, tmp_path).train_labels
    )


def test_labels_beyond_the_samples_name_the_key(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(
        InputError, match=r"data.train: mnist has 6 samples in this part, not 7"
    ):
        train_labels(DataPart(name="mnist", train=7), tmp_path)


def test_holdout_takes_its_share_of_each_class() -> None:
    kept, aside = holdout(LABELS, 0.2)
    assert np.bincount(LABELS[aside]).tolist() == [8, 6, 4, 1, 1]
    assert sorted([*kept, *aside]) == list(range(100))


@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 70),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_an_epoch_shows_each_sample_at_most_once(
    samples: int, size: int, seed: int, epoch: int
) -> None:
    steps = steps_per_epoch(samples, size)
    shown = [batch(samples, size, seed, epoch * steps + step) for step in range(steps)]
    assert all(len(indices) == min(size, samples) for indices in shown)
    together = np.concatenate(shown)
    assert len(set(together.tolist())) == len(together)
    assert samples - len(together) < size


def test_batches_depend_on_seed_and_step_alone() -> None:
    one = batch(100, 10, seed=1, step=25)
    batch(100, 10, seed=2, step=3)
    assert np.array_equal(batch(100, 10, seed=1, step=25), one)
    assert not np.array_equal(batch(100, 10, seed=2, step=25), one)
    assert not np.array_equal(batch(100, 10, seed=1, step=15), one)
    with pytest.raises(ValueError, match="no batches of 4 in 0 samples"):
        steps_per_epoch(0, 4)


def test_uneven_batches_are_cut_into_micro_batches() -> None:
    assert [piece.stop - piece.start for piece in cut_batch(10, 4)] == [3, 3, 2, 2]
    assert [list(range(10))[piece] for piece in cut_batch(10, 4)][1:3] == [
        [3, 4, 5],
        [6, 7],
    ]
    assert cut_batch(3, 1) == (slice(0, 3),)
    with pytest.raises(
        ValueError, match="a batch of 3 cannot be cut into 4 micro-batches: take 1 to 3"
    ):
        cut_batch(3, 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    root = tmp_path / "served"
    root.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", root
        running.shutdown()
        thread.join()


def publish(
    monkeypatch: pytest.MonkeyPatch, name: str, base: str, files: dict[str, bytes]
) -> None:
    """Let a set of the catalogue be had from a server of the test's own, with those files' checksums."""
    source = DATASETS[name]
    remotes = tuple(
        replace(
            remote,
            bases=(base,),
            md5=hashlib.md5(files[remote.name], usedforsecurity=False).hexdigest(),
        )
        for remote in source.remotes
    )
    monkeypatch.setitem(DATASETS, name, replace(source, remotes=remotes))


def test_fetch_downloads_missing_files_once(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = server
    write_mnist(root)
    publish(
        monkeypatch,
        "mnist",
        base,
        {path.name: path.read_bytes() for path in root.iterdir()},
    )
    folder = tmp_path / "a" / "b"
    seen: list[tuple[str, int, int | None]] = []
    paths = fetch("mnist", folder, progress=lambda *news: seen.append(news))
    assert [path.name for path in paths] == [
        remote.name for remote in DATASETS["mnist"].remotes
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in paths
    )
    assert all(done == total for _, done, total in seen)
    assert load(part("mnist"), folder).name == "mnist"
    seen.clear()
    assert fetch("mnist", folder, progress=lambda *news: seen.append(news)) == paths
    assert seen == []


def test_fetch_unpacks_archives_and_nothing_outside_its_folder(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = server
    write_cifar(tmp_path / "cifar")
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for path in (tmp_path / "cifar").iterdir():
            tar.add(path, f"../cifar-10-batches-bin/{path.name}")
        tar.addfile(tarfile.TarInfo("../evil"), io.BytesIO())
    letters = zipfile.ZipFile(root / "gzip.zip", "w")
    for kind in ("train", "test"):
        letters.writestr(
            f"gzip/emnist-digits-{kind}-images-idx3-ubyte.gz",
            gzip.compress(idx(images(2))),
        )
        letters.writestr(
            f"gzip/emnist-digits-{kind}-labels-idx1-ubyte.gz",
            gzip.compress(idx(np.arange(2))),
        )
    letters.close()
    files = {path.name: path.read_bytes() for path in root.iterdir()}
    for name in ("cifar10", "emnist-digits"):
        publish(monkeypatch, name, base, files)
        fetch(name, tmp_path / name)
        assert load(part(name), tmp_path / name).name == name
    assert not list(tmp_path.rglob("*evil*"))
    assert len(list((tmp_path / "cifar10").iterdir())) == 6


def test_fetch_tries_a_mirror_first_and_refuses_a_wrong_file(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = server
    write_mnist(root)
    (root / "mirror").mkdir()
    write_mnist(root / "mirror", train=7)
    publish(
        monkeypatch,
        "mnist",
        base,
        {path.name: path.read_bytes() for path in root.glob("*.gz")},
    )
    assert len(fetch("mnist", tmp_path / "good", bases=[f"{base}/mirror"])) == 4
    assert len(load(part("mnist"), tmp_path / "good").train_labels) == 6
    (root / f"{TRAIN_IMAGES}.gz").unlink()
    with pytest.raises(
        HostError,
        match=r"mirror/train-images.* the MD5 hash is .*, not the published.*; .*404",
    ):
        fetch("mnist", tmp_path / "bad", bases=[f"{base}/mirror/"])
    assert list((tmp_path / "bad").iterdir()) == []


def test_fetch_of_sets_without_files(tmp_path: Path) -> None:
    for name in ("digits", "synthetic-1x8x8"):
        with pytest.raises(InputError, match="nothing to download"):
            fetch(name, tmp_path)
    with pytest.raises(InputError, match="unknown data set"):
        fetch("imagenet", tmp_path)


def test_archive_without_the_wanted_members_is_rejected(
    tmp_path: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = server
    zipfile.ZipFile(root / "x.zip", "w").close()
    digest = hashlib.md5(
        (root / "x.zip").read_bytes(), usedforsecurity=False
    ).hexdigest()
    remotes = (Remote("x.zip", (base,), digest, ("wanted",)),)
    monkeypatch.setitem(
        DATASETS, "cifar10", replace(DATASETS["cifar10"], remotes=remotes)
    )
    with pytest.raises(HostError, match="the archive lacks wanted"):
        fetch("cifar10", tmp_path / "to")


def test_every_set_of_the_catalogue_is_described() -> None:
    for name, source in DATASETS.items():
        assert describe(name) is source
        assert source.summary
        assert bool(source.files) == bool(source.remotes)
