"""Replacements for the task of a cluster's worker, which runs one trial and returns its files.

The results folders of trials are named run0, run1, ... Each worker imports this module again, so it imports only the
standard library.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def kill_second_worker(
    counts: str,
    _files: object,
    _argv: list[str],
    _version: str,
    run_folder: str,
    *_: object,
) -> dict[str, bytes]:
    """Kill the worker of the second trial, and append to the file ``counts`` each time."""
    if run_folder.endswith("run1"):
        _note_death(Path(counts))
        os._exit(1)
    return {"figure": b"1"}


def kill_workers_twice(
    counts: str,
    _files: object,
    _argv: list[str],
    _version: str,
    run_folder: str,
    *_: object,
) -> dict[str, bytes]:
    """Kill the workers of the first two trials, twice each."""
    trial = int(run_folder[-1])
    deaths = Path(f"{counts}{trial}")
    died_twice = deaths.exists() and len(deaths.read_text()) >= 2
    if trial < 2 and not died_twice:
        _note_death(deaths)
        os._exit(1)
    return {"figure": b"1"}


def _note_death(deaths: Path) -> None:
    # Memory of the worker is lost with its process; a file remains.
    with deaths.open("a") as file:
        file.write("x")


def return_folder_path(
    _counts: str,
    _files: object,
    _argv: list[str],
    _version: str,
    run_folder: str,
    *_: object,
) -> dict[str, bytes]:
    """Return a file with the path of the results folder."""
    return {"place": run_folder.encode()}


def touch_and_sleep(marker: str, *_: object) -> dict[str, bytes]:
    """Create the file ``marker`` and keep running longer than any test."""
    Path(marker).touch()
    time.sleep(300)
    return {}
