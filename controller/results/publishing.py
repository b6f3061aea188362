"""A folder of results appears under its final name at once and whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def fresh(folder: Path) -> Path:
    """Return ``folder``, or with a number the first such name that does not exist or is empty."""
    number = 1
    place = folder
    while place.exists() and not _is_empty(place):
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Let ``fill`` write a draft, rename that to ``folder`` or the first free name like it, and return the name.

    Nothing is left behind when either fails. Raises OSError where the place cannot be written.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # mkdtemp makes the folder private; results are for everybody who may read the parent.
        draft.chmod(0o777 & ~_umask())
        fill(draft)
        return _rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _rename(draft: Path, folder: Path) -> Path:
    while True:
        place = fresh(folder)
        try:
            # Replaces an empty folder, fails on one that was filled since we looked.
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
            continue
        return place


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())
