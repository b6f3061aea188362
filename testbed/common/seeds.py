"""Every random choice of a run comes from the scenario's seed through here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for one purpose, independent of every other purpose.

    The seed is the same on every host and Python version, unlike ``hash``.

    >>> derive(7, "weights", 3)
    6438954608968244763
    """
    text = "/".join(map(str, (seed, *names)))
    digest = hashlib.sha256(text.encode()).digest()
    # 63 bits: torch and SQL databases read seeds as signed numbers.
    return int.from_bytes(digest[:8], "big") >> 1


def deriving(seed: int, *names: str | int) -> Callable[[str | int], int]:
    """Return `derive` with all names except the last bound, which is faster for many purposes.

    >>> deriving(7, "weights")(3) == derive(7, "weights", 3)
    True
    """
    # The empty text leaves a "/" at the end, to which the last name is added.
    begun = hashlib.sha256("/".join(map(str, (seed, *names, ""))).encode())

    def derive_last(name: str | int) -> int:
        text = begun.copy()
        text.update(str(name).encode())
        return int.from_bytes(text.digest()[:8], "big") >> 1

    return derive_last
