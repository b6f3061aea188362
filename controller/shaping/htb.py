"""HTB classes in the words of ``tc``: one of a rate of its own, and those that share it. Pure.

Every class of a link lies below the device's access class and borrows all it sends from there, up to its own ceiling:
so an uplink or a downlink can be set and lifted live, and the links in use share it evenly, packet by packet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from controller.shaping.plan import ACCESS_CLASS, CEILING, DEFAULT_CLASS, FRAME, Access, burst

_OWN = "rate 1000bit burst 1"
"""What a class may send without borrowing: so little that it never counts against what is shared."""
_CLASS = re.compile(r"^class htb 1:([0-9a-f]+) .*?\bceil (\d+)([KMGT]?)bit .*?\bcburst (\d+)([KM]?)b", re.MULTILINE)
_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Held:
    """A class as the kernel shows it, in the precision in which that prints."""

    rate: int
    """bit/s"""
    burst: int
    """Bytes"""


def root(device: str, access: Access | None) -> list[str]:
    """Return the lines that make the tree's root: the class of what no link claims, and the access class."""
    return [
        f"qdisc replace dev {device} root handle 1: htb default {DEFAULT_CLASS:x}",
        f"class add dev {device} parent 1: classid 1:{DEFAULT_CLASS:x} {_alone(CEILING)}",
        f"class add dev {device} parent 1: classid 1:{ACCESS_CLASS:x} {_alone(_rate(access))}",
    ]


def change_access(device: str, access: Access | None) -> str:
    """Return the line that changes what all classes share."""
    return f"class change dev {device} parent 1: classid 1:{ACCESS_CLASS:x} {_alone(_rate(access))}"


def leaf(verb: str, device: str, number: int, rate: int) -> str:
    """Return the line that adds, changes or replaces the class of a link."""
    bucket = burst(rate)
    words = f"htb {_OWN} ceil {rate}bit cburst {bucket} quantum {FRAME}"
    return f"class {verb} dev {device} parent 1:{ACCESS_CLASS:x} classid 1:{number:x} {words}"


def _alone(rate: int) -> str:
    bucket = burst(rate)
    return f"htb rate {rate}bit ceil {rate}bit burst {bucket} cburst {bucket} quantum {FRAME}"


def _rate(access: Access | None) -> int:
    return CEILING if access is None else access.rate


def parse(shown: str) -> dict[int, Held]:
    """Read ``tc class show``: class number -> what is held."""
    return {
        int(number, 16): Held(int(rate) * _FACTOR[unit], int(bucket) * _BINARY[bucket_unit])
        for number, rate, unit, bucket, bucket_unit in _CLASS.findall(shown)
    }


def differences(shown: str, access: Access | None, rates: Iterable[tuple[int, int]]) -> list[str]:
    """Compare what ``tc class show`` says with the rates that classes should have."""
    held = parse(shown)
    problems = []
    for number, rate in [(ACCESS_CLASS, _rate(access)), *rates]:
        found = held.get(number)
        if found is None:
            problems.append(f"class 1:{number:x} is missing")
        elif abs(found.rate - rate) > 0.002 * rate:
            problems.append(f"class 1:{number:x} has a rate of {found.rate} bit/s instead of {rate}")
        # tc counts a bucket in the time that its content takes, in microseconds.
        elif abs(found.burst - burst(rate)) > 0.01 * burst(rate) + 1e-6 * rate / 8 + 1:
            problems.append(f"class 1:{number:x} has a bucket of {found.burst} bytes instead of {burst(rate)}")
    return problems
