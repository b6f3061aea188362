"""The sending side as ``tc`` commands: an HTB tree that is built once and then changed leaf by leaf. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from socket import inet_aton
from typing import Any

from testbed_controller.shaping.plan import InterfacePlan, SenderClass
from testbed_controller.shaping.tc import Tree


def build(plan: InterfacePlan) -> list[str]:
    """Return the ``tc -batch`` lines for building the tree on an interface.

    Packets without a class (ARP, other destinations) pass the default class without impairments.
    """
    device = plan.interface
    return [
        # HTB cannot replace HTB, which would be necessary after an incomplete attempt.
        f"qdisc replace dev {device} root handle 2: pfifo",
        *_tree_of(plan).root(plan.uplink),
        *(line for one in plan.senders for line in _add_class(device, one)),
    ]


def change(old: InterfacePlan, new: InterfacePlan) -> list[str]:
    """Return the lines for changing one plan's tree into another's, leaving equal leaves alone."""
    device = new.interface
    before = {one.number: one for one in old.senders}
    after = {one.number: one for one in new.senders}
    lines: list[str] = []
    if old.uplink != new.uplink:
        lines.append(_tree_of(new).change_access(new.uplink))
    for number in before.keys() - after.keys():
        lines += [_remove_filter(device, before[number]), _tree_of(new).remove(number)]
    for number, one in after.items():
        previous = before.get(number)
        if previous is None:
            lines += _add_class(device, one)
        elif previous != one:
            lines += _change_class(device, previous, one)
    return lines


def _tree_of(plan: InterfacePlan) -> Tree:
    return Tree(plan.interface, 1)


def _add_filter(device: str, one: SenderClass) -> str:
    match = f"u32 match ip dst {one.address}/32 flowid 1:{one.number:x}"
    return f"filter add dev {device} parent 1: protocol ip prio 1 handle 800::{one.number:x} {match}"


def _add_class(device: str, one: SenderClass) -> list[str]:
    return [
        Tree(device, 1).leaf("add", one.number, one.rate),
        f"qdisc add dev {device} parent 1:{one.number:x} handle {one.number:x}: pfifo limit {one.limit}",
        _add_filter(device, one),
    ]


def _remove_filter(device: str, one: SenderClass) -> str:
    return f"filter del dev {device} parent 1: protocol ip prio 1 handle 800::{one.number:x} u32"


def _change_class(device: str, old: SenderClass, new: SenderClass) -> list[str]:
    lines = []
    if old.rate != new.rate:
        lines.append(Tree(device, 1).leaf("change", new.number, new.rate))
    if old.limit != new.limit:
        lines.append(
            f"qdisc change dev {device} parent 1:{new.number:x} handle {new.number:x}: pfifo limit {new.limit}"
        )
    if old.address != new.address:
        # Replacing a u32 filter keeps its old match, so the filter is removed and added.
        lines += [_remove_filter(device, old), _add_filter(device, new)]
    return lines


def differences(
    plan: InterfacePlan,
    classes: str,
    qdiscs: Sequence[Mapping[str, Any]],
    filters: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Compare a plan with ``tc class show``, ``tc -j qdisc show`` and ``tc -j filter show``."""
    limits = {
        entry["handle"]: entry["options"].get("limit")
        for entry in qdiscs
        if entry.get("kind") == "pfifo"
    }
    flows = {
        entry["options"]["match"]["value"].rjust(8, "0"): entry["options"].get("flowid")
        for entry in filters
        if "match" in entry.get("options", {})
    }
    problems = _tree_of(plan).differences(
        classes, plan.uplink, ((one.number, one.rate) for one in plan.senders)
    )
    for one in plan.senders:
        if limits.get(f"{one.number:x}:") != one.limit:
            problems.append(
                f"queue {one.number:x}: holds {limits.get(f'{one.number:x}:')} packets, not {one.limit}"
            )
        flow = flows.get(inet_aton(one.address).hex())
        if flow != f"1:{one.number:x}":
            problems.append(
                f"packets to {one.address} go to class {flow} instead of 1:{one.number:x}"
            )
    return problems
