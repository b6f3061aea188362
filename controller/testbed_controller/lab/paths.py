"""Locations of the code, and of the controller's persistent files."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from contextlib import suppress
from pathlib import Path

from testbed.common.errors import HostError

_HERE = Path(__file__).resolve().parent
IS_CHECKOUT = (_HERE.parents[2] / "pyproject.toml").is_file()
ROOT = _HERE.parents[2] if IS_CHECKOUT else _HERE.parents[1]
"""The checkout, or the installation folder of the packages."""
RECIPES = ROOT / "images" if IS_CHECKOUT else _HERE / "recipes"
"""Folder with Dockerfiles and package lists; setup.py includes it in the wheel."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
BUILD = ROOT / ".build" if IS_CHECKOUT else _CACHE / "testbed"
"""Folder of downloads for the images; may be deleted."""
_OWNED = ".owned"
"""Suffix of the file that the processes of a run keep locked; a lock ends with its process, however it ends."""


def package_folder(package: str) -> Path:
    """Return the folder of one of our packages, such as ``testbed_agent``."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).resolve().parent


def state_path() -> Path:
    """Return the path of the folder for state files and logs, which may not exist yet."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "testbed"


def state_folder() -> Path:
    """Return the folder of state files and logs, created for its owner only; raises `HostError`."""
    folder = state_path()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        why = error.strerror or error
        raise HostError(
            f"{folder}: cannot create the folder: {why}: choose another one with XDG_STATE_HOME"
        ) from None
    return folder


def lock_run(run: str) -> int:
    """Lock a run and return the lock's file descriptor; the lock lasts until all processes have closed it."""
    lock = os.open(state_folder() / f"{run}{_OWNED}", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def unlock_run(run: str) -> None:
    """Delete the lock of a run, so that the run does not count as abandoned."""
    (state_folder() / f"{run}{_OWNED}").unlink(missing_ok=True)


def orphaned_runs() -> list[str]:
    """Return the runs whose controller and reaper were both killed, without contacting an engine."""
    runs = []
    for path in sorted(state_path().glob(f"*{_OWNED}")):
        with suppress(OSError), path.open() as file:
            # Shared, so that two commands that look at the same time do not find each other's lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            runs.append(path.stem)
    return runs
