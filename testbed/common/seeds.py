"""Seeds of all random choices of a run, derived from the scenario's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the purpose described by ``names``, independent of the seeds of other purposes.

    The seed is the same on every host and Python version, unlike ``hash``. Names must not contain a slash.

    >>> derive(7, "weights", 3)
    6438954608968244763
    """
    text = "/".join(map(str, (seed, *names)))
    return _seed_of(hashlib.sha256(text.encode()).digest())


def make_deriver(seed: int, *names: str | int) -> Callable[[str | int], int]:
    """Return a function of the last name with the same seeds as `derive`.

    The function is faster where many seeds share the other names, because these are hashed only once.

    >>> make_deriver(7, "weights")(3) == derive(7, "weights", 3)
    True
    """
    # The empty last name makes the prefix end with a slash.
    prefix = "/".join(map(str, (seed, *names, "")))
    prefix_hash = hashlib.sha256(prefix.encode())

    def derive_last(name: str | int) -> int:
        full_hash = prefix_hash.copy()
        full_hash.update(str(name).encode())
        return _seed_of(full_hash.digest())

    return derive_last


def _seed_of(digest: bytes) -> int:
    # 63 bits: torch and SQL databases read seeds as signed numbers.
    return int.from_bytes(digest[:8], "big") >> 1
