"""What workers of a cluster run in tests; imported by each of them again, so it imports next to nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path


def deadly(files: dict[str, str], _argv: list[str], _version: str, number: int, *_: object) -> dict[str, bytes]:
    """End the worker of the second trial."""
    if number == 1:
        with Path(files["counts"]).open("a") as file:
            file.write("x")
        os._exit(1)
    return {"figure": b"1"}


def deadly_twice(files: dict[str, str], _argv: list[str], _version: str, number: int, *_: object) -> dict[str, bytes]:
    """End the workers of the first two trials, twice each."""
    deaths = Path(f"{files['counts']}{number}")
    if number < 2 and (not deaths.exists() or len(deaths.read_text()) < 2):
        with deaths.open("a") as file:
            file.write("x")
        os._exit(1)
    return {"figure": b"1"}


def endless(files: dict[str, str], _argv: list[str], _version: str, _number: int, *_: object) -> dict[str, bytes]:
    """Say that it has begun, and go on for long."""
    Path(files["begun"]).touch()
    time.sleep(300)
    return {}
