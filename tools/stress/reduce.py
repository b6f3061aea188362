"""Reduction of a scenario with a violation to a smaller one with the same violation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from testbed.common.errors import Key
from tools.stress.generate import Tree

MOST = 200
"""Maximum number of scenarios tried."""


def reduce_scenario(tree: Tree, violates: Callable[[Tree], bool]) -> Tree:
    """Return a smaller scenario for which ``violates`` is still true.

    Replaces the scenario by its first smaller variant with the violation, until no variant has the violation.
    """
    tried = 0
    while True:
        # From the first variant again after each success: a part may be removable only without another one.
        for smaller in _smaller_variants(tree):
            tried += 1
            if tried > MOST:
                return tree
            if violates(smaller):
                tree = smaller
                break
        else:
            return tree


def _smaller_variants(tree: Tree) -> Iterator[Tree]:
    """Yield variants of a scenario, each without one part, the largest parts first."""
    parts = [*_removable_faults(tree), *_removable_devices(tree)]
    for key in [*parts, *_optional_keys(tree)]:
        yield _change_value(tree, key)
    for name in ("steps", "requests"):
        count = tree["workload"].get(name, 0)
        for fewer in sorted({count // 2, count - 1}):
            if fewer > 0:
                yield _change_value(tree, ("workload", name), fewer)


def _removable_faults(tree: Tree) -> Iterator[Key]:
    """Yield removable faults; a fault stays if the next fault is scheduled relative to the first one."""
    faults = tree["faults"]
    for number in range(len(faults)):
        following = faults[number + 1 : number + 2]
        if not any("after" in fault for fault in following):
            yield ("faults", number)


def _removable_devices(tree: Tree) -> Iterator[Key]:
    """Yield the devices without a fault or a link of their own, as long as more than two remain."""
    named = f"{tree['faults']} {tree['network'].get('links')}"
    # The first device is the coordinator, which every method needs.
    for name in list(tree["devices"])[1:]:
        if len(tree["devices"]) > 2 and f"'{name}'" not in named:
            yield ("devices", name)


def _optional_keys(tree: Tree) -> Iterator[Key]:
    """Yield the keys with defaults."""
    for key in tree["network"]:
        if key != "link":
            yield ("network", key)
    for key in tree["network"]["link"]:
        yield ("network", "link", key)
    for name, device in tree["devices"].items():
        for key in device:
            yield ("devices", name, key)
    workload = tree["workload"]
    for key in workload["method"]:
        if key != "name":
            yield ("workload", "method", key)
    layers = len(workload["model"]["hidden"])
    if layers > 1:
        yield ("workload", "model", "hidden", layers - 1)
    if "training" in workload:
        yield ("workload", "training")


def _change_value(tree: Tree, key: Key, value: object = None) -> Tree:
    """Return a copy with another value at a key, or without the key for None."""
    # A deep copy, as the scenario may still be tried without another part.
    other = copy.deepcopy(tree)
    place: Any = other
    for part in key[:-1]:
        place = place[part]
    if value is None:
        del place[key[-1]]
    else:
        place[key[-1]] = value
    return other
