"""Reduction of a scenario with a violation to a smaller one with the same violation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from testbed.common.errors import Key
from tools.stress.generate import Tree

MAX_TRIALS = 200
"""Maximum number of variants that are tried."""


def reduce_scenario(tree: Tree, violates: Callable[[Tree], bool]) -> Tree:
    """Return a smaller scenario for which ``violates`` is still true.

    Replaces the scenario by its first smaller variant with the violation, until no variant has the violation.
    """
    trial_count = 0
    while True:
        # From the first variant again after each success: a part may be removable only without another one.
        for variant in _smaller_variants(tree):
            trial_count += 1
            if trial_count > MAX_TRIALS:
                return tree
            if violates(variant):
                tree = variant
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
        for smaller_count in sorted({count // 2, count - 1}):
            if smaller_count > 0:
                yield _change_value(tree, ("workload", name), smaller_count)


def _removable_faults(tree: Tree) -> Iterator[Key]:
    """Yield removable faults: those after which no other fault is scheduled by ``after``."""
    faults = tree["faults"]
    for number in range(len(faults)):
        is_last = number + 1 == len(faults)
        if is_last or "after" not in faults[number + 1]:
            yield ("faults", number)


def _removable_devices(tree: Tree) -> Iterator[Key]:
    """Yield the devices that no fault and no entry of `links` names, as long as more than two devices remain."""
    # Python's notation of these parts has the quoted names of devices.
    parts_text = f"{tree['faults']} {tree['network'].get('links')}"
    # The first device is the coordinator, which every method needs.
    for name in list(tree["devices"])[1:]:
        if len(tree["devices"]) > 2 and f"'{name}'" not in parts_text:
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
    # A deep copy, since further variants are made from the same scenario.
    variant = copy.deepcopy(tree)
    parent: Any = variant
    for part in key[:-1]:
        parent = parent[part]
    if value is None:
        del parent[key[-1]]
    else:
        parent[key[-1]] = value
    return variant
