"""Download of a data set's files into a folder, for the command `testbed setup data`."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

import requests
import urllib3

from testbed.common.errors import HostError, InputError
from testbed.ml.data.catalog import Remote, describe
from testbed.ml.data.files import find

DownloadProgress = Callable[[str, int, int | None], None]
"""Function of a file's name, the number of bytes received, and the size in bytes (None if unknown)."""

_CHUNK = 1 << 20
"""Bytes written to the disk at a time, so that large files need little memory."""
_TIMEOUT = 30.0
"""Seconds without a single byte after which an address fails."""


def fetch(
    name: str,
    folder: Path,
    bases: Sequence[str] = (),
    progress: DownloadProgress = lambda _file, _done, _all: None,
) -> list[Path]:
    """Download the missing files of a set; return all files of the set.

    ``bases`` are folder addresses tried before the published ones, such as mirrors. A download gets its final name once
    its checksum matches. Raises `InputError` for a set without downloads and `HostError` if no address serves the right
    file.
    """
    source = describe(name)
    if not source.remotes:
        raise InputError(f"data set '{name}' needs no files: no download is necessary")
    folder.mkdir(parents=True, exist_ok=True)
    for remote in source.remotes:
        if not _is_complete(remote, folder):
            _download_file(remote, folder, [*bases, *remote.bases], progress)
    paths = [find(folder, file) for file in source.files]
    return [path for path in paths if path is not None]


def _is_complete(remote: Remote, folder: Path) -> bool:
    """Return whether a folder contains a download, or all members of an archive."""
    names = remote.members or (remote.name,)
    # Users may have unpacked a file: `find` accepts a file with and without ".gz".
    paths = [find(folder, name.removesuffix(".gz")) for name in names]
    return None not in paths


def _download_file(
    remote: Remote,
    folder: Path,
    bases: Sequence[str],
    progress: DownloadProgress,
) -> None:
    """Download one file from the first working address, and unpack archives."""
    failures = []
    # Below the target folder, since a file can be renamed only within its file system.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        download = Path(temporary) / remote.name
        for base in bases:
            address = f"{base.rstrip('/')}/{remote.name}"
            try:
                _write_download(address, download, remote, progress)
                _keep_download(remote, download, folder)
            except (
                requests.RequestException,
                urllib3.exceptions.HTTPError,
                OSError,
                ValueError,
            ) as error:
                failures.append(f"{address}: {error}")
            else:
                return
    raise HostError(
        f"{remote.name} could not be downloaded into {folder}: {'; '.join(failures)}"
    )


def _write_download(
    address: str,
    file: Path,
    remote: Remote,
    progress: DownloadProgress,
) -> None:
    """Write the content of an address to a file; raises ValueError for a wrong checksum."""
    # The sets are published with MD5 hashes; they detect damage, not an attack.
    digest = hashlib.md5(usedforsecurity=False)
    received = 0
    with requests.get(
        address, stream=True, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}
    ) as response:
        response.raise_for_status()
        total = int(response.headers.get("Content-Length", 0)) or None
        with file.open("wb") as output:
            # Some servers declare a .gz file as a content encoding, and `requests` would decompress it. The checksum
            # belongs to the compressed file.
            for chunk in response.raw.stream(_CHUNK, decode_content=False):
                output.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                progress(remote.name, received, total)
    if total is not None and received < total:
        raise ValueError(f"the connection ended after {received} of {total} bytes")
    if digest.hexdigest() != remote.md5:
        raise ValueError(
            f"the MD5 hash is {digest.hexdigest()}, not the published {remote.md5}"
        )


def _keep_download(remote: Remote, download: Path, folder: Path) -> None:
    """Move a verified download into the folder, or the required members of an archive."""
    if not remote.members:
        download.replace(folder / remote.name)
        return
    missing = set(remote.members)
    is_zip = remote.name.endswith(".zip")
    for name, content in _archive_members(download, is_zip=is_zip):
        if name in missing:
            # The file gets its name when it is complete, so that no partial file is taken for a complete one.
            partial = folder / f".{name}.partial"
            with partial.open("wb") as file:
                shutil.copyfileobj(content, file)
            partial.replace(folder / name)
            missing.remove(name)
    if missing:
        raise OSError(f"the archive lacks {', '.join(sorted(missing))}")


def _archive_members(archive: Path, *, is_zip: bool) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (name, open file) for the files of an archive.

    The names have no folders, so that no archive can make the caller write outside the target folder.
    """
    if is_zip:
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
