"""Downloads of published data sets from a local server."""

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import HostError, InputError
from testbed.ml.data import DATASETS, load
from testbed.ml.data.catalog import Remote
from testbed.ml.data.fetch import fetch
from testbed.ml.workload import DataPart
from tests.testbed.ml.data.writers import (
    draw_images,
    encode_idx,
    write_cifar,
    write_mnist,
)


@dataclass(frozen=True)
class Server:
    """A running HTTP server."""

    url: str
    root: Path
    """The folder of its files."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    root = tmp_path / "served"
    root.mkdir()

    class QuietHandler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as http_server:
        # A short poll interval, so that shutdown returns at once.
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
        thread.start()
        yield Server(f"http://127.0.0.1:{http_server.server_port}", root)
        http_server.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def publish(monkeypatch: pytest.MonkeyPatch, name: str, server: Server) -> None:
    """Replace the download addresses and hashes of a data set by the server's addresses and hashes."""
    source = DATASETS[name]
    remotes = []
    for remote in source.remotes:
        content = (server.root / remote.name).read_bytes()
        remotes.append(replace(remote, bases=(server.url,), md5=md5(content)))
    monkeypatch.setitem(DATASETS, name, replace(source, remotes=tuple(remotes)))


def test_fetch_downloads_missing_files_once(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(server.root)
    publish(monkeypatch, "mnist", server)
    folder = tmp_path / "a" / "b"
    reports: list[tuple[str, int, int | None]] = []

    def fetch_with_reports() -> list[Path]:
        return list(
            fetch("mnist", folder, progress=lambda *report: reports.append(report))
        )

    paths = fetch_with_reports()
    names = [path.name for path in paths]
    assert names == [remote.name for remote in DATASETS["mnist"].remotes]
    # No temporary files remain.
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert all(done == total for _, done, total in reports)
    assert load(DataPart(name="mnist"), folder).name == "mnist"
    reports.clear()
    assert fetch_with_reports() == paths
    assert reports == []


def test_fetch_unpacks_tar_without_files_outside_folder(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "cifar")
    with tarfile.open(server.root / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for path in (tmp_path / "cifar").iterdir():
            tar.add(path, f"../cifar-10-batches-bin/{path.name}")
        tar.addfile(tarfile.TarInfo("../evil"), io.BytesIO())
    publish(monkeypatch, "cifar10", server)
    folder = tmp_path / "cifar10"
    fetch("cifar10", folder)
    assert load(DataPart(name="cifar10"), folder).name == "cifar10"
    assert not list(tmp_path.rglob("*evil*"))
    # Five training files and a test file.
    assert len(list(folder.iterdir())) == 6


def test_fetch_unpacks_zip(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = gzip.compress(encode_idx(draw_images(2)))
    labels = gzip.compress(encode_idx(np.arange(2)))
    with zipfile.ZipFile(server.root / "gzip.zip", "w") as archive:
        for part in ("train", "test"):
            prefix = f"gzip/emnist-digits-{part}"
            archive.writestr(f"{prefix}-images-idx3-ubyte.gz", images)
            archive.writestr(f"{prefix}-labels-idx1-ubyte.gz", labels)
    publish(monkeypatch, "emnist-digits", server)
    folder = tmp_path / "emnist"
    fetch("emnist-digits", folder)
    assert load(DataPart(name="emnist-digits"), folder).name == "emnist-digits"


def publish_mnist_with_wrong_mirror(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish MNIST with six training images; the folder ``mirror`` of the server has files of seven."""
    mirror = server.root / "mirror"
    mirror.mkdir()
    write_mnist(server.root, train=6)
    write_mnist(mirror, train=7)
    publish(monkeypatch, "mnist", server)


def test_fetch_replaces_wrong_file_of_mirror(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist_with_wrong_mirror(server, monkeypatch)
    folder = tmp_path / "good"
    assert len(fetch("mnist", folder, bases=[f"{server.url}/mirror"])) == 4
    # The mirror's training images have another hash.
    assert len(load(DataPart(name="mnist"), folder).train_labels) == 6


def test_fetch_reports_all_failed_addresses(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist_with_wrong_mirror(server, monkeypatch)
    (server.root / "train-images-idx3-ubyte.gz").unlink()
    folder = tmp_path / "bad"
    message = r"mirror/train-images.* the MD5 hash is .*, not the published.*; .*404"
    with pytest.raises(HostError, match=message):
        fetch("mnist", folder, bases=[f"{server.url}/mirror/"])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["digits", "synthetic-1x8x8"])
def test_fetch_of_data_without_files_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no download is necessary"):
        fetch(name, tmp_path)


def test_fetch_of_unknown_data_set_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown data set"):
        fetch("imagenet", tmp_path)


def test_archive_without_expected_members_is_rejected(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = server.root / "x.zip"
    zipfile.ZipFile(archive, "w").close()
    remote = Remote("x.zip", (server.url,), md5(archive.read_bytes()), ("member",))
    source = replace(DATASETS["cifar10"], remotes=(remote,))
    monkeypatch.setitem(DATASETS, "cifar10", source)
    with pytest.raises(HostError, match="the archive lacks member"):
        fetch("cifar10", tmp_path / "to")
