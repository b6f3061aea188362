"""A scenario that violates something, made as small as it can be while it still does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from testbed.common.errors import Key
from tools.stress.generate import Tree

MOST = 200
"""Scenarios that are tried at most."""


def reduced(tree: Tree, violates: Callable[[Tree], bool]) -> Tree:
    """Return a smaller scenario that still violates: takes the first smaller one that does, until none does."""
    tried = 0
    while True:
        for smaller in _smaller(tree):
            tried += 1
            if tried > MOST:
                return tree
            if violates(smaller):
                tree = smaller
                break
        else:
            return tree


def _smaller(tree: Tree) -> Iterator[Tree]:
    """Yield scenarios that lack one thing of this one, the largest things first."""
    for key in [*_faults(tree), *_devices(tree), *_options(tree)]:
        yield _changed(tree, key)
    for name in ("steps", "requests"):
        count = tree["workload"].get(name, 0)
        for fewer in sorted({count // 2, count - 1}):
            if fewer > 0:
                yield _changed(tree, ("workload", name), fewer)


def _faults(tree: Tree) -> Iterator[Key]:
    """Yield faults that no other counts from."""
    for number in range(len(tree["faults"])):
        if not any(
            "after" in following
            for following in tree["faults"][number + 1 : number + 2]
        ):
            yield ("faults", number)


def _devices(tree: Tree) -> Iterator[Key]:
    """Yield devices that nothing else names; two are left."""
    named = f"{tree['faults']} {tree['network'].get('links')}"
    for name in list(tree["devices"])[1:]:
        if len(tree["devices"]) > 2 and f"'{name}'" not in named:
            yield ("devices", name)


def _options(tree: Tree) -> Iterator[Key]:
    """Yield keys that have defaults."""
    yield from (("network", key) for key in tree["network"] if key != "link")
    yield from (("network", "link", key) for key in tree["network"]["link"])
    yield from (
        ("devices", name, key)
        for name, device in tree["devices"].items()
        for key in device
    )
    yield from (
        ("workload", "method", key)
        for key in tree["workload"]["method"]
        if key != "name"
    )
    if len(tree["workload"]["model"]["hidden"]) > 1:
        yield (
            "workload",
            "model",
            "hidden",
            len(tree["workload"]["model"]["hidden"]) - 1,
        )
    if "training" in tree["workload"]:
        yield ("workload", "training")


def _changed(tree: Tree, key: Key, value: object = None) -> Tree:
    """Return a copy with another value at a key, or without the key."""
    other = copy.deepcopy(tree)
    place: Any = other
    for part in key[:-1]:
        place = place[part]
    if value is None:
        del place[key[-1]]
    else:
        place[key[-1]] = value
    return other
