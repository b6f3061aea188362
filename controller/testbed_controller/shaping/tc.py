"""``tc``: run once for all that is to be changed on a device and read back of it; and HTB classes in its words.

Every class of a link lies below the device's access class and borrows all it sends from there, up to its own ceiling:
so an uplink or a downlink can be set and lifted live, and the links in use share it evenly, packet by packet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import ACCESS_CLASS, CEILING, DEFAULT_CLASS, FRAME, Access, burst

Entries = Sequence[Mapping[str, Any]]
_OWN = "rate 1000bit burst 1"
"""What a class may send without borrowing: so little that it never counts against what is shared."""
_CLASS = re.compile(
    r"^class htb ([0-9a-f]+):([0-9a-f]+) .*?\bceil (\d+)([KMGT]?)bit .*?\bcburst (\d+)([KM]?)b", re.MULTILINE
)
_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20}


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


@dataclass(frozen=True)
class Tree:
    """The classes of one interface; the number distinguishes those of two interfaces in what ``tc`` shows."""

    device: str
    number: int

    def root(self, access: Access | None) -> list[str]:
        """Return the lines that make the root: the class of what no link claims, and the access class."""
        return [
            f"qdisc replace dev {self.device} root handle {self.number:x}: htb default {DEFAULT_CLASS:x}",
            self._top("add", DEFAULT_CLASS, CEILING),
            self._top("add", ACCESS_CLASS, _rate(access)),
        ]

    def change_access(self, access: Access | None) -> str:
        """Return the line that changes what all links' classes share."""
        return self._top("change", ACCESS_CLASS, _rate(access))

    def leaf(self, verb: str, number: int, rate: int) -> str:
        """Return the line that adds, changes or replaces the class of a link."""
        place = f"dev {self.device} parent {self.identity(ACCESS_CLASS)} classid {self.identity(number)}"
        return f"class {verb} {place} htb {_OWN} ceil {rate}bit cburst {burst(rate)} quantum {FRAME}"

    def remove(self, number: int) -> str:
        """Return the line that removes the class of a link."""
        return f"class del dev {self.device} classid {self.identity(number)}"

    def identity(self, number: int) -> str:
        """Return a class as ``tc`` writes it."""
        return f"{self.number:x}:{number:x}"

    def _top(self, verb: str, number: int, rate: int) -> str:
        bucket = burst(rate)
        words = f"htb rate {rate}bit ceil {rate}bit burst {bucket} cburst {bucket} quantum {FRAME}"
        return f"class {verb} dev {self.device} parent {self.number:x}: classid {self.identity(number)} {words}"

    def differences(self, shown: str, access: Access | None, rates: Iterable[tuple[int, int]]) -> list[str]:
        """Compare what ``tc class show`` says with the rates that classes should have."""
        held = _parse(shown)
        problems = []
        for number, rate in [(ACCESS_CLASS, _rate(access)), *rates]:
            found, bucket = held.get((self.number, number)), burst(rate)
            if found is None:
                problems.append(f"class {self.identity(number)} is missing")
            elif abs(found.rate - rate) > 0.002 * rate:
                problems.append(f"class {self.identity(number)} has a rate of {found.rate} bit/s instead of {rate}")
            # tc counts a bucket in the time that its content takes, in microseconds.
            elif abs(found.burst - bucket) > 0.01 * bucket + 1e-6 * rate / 8 + 1:
                problems.append(f"class {self.identity(number)} has a bucket of {found.burst} bytes, not {bucket}")
        return problems


def _rate(access: Access | None) -> int:
    return CEILING if access is None else access.rate


@dataclass(frozen=True)
class _Held:
    """A class as the kernel shows it, in the precision in which that prints."""

    rate: int
    burst: int


def _parse(shown: str) -> dict[tuple[int, int], _Held]:
    """Read ``tc class show``, perhaps of several interfaces."""
    return {
        (int(tree, 16), int(number, 16)): _Held(int(rate) * _FACTOR[unit], int(bucket) * _BINARY[bucket_unit])
        for tree, number, rate, unit, bucket, bucket_unit in _CLASS.findall(shown)
    }
