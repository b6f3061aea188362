"""What workers of a cluster run in tests; imported by each of them again, so it imports next to nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path


def kill_second_worker(
    counts: str, _files: object, _argv: list[str], _version: str, place: str, *_: object
) -> dict[str, bytes]:
    """End the worker of the second trial."""
    if place.endswith("run1"):
        with Path(counts).open("a") as file:
            file.write("x")
        os._exit(1)
    return {"figure": b"1"}


def kill_workers_twice(
    counts: str, _files: object, _argv: list[str], _version: str, place: str, *_: object
) -> dict[str, bytes]:
    """End the workers of the first two trials, twice each."""
    number = int(place[-1])
    deaths = Path(f"{counts}{number}")
    if number < 2 and (not deaths.exists() or len(deaths.read_text()) < 2):
        with deaths.open("a") as file:
            file.write("x")
        os._exit(1)
    return {"figure": b"1"}


def return_folder_path(
    _counts: str,
    _files: object,
    _argv: list[str],
    _version: str,
    place: str,
    *_: object,
) -> dict[str, bytes]:
    """Return a file with the path of the results folder."""
    return {"place": place.encode()}


def touch_and_sleep(begun: str, *_: object) -> dict[str, bytes]:
    """Create a file to report the beginning, and continue for long."""
    Path(begun).touch()
    time.sleep(300)
    return {}
