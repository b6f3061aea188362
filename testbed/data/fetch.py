"""Downloads the files of a data set into a folder; only ever called by the command of that name."""

from __future__ import annotations

import logging
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

import pooch
import requests

from testbed.common.errors import HostError, InputError
from testbed.data.catalog import Remote, describe
from testbed.data.files import find

DownloadProgress = Callable[[str, int, int | None], None]
"""(file, bytes so far, bytes in all if known)."""

_CHUNK = 1 << 20
_TIMEOUT = 30.0
"""Seconds without a single byte."""


def fetch(
    name: str, folder: Path, bases: Sequence[str] = (), progress: DownloadProgress = lambda _file, _done, _all: None
) -> list[Path]:
    """Download what is missing of a set; return the set's files, those that were there before included.

    ``bases`` are addresses of folders to try before the published ones, mirrors for instance. A download becomes
    a file of its name only once its checksum is right. Raises `InputError` for a set that has nothing to
    download and `HostError` where no address serves the right file.
    """
    source = describe(name)
    if not source.remotes:
        raise InputError(f"data set '{name}' needs no files: there is nothing to download")
    folder.mkdir(parents=True, exist_ok=True)
    for remote in source.remotes:
        wanted = remote.members or (remote.name,)
        if any(find(folder, member.removesuffix(".gz")) is None for member in wanted):
            _get(remote, folder, [*bases, *remote.bases], progress)
    found = [find(folder, file) for file in source.files]
    return [path for path in found if path is not None]


def _get(remote: Remote, folder: Path, bases: Sequence[str], progress: DownloadProgress) -> None:
    """Download one file from the first address that has it, and unpack it."""
    pooch.get_logger().setLevel(logging.WARNING)
    failures = []
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as unfinished:
        for base in bases:
            address = f"{base.rstrip('/')}/{remote.name}"
            # The bytes as they were stored: a .gz is not to be unpacked on the way.
            download = pooch.HTTPDownloader(
                _Bar(remote.name, progress), _CHUNK, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}
            )
            try:
                found = pooch.retrieve(address, f"md5:{remote.md5}", remote.name, unfinished, downloader=download)
                _keep(remote, Path(found), folder)
            except (requests.RequestException, OSError, ValueError) as error:
                failures.append(f"{address}: {error}")
            else:
                return
    raise HostError(f"{remote.name} could not be downloaded into {folder}: " + "; ".join(failures))


class _Bar:
    """What pooch reports to while it downloads; ``total`` is 0 where the server does not say."""

    def __init__(self, file: str, progress: DownloadProgress) -> None:
        self.total = 0
        self._file, self._progress, self._done = file, progress, 0

    def update(self, more: int) -> None:
        """Note that this many more bytes have arrived, counted by whole chunks."""
        self._done = min(self._done + more, self.total) if self.total else self._done + more
        self._progress(self._file, self._done, self.total or None)

    def reset(self) -> None:
        """Begin again: pooch reports the whole once more at the end."""
        self._done = 0

    def close(self) -> None:
        """Nothing is left to do."""


def _keep(remote: Remote, download: Path, folder: Path) -> None:
    """Give a sound download its name, or take out of it what is wanted."""
    if not remote.members:
        download.replace(folder / remote.name)
        return
    missing = set(remote.members)
    for name, content in _members(download, zipped=remote.name.endswith(".zip")):
        if name in missing:
            unpacked = folder / f".{name}.partial"
            with unpacked.open("wb") as file:
                shutil.copyfileobj(content, file)
            unpacked.replace(folder / name)
            missing.remove(name)
    if missing:
        raise OSError(f"the archive lacks {', '.join(sorted(missing))}")


def _members(archive: Path, zipped: bool) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files of an archive, opened, each by its name without any folder: so none lands outside."""
    if zipped:
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                with opened.open(entry) as content:
                    yield PurePosixPath(entry.filename).name, content
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            extracted = tar.extractfile(member) if member.isfile() else None
            if extracted is not None:
                with extracted:
                    yield PurePosixPath(member.name).name, extracted
