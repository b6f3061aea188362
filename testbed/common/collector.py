"""All settings of Python's garbage collector, each with its reason.

Nearly all objects of a run are either kept, as events and modules, or freed at once by their reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARE = (100_000, 50, 100)
"""Thresholds of the collector's three generations, see `gc.set_threshold`. With Python's default of 700 objects,
there was a collection every few events, none of which found garbage."""


def collect_garbage_rarely() -> None:
    """Raise the collection threshold: a command line mostly imports modules, which stay in memory."""
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
    """Disable collection within a block of imports and exempt the imported objects afterwards."""
    gc.disable()
    try:
        yield
    finally:
        # Modules live as long as the process: looking through them again finds nothing.
        gc.freeze()
        gc.enable()


def skip_garbage_at_exit() -> None:
    """Exempt all present objects, because Python's last collection would search torch's modules for 0.6 s."""
    gc.freeze()


def never_collect() -> None:
    """Disable collection in a process without reference cycles, for timely handling of packets."""
    gc.disable()
