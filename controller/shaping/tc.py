"""Runs ``tc``, once for all that is to be changed on a device and read back of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.shaping.namespaces import command

Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """What the kernel holds in the calling thread's namespace."""

    classes: str
    """Classes of the interfaces asked for, as ``tc class show`` prints them."""
    qdiscs: Entries
    """Queueing disciplines of all interfaces."""
    filters: Sequence[Entries]
    """Filters of the (interface, parent) asked for, in that order."""


def run(
    lines: Sequence[str], classes: Sequence[str], filters: Sequence[tuple[str, str]], tables: str | None = None
) -> Shown:
    """Carry out lines of ``tc -batch`` and read back the classes and filters of these interfaces and parents.

    ``tables`` is the folder of the distributions that netem may be given. Raises HostError naming the line that the
    kernel refused.
    """
    reads = [f"class show dev {device}" for device in classes]
    reads += ["qdisc show", *(f"filter show dev {device} parent {parent}" for device, parent in filters)]
    environment = None if tables is None else {**os.environ, "TC_LIB_DIR": tables}
    shown = command(["tc", "-j", "-batch", "-"], "\n".join([*lines, *reads]) + "\n", environment)
    # Classes come as text whatever is asked for, all else as one JSON array per line read.
    texts = shown.splitlines()
    arrays = [json.loads(text) for text in texts if text.startswith("[")]
    return Shown("\n".join(text for text in texts if text.startswith("class ")), arrays[0], arrays[1:])
