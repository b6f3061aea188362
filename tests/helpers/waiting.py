"""Polling for a condition, for tests that cannot know how long a busy host takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return as soon as a condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition still false after {seconds} s"
        time.sleep(0.02)
