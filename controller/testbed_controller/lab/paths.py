"""Locations of the code, and of the controller's persistent files: state files of runs, locks and logs.

Every run has a lock file, locked by the run's controller and its reaper (`testbed_controller.lab.reaper`). The kernel
releases the lock when both processes have ended, however they end. A file that exists without a lock therefore belongs
to an orphaned run, whose containers nobody removes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
from contextlib import suppress
from pathlib import Path

from testbed.common.errors import HostError

_HERE = Path(__file__).resolve().parent
IS_CHECKOUT = (_HERE.parents[2] / "pyproject.toml").is_file()
"""Whether the code runs from a checkout of the repository, and not from an installed wheel."""
ROOT = _HERE.parents[2] if IS_CHECKOUT else _HERE.parents[1]
"""The checkout, or the installation folder of the packages."""
RECIPES = ROOT / "images" if IS_CHECKOUT else _HERE / "recipes"
"""Folder with Dockerfiles and package lists; setup.py copies it into the wheel."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
BUILD = ROOT / ".build" if IS_CHECKOUT else _CACHE / "testbed"
"""Folder of downloads for the images; the user may delete it."""
_LOCK_SUFFIX = ".owned"
"""Suffix of a run's lock file."""


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
        reason = error.strerror or error
        raise HostError(
            f"{folder}: cannot create the folder: {reason}: choose another one with XDG_STATE_HOME"
        ) from None
    return folder


def lock_run(run: str) -> int:
    """Lock a run and return the file descriptor of the lock.

    A child process can inherit the descriptor. The lock ends when all processes have closed it.
    """
    lock = os.open(_lock_path(run), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def unlock_run(run: str) -> None:
    """Delete the lock file of a run, so that the run does not count as orphaned."""
    _lock_path(run).unlink(missing_ok=True)


def _lock_path(run: str) -> Path:
    return state_folder() / f"{run}{_LOCK_SUFFIX}"


def orphaned_runs() -> list[str]:
    """Return the runs whose controller and reaper were both killed, without contacting an engine."""
    runs = []
    for path in sorted(state_path().glob(f"*{_LOCK_SUFFIX}")):
        # OSError: another process holds the lock, or has deleted the file.
        with suppress(OSError), path.open() as file:
            # A shared lock, so that two commands that check at the same time do not find each other's lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            runs.append(path.stem)
    return runs
