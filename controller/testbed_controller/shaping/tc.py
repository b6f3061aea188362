"""Execution of ``tc`` commands in one batch with read-back, and HTB classes as ``tc`` commands.

The class of each link is below the device's access class and borrows all its rate from there, up to its own ceiling.
Therefore an uplink or a downlink can be set and lifted live, and active links share it evenly, packet by packet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import (
    ACCESS_CLASS,
    CEILING,
    DEFAULT_CLASS,
    FRAME,
    Access,
    burst,
)

Entries = Sequence[Mapping[str, Any]]
"""Objects of one JSON array printed by ``tc -j``."""
_OWN = "rate 1000bit burst 1"
"""Guaranteed rate of a class: too small to reduce the shared rate."""
# Without an explicit quantum, HTB derives one from the guaranteed rate: below 1,000 bytes for _OWN, with a warning in
# the kernel's log, and 200,000 bytes for CEILING, so that a link would send a hundred frames in its turn.
_QUANTUM = f"quantum {FRAME}"
_CLASS = re.compile(
    r"^class htb ([0-9a-f]+):([0-9a-f]+) .*?\bceil (\d+)([KMGT]?)bit .*?\bcburst (\d+)([KM]?)b",
    re.MULTILINE,
)
# tc prints rates with decimal prefixes, and sizes with binary ones.
_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Shown:
    """The state of the kernel in the calling thread's namespace."""

    classes: str
    """Classes of the requested interfaces, as printed by ``tc class show``."""
    qdiscs: Entries
    """Queueing disciplines of all interfaces."""
    filters: Sequence[Entries]
    """Filters of the requested (interface, parent) pairs, in order."""


def run_batch(
    lines: Sequence[str],
    classes: Sequence[str],
    filters: Sequence[tuple[str, str]],
    tables: str | None = None,
) -> Shown:
    """Execute ``tc -batch`` lines, then read back the classes and filters of these interfaces and parents.

    ``tables`` is the folder of netem's delay distributions. Raises HostError with the refused line.
    """
    reads = [f"class show dev {device}" for device in classes]
    reads.append("qdisc show")
    reads += [f"filter show dev {device} parent {parent}" for device, parent in filters]
    environment = None if tables is None else {**os.environ, "TC_LIB_DIR": tables}
    batch = "\n".join([*lines, *reads]) + "\n"
    shown = command(["tc", "-j", "-batch", "-"], batch, environment)
    # tc prints classes as text even with -j, and all else as one JSON array per command.
    class_lines = []
    arrays = []
    for text in shown.splitlines():
        if text.startswith("class "):
            class_lines.append(text)
        elif text.startswith("["):
            arrays.append(json.loads(text))
    # In the order of the commands: the queueing disciplines first, then the filters.
    return Shown("\n".join(class_lines), arrays[0], arrays[1:])


@dataclass(frozen=True)
class Tree:
    """The HTB classes of one interface; ``number`` distinguishes two trees in the output of ``tc``.

    >>> Tree("eth0", 1).remove(0x11)
    'class del dev eth0 classid 1:11'
    """

    device: str
    number: int

    def root(self, access: Access | None) -> list[str]:
        """Return the lines for the root with the default class and the access class."""
        return [
            f"qdisc replace dev {self.device} root handle {self.number:x}: htb default {DEFAULT_CLASS:x}",
            self._top_class("add", DEFAULT_CLASS, CEILING),
            self._top_class("add", ACCESS_CLASS, _access_rate(access)),
        ]

    def change_access(self, access: Access | None) -> str:
        """Return the line for changing the rate shared by all links."""
        return self._top_class("change", ACCESS_CLASS, _access_rate(access))

    def leaf(self, verb: str, number: int, rate: int) -> str:
        """Return the line for adding, changing or replacing the class of a link."""
        place = f"dev {self.device} parent {self.identity(ACCESS_CLASS)} classid {self.identity(number)}"
        return f"class {verb} {place} htb {_OWN} ceil {rate}bit cburst {burst(rate)} {_QUANTUM}"

    def remove(self, number: int) -> str:
        """Return the line for removing the class of a link."""
        return f"class del dev {self.device} classid {self.identity(number)}"

    def identity(self, number: int) -> str:
        """Return a class ID in the syntax of ``tc``."""
        return f"{self.number:x}:{number:x}"

    def _top_class(self, verb: str, number: int, rate: int) -> str:
        bucket = burst(rate)
        words = f"htb rate {rate}bit ceil {rate}bit burst {bucket} cburst {bucket} {_QUANTUM}"
        return f"class {verb} dev {self.device} parent {self.number:x}: classid {self.identity(number)} {words}"

    def differences(
        self, observed: str, access: Access | None, rates: Iterable[tuple[int, int]]
    ) -> list[str]:
        """Compare the output of ``tc class show`` with the rates of the classes."""
        held = _parse_classes(observed)
        problems = []
        for number, rate in [(ACCESS_CLASS, _access_rate(access)), *rates]:
            present = held.get((self.number, number))
            bucket = burst(rate)
            if present is None:
                problems.append(f"class {self.identity(number)} is missing")
            # tc prints a rate with few digits.
            elif abs(present.rate - rate) > 0.002 * rate:
                problems.append(
                    f"class {self.identity(number)} has a rate of {present.rate} bit/s instead of {rate}"
                )
            # tc stores a bucket as its transmission time, rounded to microseconds.
            elif abs(present.burst - bucket) > 0.01 * bucket + 1e-6 * rate / 8 + 1:
                problems.append(
                    f"class {self.identity(number)} has a bucket of {present.burst} bytes instead of {bucket}"
                )
        return problems


def _access_rate(access: Access | None) -> int:
    return CEILING if access is None else access.rate


@dataclass(frozen=True)
class _Held:
    """A class as printed by the kernel, with limited precision."""

    rate: int
    burst: int


def _parse_classes(output: str) -> dict[tuple[int, int], _Held]:
    """Parse the output of ``tc class show`` for one or several interfaces."""
    classes = {}
    for tree, number, rate, unit, bucket, bucket_unit in _CLASS.findall(output):
        bits = int(rate) * _FACTOR[unit]
        size = int(bucket) * _BINARY[bucket_unit]
        classes[int(tree, 16), int(number, 16)] = _Held(bits, size)
    return classes
