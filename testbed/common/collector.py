"""All settings of Python's garbage collector, each with its reason.

Nearly all objects of a run are either kept, as events and modules, or freed at once by their reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARE = (100_000, 50, 100)
"""Thresholds of the collector's generations, see `gc.set_threshold`. With Python's default (700 or 2,000 objects, by
version), a collection began every few events, and no collection found garbage."""


def collect_garbage_rarely() -> None:
    """Raise the collection threshold for the whole process: a command mostly imports modules, which stay in memory."""
    gc.set_threshold(*_RARE)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Raise the collection threshold within the block, since a simulation keeps all events."""
    before = gc.get_threshold()
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def keep_imports() -> Iterator[None]:
    """Disable collection within a block of imports, and afterwards exempt all present objects from collection.

    Collection is enabled after the block, also if disabled before.
    """
    gc.disable()
    try:
        yield
    finally:
        # Modules live as long as the process: looking through them again finds nothing.
        gc.freeze()
        gc.enable()


def skip_garbage_at_exit() -> None:
    """Exempt all present objects from Python's collection at exit, which searches torch's modules for 0.6 s."""
    gc.freeze()


def never_collect() -> None:
    """Disable collection in a process without reference cycles, for timely handling of packets."""
    gc.disable()
