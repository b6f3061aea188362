"""Execution of ``tc`` commands in one batch with read-back, and HTB classes as ``tc`` commands.

HTB, the hierarchical token bucket, limits the rate of each class of packets. The class of each link is a child of the
device's access class, from which it borrows all its rate, up to its own ceiling. Therefore an uplink or a downlink can
be set and lifted while packets pass, and active links share it evenly, packet by packet.
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
_GUARANTEE = "rate 1000bit burst 1"
"""Guaranteed rate of a link's class: too small to reduce the rate that other links can borrow."""
# The quantum is the data that a class may send in its turn. By default, HTB derives it from the guaranteed rate: below
# 1,000 bytes for _GUARANTEE, with a warning in the kernel's log, and 200,000 bytes, a hundred frames, for CEILING.
_QUANTUM = f"quantum {FRAME}"
# The fields: number of the tree, number of the class, ceiling with prefix, bucket of the ceiling with prefix.
_CLASS_PATTERN = re.compile(
    r"^class htb ([0-9a-f]+):([0-9a-f]+) .*?\bceil (\d+)([KMGT]?)bit .*?\bcburst (\d+)([KM]?)b",
    re.MULTILINE,
)
# tc prints rates with decimal prefixes, and sizes with binary ones.
_RATE_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class KernelState:
    """The classes, queues and filters in the calling thread's namespace, as ``tc`` prints them."""

    classes: str
    """Classes of the requested interfaces, as printed by ``tc class show``."""
    qdiscs: Entries
    """Queueing disciplines of all interfaces."""
    filters: Sequence[Entries]
    """Filters of the requested (interface, parent) pairs, in order."""


def run_batch(
    lines: Sequence[str],
    classes: Sequence[str] = (),
    filters: Sequence[tuple[str, str]] = (),
    tables: str | None = None,
) -> KernelState:
    """Execute ``tc -batch`` lines, then read back the state of the kernel.

    ``classes`` are the interfaces whose classes are read, ``filters`` the pairs (interface, parent) whose filters are
    read, and ``tables`` is the folder of netem's delay distributions. Raises HostError with the refused line.
    """
    reads = [f"class show dev {interface}" for interface in classes]
    reads.append("qdisc show")
    for interface, parent in filters:
        reads.append(f"filter show dev {interface} parent {parent}")
    environment = None if tables is None else {**os.environ, "TC_LIB_DIR": tables}
    batch = "\n".join([*lines, *reads]) + "\n"
    output = command(["tc", "-j", "-batch", "-"], batch, environment)
    # tc prints classes as text even with -j, and all else as one JSON array per command.
    class_lines = []
    arrays = []
    for text in output.splitlines():
        if text.startswith("class "):
            class_lines.append(text)
        elif text.startswith("["):
            arrays.append(json.loads(text))
    # In the order of the commands: the queueing disciplines first, then the filters.
    return KernelState("\n".join(class_lines), arrays[0], arrays[1:])


@dataclass(frozen=True)
class Tree:
    """The HTB classes of one interface, as ``tc`` commands.

    ``number`` is the major number of class IDs: it distinguishes the trees of two interfaces in the output of ``tc``.

    >>> Tree("eth0", 1).remove(0x11)
    'class del dev eth0 classid 1:11'
    """

    interface: str
    number: int

    def root(self, access: Access | None) -> list[str]:
        """Return the commands for the root with the default class and the access class."""
        return [
            f"qdisc replace dev {self.interface} root handle {self.number:x}: htb default {DEFAULT_CLASS:x}",
            self._top_class("add", DEFAULT_CLASS, CEILING),
            self._top_class("add", ACCESS_CLASS, _access_rate(access)),
        ]

    def change_access(self, access: Access | None) -> str:
        """Return the command for changing the rate shared by all links."""
        return self._top_class("change", ACCESS_CLASS, _access_rate(access))

    def leaf(self, verb: str, number: int, rate: int) -> str:
        """Return the command for the class of a link, with a rate in bit/s; ``verb`` is add, change or replace."""
        place = f"dev {self.interface} parent {self.identity(ACCESS_CLASS)} classid {self.identity(number)}"
        return f"class {verb} {place} htb {_GUARANTEE} ceil {rate}bit cburst {burst(rate)} {_QUANTUM}"

    def remove(self, number: int) -> str:
        """Return the command for removing the class of a link."""
        return f"class del dev {self.interface} classid {self.identity(number)}"

    def identity(self, number: int) -> str:
        """Return a class ID in the syntax of ``tc``."""
        return f"{self.number:x}:{number:x}"

    def _top_class(self, verb: str, number: int, rate: int) -> str:
        bucket = burst(rate)
        words = f"htb rate {rate}bit ceil {rate}bit burst {bucket} cburst {bucket} {_QUANTUM}"
        return f"class {verb} dev {self.interface} parent {self.number:x}: classid {self.identity(number)} {words}"

    def differences(
        self, observed: str, access: Access | None, rates: Iterable[tuple[int, int]]
    ) -> list[str]:
        """Compare the output of ``tc class show`` with a plan; return a text for each difference.

        ``rates`` are the pairs (class number, rate in bit/s) of the links.
        """
        kernel_classes = _parse_classes(observed)
        problems = []
        for number, rate in [(ACCESS_CLASS, _access_rate(access)), *rates]:
            present = kernel_classes.get((self.number, number))
            bucket = burst(rate)
            if present is None:
                problems.append(f"class {self.identity(number)} is missing")
            # tc prints a rate with few digits, hence the tolerance.
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
class _KernelClass:
    """A class as printed by ``tc``, with limited precision."""

    rate: int
    """Ceiling in bit/s."""
    burst: int
    """Size of the bucket in bytes."""


def _parse_classes(output: str) -> dict[tuple[int, int], _KernelClass]:
    """Return the classes in the output of ``tc class show`` by number of the tree and of the class."""
    classes = {}
    for tree, number, rate, unit, bucket, bucket_unit in _CLASS_PATTERN.findall(output):
        bits = int(rate) * _RATE_FACTOR[unit]
        size = int(bucket) * _SIZE_FACTOR[bucket_unit]
        classes[int(tree, 16), int(number, 16)] = _KernelClass(bits, size)
    return classes
